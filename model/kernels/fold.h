// Sums over the lanes of many registers at a time. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

namespace onward {

// Writes each register's sum over its lanes to `vectors`, sixteen to a register, in the order of the registers:
//
//   s[i] = (x[4 i] + x[4 i + 2]) + (x[4 i + 1] + x[4 i + 3])        sum = (s[0] + s[1]) + (s[2] + s[3])
//
// The order of additions does not depend on `count`. Lanes past `count` are undefined.
template <int count>
[[gnu::always_inline]] inline void fold(__m512* vectors) {
  constexpr int pairs = (count + 1) / 2, fours = (pairs + 1) / 2, eights = (fours + 1) / 2, sixteens = (eights + 1) / 2;
  // Each step adds the halves of every sum and merges two registers into one; the last may be paired with itself.
#pragma GCC unroll 16
  for (int i = 0; i < pairs; ++i) {
    const __m512 a = vectors[2 * i], b = vectors[2 * i + 1 < count ? 2 * i + 1 : 2 * i];
    vectors[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 16
  for (int i = 0; i < fours; ++i) {
    const __m512 a = vectors[2 * i], b = vectors[2 * i + 1 < pairs ? 2 * i + 1 : 2 * i];
    vectors[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
  }
#pragma GCC unroll 16
  for (int i = 0; i < eights; ++i) {
    const __m512 a = vectors[2 * i], b = vectors[2 * i + 1 < fours ? 2 * i + 1 : 2 * i];
    vectors[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
#pragma GCC unroll 16
  for (int i = 0; i < sixteens; ++i) {
    const __m512 a = vectors[2 * i], b = vectors[2 * i + 1 < eights ? 2 * i + 1 : 2 * i];
    vectors[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  }
}

}  // namespace onward
