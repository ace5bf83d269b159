// Products of rows with a matrix of int4 weights, with a scale per block of weights; rows are quantized to int8, with a
// scale per row.
#pragma once

#include <cstdint>

#include "activation.h"
#include "parallel.h"

namespace onward {

constexpr int64_t kInt4PanelColumns = 16;
constexpr int64_t kInt4Block = 32;  // weights of a column that share a scale

// A matrix `[K, N]` of codes 0 to 15 with zero point 8; K is a multiple of 32.
//
// `panels` `[⌈N / 16⌉][K / 32][4][16][4]`: byte `[n / 16][b][i][n % 16][j]` is column n's code of k = 32 b + 8 i + j
// plus 16 times that of k + 4. `scales` `[⌈N / 16⌉][K / 32][16]` are float16. Columns past N have no effect.
struct Int4Matrix {
  const uint8_t* panels;
  const uint16_t* scales;
  int64_t num_rows;     // K
  int64_t num_columns;  // N
  const float* bias;    // [N], or nullptr for none
  Activation activation;  // if SwiGLU, N is a multiple of 32
};

// `output` `[num_rows, N]`, or `[num_rows, N / 2]` of SwiGLU, = rows `[num_rows, K]` times matrix, plus bias.
//
//   scale = max(max |x|, 1e-30) · (1 / 127)        byte = round(x / scale)
//   y = f((Σ over blocks (Σ byte · (code - 8)) · block scale) · scale + bias)
//
// Batch-invariant: a block's sum is exact, blocks are added in order, each by one fused multiply-add, and the rest is
// elementwise. So a row's result depends on the row alone.
void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Int4Matrix& matrix, float* output);

}  // namespace onward
