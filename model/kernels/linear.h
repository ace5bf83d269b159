// Products of rows with a stored matrix of bytes: rows are rounded to bytes as well, each with a scale of its own.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

constexpr int64_t kPanelColumns = 32;  // of a stored matrix lie together
constexpr int64_t kGroupRows = 4;      // of a panel lie together, as one instruction multiplies them

// A matrix `[K, N]` of bytes in ±127 as `[⌈N / 32⌉][⌈K / 4⌉][32][4]`; what is past K and N is zero.
struct Int8Matrix {
  const int8_t* panels;
  int64_t num_rows;        // K
  int64_t num_columns;     // N
  const float* scales;     // [N]
  const float* bias;       // [N], or nullptr for none
  const int32_t* offsets;  // [N], each column's sum times the byte that stands for zero in a row
  bool is_gelu;            // whether what comes out is put through gelu.h
};

// How rows are rounded: scale = max(max |x|, 1e-30) · step, byte = round(x / scale) + zero. A row with a number that is
// not finite has a scale of NaN.
struct Rounding {
  float step;
  int32_t zero;
};

// Whether this processor has the instructions that `multiply` is made of.
bool can_multiply();

// Whether what is past K is zero: there, rounded rows end in bytes of earlier ones.
bool ends_in_zeros(const Int8Matrix& matrix);

// Writes `Int8Matrix::offsets`.
void sum_columns(const Int8Matrix& matrix, int32_t zero, int32_t* offsets);

// `output` `[num_rows, N]` = rows `[num_rows, K]` times matrix, plus bias.
//
//   y = f(Σ (byte - zero) · weight · column scale · scale + bias)
//
// Sums of bytes are exact and all else is done to each number by itself in the order written, so that a row's result
// depends on nothing but the row, and has, but for gelu, the same bits as ONNX Runtime's own operators give it.
void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Rounding& rounding,
              const Int8Matrix& matrix, float* output);

}  // namespace onward
