// Products of float32 rows with a matrix in float32 or bfloat16, in PyTorch's layout.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

// A number of 16 bits: the upper half of a float32.
struct Bfloat16 {
  uint16_t bits;
};

// What a product does besides reading its matrix `[K, N]`.
struct FloatProduct {
  int64_t num_rows;     // K
  int64_t num_columns;  // N
  const float* bias;    // [N], or nullptr for none
  bool is_gelu;         // whether to apply GELU to the output
};

// A matrix as PyTorch stores it, `[N, K]`: a column of the product's right side is contiguous. Number is float or
// Bfloat16.
template <typename Number>
struct FloatMatrix : FloatProduct {
  const Number* weights;  // [N, stride], the first K of each row are used
  int64_t stride;         // numbers from one column to the next
};

// The best stride for a copy of the columns: columns a power of two apart share few sets of the L1 cache.
template <typename Number>
int64_t best_stride(int64_t num_rows) {
  constexpr int64_t kAliased = 4096 / sizeof(Number), kLine = 64 / sizeof(Number);
  return num_rows % kAliased == 0 ? num_rows + kLine : num_rows;
}

// Whether this processor has the instructions that the product below needs.
bool can_multiply_floats();

// `output` `[num_rows, N]` = rows `[num_rows, K]` times matrix, plus bias, then GELU if `is_gelu`.
//
// Batch-invariant: a number is 16 chains of additions, chain c over k = c, c + 16, c + 32, ..., and then the tree of
// fold.h over the chains. So a row's result has the same bits alone, among other rows and on any thread. A matrix in
// bfloat16 gives the bits of the same numbers in float32.
template <typename Number>
void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const FloatMatrix<Number>& matrix,
              float* output);

}  // namespace onward
