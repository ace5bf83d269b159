#include "lookup.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

// Called only where products are.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")

namespace onward {
namespace {

constexpr int64_t kIdsAtOnce = 16;  // fewer are not worth a task

// Calls `copy(column, numbers)` for each id.
template <typename Copy>
void copy_each(const Parallel& parallel, const int64_t* ids, int64_t num_ids, int64_t width, float* output,
               const Copy& copy) {
  if (num_ids == 0) return;
  share(parallel, (num_ids + kIdsAtOnce - 1) / kIdsAtOnce, [=, &copy](int64_t begin, int64_t end) {
    end = std::min(end * kIdsAtOnce, num_ids);
    for (int64_t index = begin * kIdsAtOnce; index < end; ++index) copy(ids[index], output + index * width);
  });
}

float widen(float number) { return number; }

float widen(Bfloat16 number) {
  const uint32_t bits = uint32_t{number.bits} << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

float widen_half(uint16_t half) {
  return _mm512_cvtss_f32(_mm512_cvtph_ps(_mm256_castsi128_si256(_mm_cvtsi32_si128(half))));
}

}  // namespace

template <typename Number>
void look_up(const Parallel& parallel, const int64_t* ids, int64_t num_ids, const FloatMatrix<Number>& matrix,
             float* output) {
  copy_each(parallel, ids, num_ids, matrix.num_rows, output, [&matrix](int64_t column, float* numbers) {
    const Number* const weights = matrix.weights + column * matrix.stride;
    for (int64_t k = 0; k < matrix.num_rows; ++k) numbers[k] = widen(weights[k]);
  });
}

template void look_up(const Parallel&, const int64_t*, int64_t, const FloatMatrix<float>&, float*);
template void look_up(const Parallel&, const int64_t*, int64_t, const FloatMatrix<Bfloat16>&, float*);

void look_up(const Parallel& parallel, const int64_t* ids, int64_t num_ids, const Int8Matrix& matrix, float* output) {
  copy_each(parallel, ids, num_ids, matrix.num_rows, output, [&matrix](int64_t column, float* numbers) {
    const int64_t num_groups = (matrix.num_rows + kGroupRows - 1) / kGroupRows;
    const int64_t panel = column / kPanelColumns * num_groups, place = column % kPanelColumns;
    const float scale = matrix.scales[column];
    for (int64_t k = 0; k < matrix.num_rows; ++k) {
      const int64_t group = (panel + k / kGroupRows) * kPanelColumns + place;
      numbers[k] = static_cast<float>(matrix.panels[group * kGroupRows + k % kGroupRows]) * scale;
    }
  });
}

void look_up(const Parallel& parallel, const int64_t* ids, int64_t num_ids, const Int4Matrix& matrix, float* output) {
  copy_each(parallel, ids, num_ids, matrix.num_rows, output, [&matrix](int64_t column, float* numbers) {
    constexpr int64_t kZero = 8, kBytes = 4, kGroup = 2 * kBytes;  // low bits of four bytes, then their high bits
    const int64_t num_blocks = matrix.num_rows / kInt4Block;
    const int64_t panel = column / kInt4PanelColumns * num_blocks, place = column % kInt4PanelColumns;
    for (int64_t k = 0; k < matrix.num_rows; ++k) {
      const int64_t block = (panel + k / kInt4Block) * kInt4PanelColumns + place;
      const int64_t group = (panel * kInt4Block + k) / kGroup * kInt4PanelColumns + place;
      const uint8_t byte = matrix.panels[group * kBytes + k % kBytes];
      const int64_t code = k % kGroup < kBytes ? byte & 15 : byte >> 4;
      numbers[k] = static_cast<float>(code - kZero) * widen_half(matrix.scales[block]);
    }
  });
}

}  // namespace onward
