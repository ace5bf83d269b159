// Products of rows with a stored matrix of four bits a weight, each block of weights with a scale of its own; rows are
// rounded to signed bytes, each with a scale of its own, too.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

constexpr int64_t kInt4PanelColumns = 16;  // of a stored matrix lie together
constexpr int64_t kInt4Block = 32;         // of a column have one scale

// A matrix `[K, N]` of codes 0 to 15, of which 8 stands for zero; K is a multiple of 32.
//
// `panels` `[⌈N / 16⌉][K / 32][4][16][4]`: byte `[n / 16][b][i][n % 16][j]` is column n's code of k = 32 b + 8 i + j
// plus 16 times that of k + 4. `scales` `[⌈N / 16⌉][K / 32][16]` are float16. What is past N has no effect.
struct Int4Matrix {
  const uint8_t* panels;
  const uint16_t* scales;
  int64_t num_rows;     // K
  int64_t num_columns;  // N
  const float* bias;    // [N], or nullptr for none
  bool is_gelu;         // whether what comes out is put through gelu.h
};

// `output` `[num_rows, N]` = rows `[num_rows, K]` times matrix, plus bias.
//
//   scale = max(max |x|, 1e-30) · (1 / 127)        byte = round(x / scale)
//   y = f((Σ over blocks (Σ byte · (code - 8)) · block scale) · scale + bias)
//
// A block's sum is exact, blocks are added up in their order, each by one fused multiplication and addition, and all
// else is done to each number by itself, so that a row's result depends on nothing but the row.
void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Int4Matrix& matrix, float* output);

}  // namespace onward
