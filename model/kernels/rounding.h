// Quantization of rows of floats to bytes, with a scale per row. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "parallel.h"

namespace onward {

constexpr float kMinPeak = 1e-30f;
constexpr float kMinExactScale = 1e-28f;  // remainders of smaller ones may be subnormal, and not exact
constexpr int64_t kMinParallel = 1 << 14;  // numbers; fewer are quantized faster than another thread wakes up

// x / divisor, correctly rounded, in a third of a division's time: each step adds the remainder of a quotient, which is
// exact, times the reciprocal (Markstein, 1990). The first quotient's last two places may be wrong, the second's last.
inline __m512 divide(__m512 x, __m512 divisor, __m512 reciprocal) {
  __m512 quotient = _mm512_mul_ps(x, reciprocal);
  quotient = _mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, divisor, x), reciprocal, quotient);
  return _mm512_fmadd_ps(_mm512_fnmadd_ps(quotient, divisor, x), reciprocal, quotient);
}

// Calls `body(i, mask)` for each register of numbers from i on.
template <typename Body>
[[gnu::always_inline]] inline void for_lanes(int64_t width, const Body& body) {
  for (int64_t i = 0; i < width; i += kLanes) body(i, first_lanes(width - i));
}

// Writes a row's bytes, round(x / scale) + zero, and returns the scale, max(max |x|, 1e-30) · step. A row with a NaN or
// an infinity has a scale of NaN, which makes its products NaN: an infinite scale would make them infinite with an
// arbitrary sign.
template <typename Byte>
float round_row(const float* row, int64_t width, float step, int32_t zero, Byte* bytes) {
  // As integers, the bits of magnitudes have their order, and those of infinity and NaN are the largest.
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512i peaks = _mm512_setzero_si512();
  for_lanes(width, [&](int64_t i, __mmask16 mask) {
    peaks = _mm512_max_epi32(peaks, _mm512_and_si512(_mm512_castps_si512(_mm512_maskz_loadu_ps(mask, row + i)), magnitude));
  });
  const int32_t bits = _mm512_reduce_max_epi32(peaks);
  float peak;
  std::memcpy(&peak, &bits, sizeof peak);
  if (!(peak <= std::numeric_limits<float>::max())) peak = std::numeric_limits<float>::quiet_NaN();
  const float scale = std::max(peak, kMinPeak) * step;
  const __m512 divisor = _mm512_set1_ps(scale), reciprocal = _mm512_set1_ps(1.0f / scale);
  const __m512i zeros = _mm512_set1_epi32(zero);
  const auto round = [&](const auto& divide) {
    for_lanes(width, [&](int64_t i, __mmask16 mask) {
      _mm_prefetch(row + width + i, _MM_HINT_T0);  // the row after
      const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(divide(_mm512_maskz_loadu_ps(mask, row + i))), zeros);
      // Saturates.
      if constexpr (std::is_signed_v<Byte>) {
        _mm_mask_storeu_epi8(bytes + i, mask, _mm512_cvtsepi32_epi8(rounded));
      } else {
        _mm_mask_storeu_epi8(bytes + i, mask, _mm512_cvtusepi32_epi8(_mm512_max_epi32(rounded, _mm512_setzero_si512())));
      }
    });
  };
  if (scale < kMinExactScale) {
    round([&](__m512 x) { return _mm512_div_ps(x, divisor); });
  } else {
    round([&](__m512 x) { return divide(x, divisor, reciprocal); });
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
