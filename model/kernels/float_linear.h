// Products of rows with a stored matrix of floats, as it lies in memory.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

// A matrix as PyTorch stores it, `[N, K]`: a column of the product's right side is one stretch of memory.
struct FloatMatrix {
  const float* weights;  // [N, stride], of which K count
  int64_t num_rows;      // K
  int64_t num_columns;   // N
  int64_t stride;        // numbers from one column to the next
  const float* bias;     // [N], or nullptr for none
  bool is_gelu;          // whether what comes out is put through gelu.h
};

// How far apart columns are best laid, if they are laid anew: those a power of two apart would take the same few places
// of the nearest cache.
int64_t best_stride(int64_t num_rows);

// Whether this processor has the instructions that the product below is made of.
bool can_multiply_floats();

// `output` `[num_rows, N]` = rows `[num_rows, K]` times matrix, plus bias, through gelu where it says so.
//
// A number is 16 chains of additions, chain c over k = c, c + 16, c + 32, ..., and then the tree of fold.h over the
// chains, so that a row's result depends on nothing but the row: it has the same bits alone, among others and on any
// thread.
void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const FloatMatrix& matrix, float* output);

}  // namespace onward
