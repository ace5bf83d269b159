// The results of products by panels of columns. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <thread>

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

// SwiGLU of two panels of `width` columns, gates and as many ups, for rows from `first` on: by `multiply(panel, row,
// count, output, pitch)`, which writes a panel's columns. `pitch` is the distance of rows in an output.
template <int64_t width, typename Multiply>
void write_gated(const Results& results, int64_t panel, int64_t first, int64_t count, float* output, int64_t pitch,
                 Multiply& multiply) {
  constexpr int64_t kRowsAtOnce = 64;  // so many rows' gates and ups stay in the L1 cache
  const int64_t num_gates = results.num_columns / 2 / width;
  alignas(64) float gates[kRowsAtOnce][width], ups[kRowsAtOnce][width];
  for (int64_t begin = 0; begin < count; begin += kRowsAtOnce) {
    const int64_t size = std::min(kRowsAtOnce, count - begin);
    multiply(panel, first + begin, size, gates[0], width);
    multiply(num_gates + panel, first + begin, size, ups[0], width);
    for (int64_t row = 0; row < size; ++row, output += pitch) {
      for (int64_t i = 0; i < width; i += kLanes)
        _mm512_storeu_ps(output + i, swiglu(_mm512_load_ps(gates[row] + i), _mm512_load_ps(ups[row] + i)));
    }
  }
}

// Shares panels of `width` columns between threads. Each task has a `multiply` of its own: `multiply(panel, row, count,
// output, pitch)` writes the results of a panel, or of a panel of gates and its ups, for rows from `row` on.
//
// A panel stays in the L1 cache for all rows of a task. Many rows are split, at multiples of 32, before panels are: so a
// thread's rows and results stay in its L2 cache from one operator to the next.
template <int64_t width, typename MakeMultiply>
void share_panels(const Parallel& parallel, const Results& results, const MakeMultiply& make_multiply) {
  constexpr int64_t kUnit = 32, kLeastRows = 4 * kUnit;  // of a task: fewer would read the matrix too often
  static const int64_t num_threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, kMaxTasks);
  const int64_t pitch = results.activation == Activation::kSwiGlu ? results.num_columns / 2 : results.num_columns;
  const int64_t num_panels = (pitch + width - 1) / width;
  const int64_t num_blocks = std::clamp<int64_t>(results.num_rows / kLeastRows, 1, num_threads);
  const int64_t num_parts = std::min(kMaxTasks / num_blocks, num_panels);
  const int64_t num_units = (results.num_rows + kUnit - 1) / kUnit;
  parallel(num_blocks * num_parts, [=, &results, &make_multiply](size_t index) {
    const int64_t block = static_cast<int64_t>(index) / num_parts, part = static_cast<int64_t>(index) % num_parts;
    const int64_t row = block * num_units / num_blocks * kUnit;
    const int64_t end = std::min((block + 1) * num_units / num_blocks * kUnit, results.num_rows);
    auto multiply = make_multiply();
    for (int64_t panel = part * num_panels / num_parts; panel < (part + 1) * num_panels / num_parts; ++panel)
      multiply(panel, row, end - row, results.numbers + row * pitch + panel * width, pitch);
  });
}

}  // namespace onward
