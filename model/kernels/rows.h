// What is done to each row by itself between products: gates and norms.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

// Whether this processor has the instructions that these are made of.
bool can_compute_rows();

// `output` `[num_rows, width]` = silu(gate) · up, where each of `rows` `[num_rows, 2 · width]` is a gate and an up.
void swiglu(const Parallel& parallel, const float* rows, int64_t num_rows, int64_t width, float* output);

// `sums` = left + right and `output` = sums / √(mean of sums² + epsilon) · weight, all `[num_rows, width]`, weight `[width]`.
// `sums` may be one of the two.
void add_rms_norm(const Parallel& parallel, const float* left, const float* right, const float* weight, float epsilon,
                  int64_t num_rows, int64_t width, float* sums, float* output);

}  // namespace onward
