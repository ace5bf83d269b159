// Powers of two, sixteen at a time. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

namespace onward {

constexpr float kLog2E = 1.44269504088896340736f;

// 2^x, within 1.1 units in the last place; 1 at 0, 0 at minus infinity and infinity at infinity exactly.
inline __m512 power_of_two(__m512 x) {
  const __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // ±0.5; 0 of infinity
  const __m512 whole = _mm512_sub_ps(x, fraction);
  // Minimax polynomial of degree 6 through (0, 1), relative error 2e-9.
  __m512 power = _mm512_set1_ps(0x1.41fbbcp-13f);
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0x1.5f3e54p-10f));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0x1.3b2d4cp-7f));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0x1.c6aee8p-5f));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0x1.ebfbdcp-3f));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(0x1.62e43p-1f));
  power = _mm512_fmadd_ps(power, fraction, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(power, whole);
}

// The same of one number.
inline float power_of_two(float x) { return _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(x))); }

}  // namespace onward
