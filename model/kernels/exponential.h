// Powers of two, sixteen at a time. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

namespace onward {

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x by a polynomial of 2^fraction: its coefficients from the highest power on, without the last, which is 1. Exactly 1
// at 0, 0 at minus infinity and infinity at infinity.
template <int degree>
inline __m512 power_of_two(__m512 x, const float (&coefficients)[degree]) {
  const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // ±0.5; 0 of infinity
  const __m512 whole = _mm512_sub_ps(x, fraction);
  __m512 power = _mm512_set1_ps(coefficients[0]);
#pragma GCC unroll 8
  for (int i = 1; i < degree; ++i) power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(coefficients[i]));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(power, whole);
}

// Minimax polynomials: their relative errors are 2e-9, which leaves 1.1 units in the last place, and 3e-6.
constexpr float kExactPower[] = {0x1.41fbbcp-13f, 0x1.5f3e54p-10f, 0x1.3b2d4cp-7f,
                                 0x1.c6aee8p-5f,  0x1.ebfbdcp-3f,  0x1.62e43p-1f};
constexpr float kRoughPower[] = {0x1.3a02ccp-7f, 0x1.c9fc46p-5f, 0x1.ec0378p-3f, 0x1.62e12cp-1f};

inline __m512 power_of_two(__m512 x) { return power_of_two(x, kExactPower); }

// The same of one number.
inline float power_of_two(float x) { return _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(x))); }

}  // namespace onward
