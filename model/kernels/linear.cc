#include "linear.h"

#include <immintrin.h>

#include <cstring>

#include "scratch.h"

namespace onward {

bool can_multiply() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace onward

// All above runs on any processor, all below only where it returns true.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

#include "gelu.h"
#include "lanes.h"
#include "rounding.h"

namespace onward {
namespace {

constexpr int64_t kTileRows = 8;  // with two registers of columns: sixteen sums hide the latency of one addition

// Bytes of a quantized row, in whole groups. Bytes past the row meet weights of zero.
int64_t padded(int64_t width) { return (width + kGroupRows - 1) / kGroupRows * kGroupRows; }

// One panel's columns for `num_rows` quantized rows.
template <int num_rows>
void multiply_tile(const uint8_t* rows, const float* row_scales, const Int8Matrix& matrix, int64_t panel,
                   float* output) {
  const int64_t width = padded(matrix.num_rows);
  const int8_t* weights = matrix.panels + panel * kPanelColumns * width;
  __m512i sums[num_rows][2];
  for (auto& row : sums) row[0] = row[1] = _mm512_setzero_si512();
  for (int64_t k = 0; k < width; k += kGroupRows, weights += kPanelColumns * kGroupRows) {
    const __m512i left = _mm512_loadu_si512(weights), right = _mm512_loadu_si512(weights + 64);
    for (int row = 0; row < num_rows; ++row) {
      int32_t group;
      std::memcpy(&group, rows + row * width + k, sizeof group);
      const __m512i bytes = _mm512_set1_epi32(group);
      sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], bytes, left);
      sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], bytes, right);
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t column = panel * kPanelColumns + half * kLanes;
    if (column >= matrix.num_columns) break;
    const __mmask16 mask = first_lanes(matrix.num_columns - column);
    const __m512 scales = _mm512_maskz_loadu_ps(mask, matrix.scales + column);
    const __m512i offsets = _mm512_maskz_loadu_epi32(mask, matrix.offsets + column);
    const __m512 bias = matrix.bias ? _mm512_maskz_loadu_ps(mask, matrix.bias + column) : _mm512_setzero_ps();
    for (int row = 0; row < num_rows; ++row) {
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[row][half], offsets));
      __m512 y = _mm512_mul_ps(_mm512_mul_ps(exact, scales), _mm512_set1_ps(row_scales[row]));
      if (matrix.bias) y = _mm512_add_ps(y, bias);
      if (matrix.is_gelu) y = gelu(y);
      _mm512_mask_storeu_ps(output + row * matrix.num_columns + column, mask, y);
    }
  }
}

using Tile = void (*)(const uint8_t*, const float*, const Int8Matrix&, int64_t, float*);
constexpr Tile kTiles[kTileRows] = {multiply_tile<1>, multiply_tile<2>, multiply_tile<3>, multiply_tile<4>,
                                    multiply_tile<5>, multiply_tile<6>, multiply_tile<7>, multiply_tile<8>};

}  // namespace

bool ends_in_zeros(const Int8Matrix& matrix) {
  const int64_t height = padded(matrix.num_rows), rest = matrix.num_rows % kGroupRows;
  const int64_t num_panels = (matrix.num_columns + kPanelColumns - 1) / kPanelColumns;
  for (int64_t panel = 0; rest && panel < num_panels; ++panel) {
    const int8_t* group = matrix.panels + ((panel + 1) * height - kGroupRows) * kPanelColumns;
    for (int64_t i = 0; i < kPanelColumns * kGroupRows; ++i) {
      if (i % kGroupRows >= rest && group[i]) return false;
    }
  }
  return true;
}

void sum_columns(const Int8Matrix& matrix, int32_t zero, int32_t* offsets) {
  const int64_t height = padded(matrix.num_rows);
  for (int64_t column = 0; column < matrix.num_columns; ++column) {
    const int8_t* panel = matrix.panels + column / kPanelColumns * kPanelColumns * height;
    int32_t sum = 0;
    for (int64_t k = 0; k < height; ++k)
      sum += panel[(k / kGroupRows * kPanelColumns + column % kPanelColumns) * kGroupRows + k % kGroupRows];
    offsets[column] = sum * zero;
  }
}

void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Rounding& rounding,
              const Int8Matrix& matrix, float* output) {
  if (num_rows == 0) return;
  const int64_t width = matrix.num_rows, stride = padded(width);
  const int64_t num_panels = (matrix.num_columns + kPanelColumns - 1) / kPanelColumns;
  thread_local Scratch<uint8_t> bytes;
  thread_local Scratch<float> scales;
  // Plain pointers for the lambdas: the thread_local names mean other objects on other threads.
  uint8_t* const rounded = bytes.at_least(num_rows * stride);
  float* const row_scales = scales.at_least(num_rows);

  for_each_row(parallel, num_rows, width, [=](int64_t row) {
    row_scales[row] = round_row(rows + row * width, width, rounding.step, rounding.zero, rounded + row * stride);
  });
  for_each_tile(parallel, num_panels, num_rows, kTileRows, [=, &matrix](int64_t panel, int64_t row, int64_t count) {
    kTiles[count - 1](rounded + row * stride, row_scales + row, matrix, panel, output + row * matrix.num_columns);
  });
}

}  // namespace onward
