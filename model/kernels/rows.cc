#include "rows.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>

namespace onward {

bool can_compute_rows() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}

}  // namespace onward

// All above runs on any processor, all below only where it returns true.
#pragma GCC target("avx512f,avx512dq,fma")

#include "gelu.h"
#include "lanes.h"

namespace onward {
namespace {

constexpr int64_t kMinParallel = 1 << 13;  // numbers; fewer are computed faster than another thread wakes up

template <typename Body>
void share_rows(const Parallel& parallel, int64_t num_rows, int64_t width, const Body& body) {
  if (num_rows * width <= kMinParallel) {
    body(int64_t{0}, num_rows);
  } else {
    share(parallel, num_rows, body);
  }
}

// Writes a row's sums and returns them.
const float* add(const Addition& addition, int64_t row) {
  const float *left = addition.left + row * addition.width, *right = addition.right + row * addition.width;
  float* sums = addition.sums + row * addition.width;
  for (int64_t i = 0; i < addition.width; i += kLanes) {
    const __mmask16 mask = first_lanes(addition.width - i);
    _mm512_mask_storeu_ps(sums + i, mask,
                          _mm512_add_ps(_mm512_maskz_loadu_ps(mask, left + i), _mm512_maskz_loadu_ps(mask, right + i)));
  }
  return sums;
}

}  // namespace

void swiglu(const Parallel& parallel, const float* rows, int64_t num_rows, int64_t width, float* output) {
  share_rows(parallel, num_rows, width, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *gates = rows + 2 * row * width, *ups = gates + width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 mask = first_lanes(width - i);
        const __m512 gate = _mm512_maskz_loadu_ps(mask, gates + i), up = _mm512_maskz_loadu_ps(mask, ups + i);
        _mm512_mask_storeu_ps(output + row * width + i, mask, swiglu(gate, up));
      }
    }
  });
}

void add_rms_norm(const Parallel& parallel, const Addition& addition, const float* weight, float epsilon,
                  float* output) {
  share_rows(parallel, addition.num_rows, addition.width, [=, &addition](int64_t begin, int64_t end) {
    const int64_t width = addition.width;
    for (int64_t row = begin; row < end; ++row) {
      const float* sums = add(addition, row);
      __m512 squares = _mm512_setzero_ps();
      for (int64_t i = 0; i < width; i += kLanes) {
        const __m512 x = _mm512_maskz_loadu_ps(first_lanes(width - i), sums + i);
        squares = _mm512_fmadd_ps(x, x, squares);
      }
      const float mean = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + epsilon));
      for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 mask = first_lanes(width - i);
        const __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, sums + i), scale);
        const __m512 y = _mm512_mul_ps(x, _mm512_maskz_loadu_ps(mask, weight + i));
        _mm512_mask_storeu_ps(output + row * width + i, mask, y);
      }
    }
  });
}

void add_layer_norm(const Parallel& parallel, const Addition& addition, const float* weight, const float* bias,
                    float epsilon, float* output) {
  share_rows(parallel, addition.num_rows, addition.width, [=, &addition](int64_t begin, int64_t end) {
    const int64_t width = addition.width;
    for (int64_t row = begin; row < end; ++row) {
      const float* sums = add(addition, row);
      __m512 total = _mm512_setzero_ps();
      for (int64_t i = 0; i < width; i += kLanes)
        total = _mm512_add_ps(total, _mm512_maskz_loadu_ps(first_lanes(width - i), sums + i));
      const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(total) / static_cast<float>(width));
      __m512 squares = _mm512_setzero_ps();
      for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 mask = first_lanes(width - i);
        const __m512 x = _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, sums + i), mean);
        squares = _mm512_fmadd_ps(x, x, squares);
      }
      const float variance = _mm512_reduce_add_ps(squares) / static_cast<float>(width);
      const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(variance + epsilon));
      for (int64_t i = 0; i < width; i += kLanes) {
        const __mmask16 mask = first_lanes(width - i);
        const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, sums + i), mean), scale);
        const __m512 factor = _mm512_maskz_loadu_ps(mask, weight + i), shift = _mm512_maskz_loadu_ps(mask, bias + i);
        const __m512 y = _mm512_fmadd_ps(x, factor, shift);
        _mm512_mask_storeu_ps(output + row * width + i, mask, y);
      }
    }
  });
}

}  // namespace onward
