// Token embeddings out of a matrix, such as a head's that is tied to them.
#pragma once

#include <cstdint>

#include "float_linear.h"
#include "int4_linear.h"
#include "linear.h"
#include "parallel.h"

namespace onward {

// `output` `[num_ids, K]` = columns `ids` of the matrix, each in 0 ... N - 1: their numbers, or codes times scales.
//
// Needs what a product with the matrix needs.
template <typename Number>
void look_up(const Parallel& parallel, const int64_t* ids, int64_t num_ids, const FloatMatrix<Number>& matrix,
             float* output);
void look_up(const Parallel& parallel, const int64_t* ids, int64_t num_ids, const Int8Matrix& matrix, float* output);
void look_up(const Parallel& parallel, const int64_t* ids, int64_t num_ids, const Int4Matrix& matrix, float* output);

}  // namespace onward
