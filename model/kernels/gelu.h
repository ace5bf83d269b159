// What follows products, sixteen numbers at a time. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

#include "exponential.h"

namespace onward {

// x · Φ(x) by its approximation with tanh (Hendrycks and Gimpel, 2016), x / 2 · (1 + tanh u) with
// u = √(2 / π) · (x + 0.044715 x³). As 1 + tanh u = 2 / (1 + exp(-2u)), that is x / (1 + exp(-2u)).
inline __m512 gelu(__m512 x) {
  constexpr float kTwoRootOfTwoOverPi = 1.59576912160573071176f;
  const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
  const __m512 exponent = _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(-kTwoRootOfTwoOverPi * kLog2E));
  const __m512 power = power_of_two(exponent);
  return _mm512_div_ps(x, _mm512_add_ps(power, _mm512_set1_ps(1.0f)));
}

// silu(gate) · up (Shazeer, 2020).
inline __m512 swiglu(__m512 gate, __m512 up) {
  const __m512 power = power_of_two(_mm512_mul_ps(gate, _mm512_set1_ps(-kLog2E)));
  return _mm512_mul_ps(_mm512_div_ps(gate, _mm512_add_ps(power, _mm512_set1_ps(1.0f))), up);
}

}  // namespace onward
