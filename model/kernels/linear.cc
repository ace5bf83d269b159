#include "linear.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace onward {

bool can_multiply() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}

}  // namespace onward

// All above runs on any processor, all below where that is true.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

namespace onward {
namespace {

constexpr int64_t kLanes = 16;
constexpr int64_t kTileRows = 8;  // with two registers of columns: sixteen sums, which hide the latency of adding to one
constexpr float kLeastPeak = 1e-30f;
// Below this many numbers, rounding them is over before another thread has woken.
constexpr int64_t kRoundedAlone = 1 << 14;
__mmask16 first_lanes(int64_t count) { return count >= kLanes ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1); }

// How many bytes a rounded row takes: whole groups. What is in the last beyond the row meets weights of zero.
int64_t padded(int64_t width) { return (width + kGroupRows - 1) / kGroupRows * kGroupRows; }

// Writes a row's bytes and returns its scale.
float round_row(const float* row, int64_t width, const Rounding& rounding, uint8_t* bytes) {
  __m512 peaks = _mm512_setzero_ps();
  for (int64_t i = 0; i < width; i += kLanes)
    peaks = _mm512_max_ps(peaks, _mm512_abs_ps(_mm512_maskz_loadu_ps(first_lanes(width - i), row + i)));
  const float scale = std::max(_mm512_reduce_max_ps(peaks), kLeastPeak) * rounding.step;
  const __m512 divisor = _mm512_set1_ps(scale);
  const __m512i zero = _mm512_set1_epi32(rounding.zero);
  for (int64_t i = 0; i < width; i += kLanes) {
    const __mmask16 mask = first_lanes(width - i);
    const __m512 quotients = _mm512_div_ps(_mm512_maskz_loadu_ps(mask, row + i), divisor);
    const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(quotients), zero);
    // What rounding led past the ends of a byte comes back to them.
    const __m512i positive = _mm512_max_epi32(rounded, _mm512_setzero_si512());
    _mm_mask_storeu_epi8(bytes + i, mask, _mm512_cvtusepi32_epi8(positive));
  }
  return scale;
}

// One panel's columns for `num_rows` rounded rows.
template <int num_rows>
void multiply_tile(const uint8_t* rows, const float* row_scales, const Int8Matrix& matrix, int64_t panel, float* output) {
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
    const __m512 bias = _mm512_maskz_loadu_ps(mask, matrix.bias + column);
    for (int row = 0; row < num_rows; ++row) {
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[row][half], offsets));
      const __m512 product = _mm512_mul_ps(_mm512_mul_ps(exact, scales), _mm512_set1_ps(row_scales[row]));
      _mm512_mask_storeu_ps(output + row * matrix.num_columns + column, mask, _mm512_add_ps(product, bias));
    }
  }
}

using Tile = void (*)(const uint8_t*, const float*, const Int8Matrix&, int64_t, float*);
constexpr Tile kTiles[kTileRows] = {multiply_tile<1>, multiply_tile<2>, multiply_tile<3>, multiply_tile<4>,
                                    multiply_tile<5>, multiply_tile<6>, multiply_tile<7>, multiply_tile<8>};

}  // namespace

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
  // Not through the thread's own names below: other threads have others of these names.
  uint8_t* const rounded = bytes.at_least(num_rows * stride);
  float* const row_scales = scales.at_least(num_rows);

  const auto round_rows = [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      row_scales[row] = round_row(rows + row * width, width, rounding, rounded + row * stride);
  };
  if (num_rows * width <= kRoundedAlone) {
    round_rows(0, num_rows);
  } else {
    share(parallel, num_rows, round_rows);
  }
  share(parallel, num_panels, [=, &matrix](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      // A panel stays in the nearest cache while all rows meet it.
      for (int64_t row = 0; row < num_rows; row += kTileRows) {
        const int64_t count = std::min(kTileRows, num_rows - row);
        kTiles[count - 1](rounded + row * stride, row_scales + row, matrix, panel, output + row * matrix.num_columns);
      }
    }
  });
}

}  // namespace onward
