// Products of rows with a matrix of int8 weights; rows are quantized to bytes, with a scale per row.
#pragma once

#include <cstdint>

#include "activation.h"
#include "parallel.h"

namespace onward {

constexpr int64_t kPanelColumns = 32;
constexpr int64_t kGroupRows = 4;  // rows of a panel that one instruction multiplies

// A matrix `[K, N]` of bytes in ±127 as `[⌈N / 32⌉][⌈K / 4⌉][32][4]`, zero past K and N.
struct Int8Matrix {
  const int8_t* panels;
  int64_t num_rows;        // K
  int64_t num_columns;     // N
  const float* scales;     // [N]
  const float* bias;       // [N], or nullptr for none
  const int32_t* offsets;  // [N], each column's sum times the zero point of rows
  Activation activation;   // if SwiGLU, N is a multiple of 64
};

// Quantization of rows: scale = max(max |x|, 1e-30) · step, byte = round(x / scale) + zero. A row with a number that is
// not finite has a scale of NaN.
struct Rounding {
  float step;
  int32_t zero;
};

// Whether this processor has the instructions that `multiply` needs.
bool can_multiply();

// Whether the matrix is zero past K, where quantized rows hold stale bytes.
bool ends_in_zeros(const Int8Matrix& matrix);

// Writes `Int8Matrix::offsets`.
void sum_columns(const Int8Matrix& matrix, int32_t zero, int32_t* offsets);

// `output` `[num_rows, N]`, or `[num_rows, N / 2]` of SwiGLU, = rows `[num_rows, K]` times matrix, plus bias.
//
//   y = f(Σ (byte - zero) · weight · column scale · scale + bias)
//
// Batch-invariant: sums of bytes are exact, and the rest is elementwise in the order written. So a row's result depends
// on the row alone, and without GELU has the bits of ONNX Runtime's own operators.
void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Rounding& rounding,
              const Int8Matrix& matrix, float* output);

}  // namespace onward
