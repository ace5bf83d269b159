// Products of rows with a float matrix in PyTorch's layout.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

// A matrix as PyTorch stores it, `[N, K]`: a column of the product's right side is contiguous.
struct FloatMatrix {
  const float* weights;  // [N, stride], the first K of each row are used
  int64_t num_rows;      // K
  int64_t num_columns;   // N
  int64_t stride;        // numbers from one column to the next
  const float* bias;     // [N], or nullptr for none
  bool is_gelu;          // whether to apply GELU to the output
};

// The best stride for a copy of the columns: columns a power of two apart share few sets of the L1 cache.
int64_t best_stride(int64_t num_rows);

// Whether this processor has the instructions that the product below needs.
bool can_multiply_floats();

// `output` `[num_rows, N]` = rows `[num_rows, K]` times matrix, plus bias, then GELU if `is_gelu`.
//
// Batch-invariant: a number is 16 chains of additions, chain c over k = c, c + 16, c + 32, ..., and then the tree of
// fold.h over the chains. So a row's result has the same bits alone, among other rows and on any thread.
void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const FloatMatrix& matrix, float* output);

}  // namespace onward
