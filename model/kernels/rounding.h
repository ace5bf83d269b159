// Quantization of rows of floats to bytes, with a scale per row. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "parallel.h"

namespace onward {

constexpr float kMinPeak = 1e-30f;
constexpr int64_t kMinParallel = 1 << 14;  // numbers; fewer are quantized faster than another thread wakes up

// Writes a row's bytes, round(x / scale) + zero, and returns the scale, max(max |x|, 1e-30) · step. A row with a NaN or
// an infinity has a scale of NaN, which makes its products NaN: an infinite scale would make them infinite with an
// arbitrary sign.
template <typename Byte>
float round_row(const float* row, int64_t width, float step, int32_t zero, Byte* bytes) {
  __m512 peaks = _mm512_setzero_ps();
  __mmask16 undefined = 0;
  for (int64_t i = 0; i < width; i += kLanes) {
    const __m512 x = _mm512_maskz_loadu_ps(first_lanes(width - i), row + i);
    undefined |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    peaks = _mm512_max_ps(peaks, _mm512_abs_ps(x));
  }
  float peak = _mm512_reduce_max_ps(peaks);
  if (undefined || !(peak <= std::numeric_limits<float>::max())) peak = std::numeric_limits<float>::quiet_NaN();
  const float scale = std::max(peak, kMinPeak) * step;
  const __m512 divisor = _mm512_set1_ps(scale);
  const __m512i zeros = _mm512_set1_epi32(zero);
  for (int64_t i = 0; i < width; i += kLanes) {
    const __mmask16 mask = first_lanes(width - i);
    const __m512 quotients = _mm512_div_ps(_mm512_maskz_loadu_ps(mask, row + i), divisor);
    const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(quotients), zeros);
    // Saturates.
    if constexpr (std::is_signed_v<Byte>) {
      _mm_mask_storeu_epi8(bytes + i, mask, _mm512_cvtsepi32_epi8(rounded));
    } else {
      const __m512i positive = _mm512_max_epi32(rounded, _mm512_setzero_si512());
      _mm_mask_storeu_epi8(bytes + i, mask, _mm512_cvtusepi32_epi8(positive));
    }
  }
  return scale;
}

// Calls `body(row)` for each row.
template <typename Body>
void for_each_row(const Parallel& parallel, int64_t num_rows, int64_t width, const Body& body) {
  const auto round = [&body](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  };
  if (num_rows * width <= kMinParallel) {
    round(0, num_rows);
  } else {
    share(parallel, num_rows, round);
  }
}

}  // namespace onward
