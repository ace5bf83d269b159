// The results of products by panels of columns. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "activation.h"
#include "gelu.h"
#include "lanes.h"
#include "parallel.h"

namespace onward {

// `[num_rows, num_columns]`, half as many columns if gated.
struct Results {
  float* numbers;
  int64_t num_rows;
  int64_t num_columns;  // of the matrix
  Activation activation;
};

// Computes panels of `width` columns, tasks of which `begin` and `end` delimit some: panels, or pairs of them if gated.
//
// `multiply(panel, row, count, output, pitch)` writes a panel's columns of rows from `row` on; `pitch` is the distance
// of rows in `output`. A panel stays in the L1 cache for all rows, or for many.
template <int64_t width, typename Multiply>
void write_panels(int64_t begin, int64_t end, const Results& results, Multiply& multiply) {
  constexpr int64_t kGatedRows = 64;  // so many rows' gates and ups stay in the L2 cache
  if (results.activation != Activation::kSwiGlu) {
    for (int64_t panel = begin; panel < end; ++panel)
      multiply(panel, int64_t{0}, results.num_rows, results.numbers + panel * width, results.num_columns);
    return;
  }
  const int64_t pitch = results.num_columns / 2, num_gates = pitch / width;
  alignas(64) float gates[kGatedRows][width], ups[kGatedRows][width];
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int64_t first = 0; first < results.num_rows; first += kGatedRows) {
      const int64_t count = std::min(kGatedRows, results.num_rows - first);
      multiply(panel, first, count, gates[0], width);
      multiply(num_gates + panel, first, count, ups[0], width);
      float* output = results.numbers + first * pitch + panel * width;
      for (int64_t row = 0; row < count; ++row, output += pitch) {
        for (int64_t i = 0; i < width; i += kLanes)
          _mm512_storeu_ps(output + i, swiglu(_mm512_load_ps(gates[row] + i), _mm512_load_ps(ups[row] + i)));
      }
    }
  }
}

// The same for all panels, shared between threads; each task has a `multiply` of its own.
template <int64_t width, typename MakeMultiply>
void share_panels(const Parallel& parallel, const Results& results, const MakeMultiply& make_multiply) {
  const int64_t num_panels = (results.num_columns + width - 1) / width;
  const int64_t num_tasks = results.activation == Activation::kSwiGlu ? num_panels / 2 : num_panels;
  share(parallel, num_tasks, [&](int64_t begin, int64_t end) {
    auto multiply = make_multiply();
    write_panels<width>(begin, end, results, multiply);
  });
}

}  // namespace onward
