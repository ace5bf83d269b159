#include "linear.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "scratch.h"
#include "tiles.h"

namespace onward {

bool can_multiply() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace onward

// All above runs on any processor, all below only where it returns true.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

#include "lanes.h"
#include "panels.h"
#include "rounding.h"

namespace onward {
namespace {

constexpr int64_t kVectorRows = 8;  // with two registers of columns: sixteen sums hide the latency of one addition
constexpr int kTileBytes = 64;      // of a row in a tile register
constexpr int64_t kBlockRows = 2 * kTileRows;
constexpr int64_t kMinTileRows = 8;  // fewer are multiplied faster by vectors

// Bytes of a quantized row, in whole groups. Bytes past the row meet weights of zero.
int64_t padded(int64_t width) { return (width + kGroupRows - 1) / kGroupRows * kGroupRows; }

// A panel's sums over the first `depth` bytes of each row; `depth` is 0 for none.
struct Begun {
  int64_t depth;
  const int32_t (*sums)[kPanelColumns];
};

// One panel's columns for `num_rows` quantized rows, of which sums may have begun; rows of output are `pitch` apart.
template <int num_rows>
void multiply_vectors(const uint8_t* rows, const float* row_scales, const Int8Matrix& matrix, int64_t panel,
                      float* output, int64_t pitch, const Begun& begun) {
  const int64_t width = padded(matrix.num_rows);
  const int8_t* weights = matrix.panels + panel * kPanelColumns * width + begun.depth * kPanelColumns;
  __m512i sums[num_rows][2];
  for (int row = 0; row < num_rows; ++row) {
    for (int half = 0; half < 2; ++half)
      sums[row][half] =
          begun.depth ? _mm512_load_si512(begun.sums[row] + half * kLanes) : _mm512_setzero_si512();
  }
  for (int64_t k = begun.depth; k < width; k += kGroupRows, weights += kPanelColumns * kGroupRows) {
    const __m512i left = _mm512_loadu_si512(weights), right = _mm512_loadu_si512(weights + 64);
    for (int row = 0; row < num_rows; ++row) {
      int32_t group;
      std::memcpy(&group, rows + row * width + k, sizeof group);
      const __m512i bytes = _mm512_set1_epi32(group);
      sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], bytes, left);
      sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], bytes, right);
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t column = panel * kPanelColumns + half * kLanes;
    if (column >= matrix.num_columns) break;
    const __mmask16 mask = first_lanes(matrix.num_columns - column);
    const __m512 scales = _mm512_maskz_loadu_ps(mask, matrix.scales + column);
    const __m512i offsets = _mm512_maskz_loadu_epi32(mask, matrix.offsets + column);
    const __m512 bias = matrix.bias ? _mm512_maskz_loadu_ps(mask, matrix.bias + column) : _mm512_setzero_ps();
    for (int row = 0; row < num_rows; ++row) {
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[row][half], offsets));
      __m512 y = _mm512_mul_ps(_mm512_mul_ps(exact, scales), _mm512_set1_ps(row_scales[row]));
      if (matrix.bias) y = _mm512_add_ps(y, bias);
      if (matrix.activation == Activation::kGelu) y = gelu(y);
      _mm512_mask_storeu_ps(output + row * pitch + half * kLanes, mask, y);
    }
  }
}

using Vectors = void (*)(const uint8_t*, const float*, const Int8Matrix&, int64_t, float*, int64_t, const Begun&);
constexpr Vectors kVectors[kVectorRows] = {multiply_vectors<1>, multiply_vectors<2>, multiply_vectors<3>,
                                           multiply_vectors<4>, multiply_vectors<5>, multiply_vectors<6>,
                                           multiply_vectors<7>, multiply_vectors<8>};

// Writes the sums of `num_tiles` tiles of rows over whole tiles of a panel; returns their depth.
template <int num_tiles>
int64_t add_tiles(Tiles<kTileBytes>& tiles, const uint8_t* rows, int64_t width, const int8_t* weights,
                  int32_t (*sums)[kPanelColumns]) {
  constexpr int64_t kWeightPitch = kPanelColumns * kGroupRows, kSumPitch = kPanelColumns * sizeof(int32_t);
  tiles.clear<0>();
  tiles.clear<1>();
  if (num_tiles > 1) {
    tiles.clear<2>();
    tiles.clear<3>();
  }
  int64_t k = 0;
  for (; k + kTileBytes <= width; k += kTileBytes) {
    tiles.load<6>(weights + k * kPanelColumns, kWeightPitch);
    tiles.load<4>(rows + k, width);
    tiles.add_unsigned<0, 4, 6>();
    tiles.load<7>(weights + k * kPanelColumns + kWeightPitch / 2, kWeightPitch);
    tiles.add_unsigned<1, 4, 7>();
    if (num_tiles > 1) {
      tiles.load<5>(rows + kTileRows * width + k, width);
      tiles.add_unsigned<2, 5, 6>();
      tiles.add_unsigned<3, 5, 7>();
    }
  }
  tiles.store<0>(sums[0], kSumPitch);
  tiles.store<1>(sums[0] + kTileColumns, kSumPitch);
  if (num_tiles > 1) {
    tiles.store<2>(sums[kTileRows], kSumPitch);
    tiles.store<3>(sums[kTileRows] + kTileColumns, kSumPitch);
  }
  return k;
}

// One panel's columns for a block of `count` quantized rows. Memory past them is read, up to whole tiles.
void multiply_block(Tiles<kTileBytes>& tiles, const uint8_t* rows, const float* row_scales, const Int8Matrix& matrix,
                    int64_t panel, int64_t count, float* output, int64_t pitch) {
  const int64_t width = padded(matrix.num_rows);
  const int8_t* weights = matrix.panels + panel * kPanelColumns * width;
  alignas(64) int32_t sums[kBlockRows][kPanelColumns];
  const int64_t depth = count > kTileRows ? add_tiles<2>(tiles, rows, width, weights, sums)
                                          : add_tiles<1>(tiles, rows, width, weights, sums);
  for (int64_t row = 0; row < count; row += kVectorRows) {
    kVectors[std::min(kVectorRows, count - row) - 1](rows + row * width, row_scales + row, matrix, panel,
                                                     output + row * pitch, pitch, {depth, sums + row});
  }
}

}  // namespace

bool ends_in_zeros(const Int8Matrix& matrix) {
  const int64_t height = padded(matrix.num_rows), rest = matrix.num_rows % kGroupRows;
  const int64_t num_panels = (matrix.num_columns + kPanelColumns - 1) / kPanelColumns;
  for (int64_t panel = 0; rest && panel < num_panels; ++panel) {
    const int8_t* group = matrix.panels + ((panel + 1) * height - kGroupRows) * kPanelColumns;
    for (int64_t i = 0; i < kPanelColumns * kGroupRows; ++i) {
      if (i % kGroupRows >= rest && group[i]) return false;
    }
  }
  return true;
}

void sum_columns(const Int8Matrix& matrix, int32_t zero, int32_t* offsets) {
  const int64_t height = padded(matrix.num_rows);
  for (int64_t column = 0; column < matrix.num_columns; ++column) {
    const int8_t* panel = matrix.panels + column / kPanelColumns * kPanelColumns * height;
    int32_t sum = 0;
    for (int64_t k = 0; k < height; ++k)
      sum += panel[(k / kGroupRows * kPanelColumns + column % kPanelColumns) * kGroupRows + k % kGroupRows];
    offsets[column] = sum * zero;
  }
}

void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Rounding& rounding,
              const Int8Matrix& matrix, float* output) {
  if (num_rows == 0) return;
  const int64_t width = matrix.num_rows, stride = padded(width);
  thread_local Scratch<uint8_t> bytes;
  thread_local Scratch<float> scales;
  // Plain pointers for the lambdas: the thread_local names mean other objects on other threads.
  const bool uses_tiles = num_rows >= kMinTileRows && has_tiles();
  const int64_t num_read = uses_tiles ? (num_rows + kTileRows - 1) / kTileRows * kTileRows : num_rows;
  uint8_t* const rounded = bytes.at_least(num_read * stride);
  float* const row_scales = scales.at_least(num_rows);

  for_each_row(parallel, num_rows, width, [=](int64_t row) {
    row_scales[row] = round_row(rows + row * width, width, rounding.step, rounding.zero, rounded + row * stride);
  });
  const auto by_vectors = [=, &matrix](int64_t panel, int64_t first, int64_t count, float* results, int64_t pitch) {
    for (int64_t row = 0; row < count; row += kVectorRows) {
      kVectors[std::min(kVectorRows, count - row) - 1](rounded + (first + row) * stride, row_scales + first + row,
                                                       matrix, panel, results + row * pitch, pitch, {});
    }
  };
  const Results results{output, num_rows, matrix.num_columns, matrix.activation};
  if (!uses_tiles) return share_panels<kPanelColumns>(parallel, results, [&] { return by_vectors; });
  share_panels<kPanelColumns>(parallel, results, [=, &matrix] {
    return [=, &matrix, tiles = Tiles<kTileBytes>()](int64_t panel, int64_t first, int64_t count, float* results,
                                                     int64_t pitch) mutable {
      for (int64_t row = 0; row < count; row += kBlockRows) {
        const int64_t size = std::min(kBlockRows, count - row);
        float* const block = results + row * pitch;
        if (size < kMinTileRows) {
          by_vectors(panel, first + row, size, block, pitch);
        } else {
          multiply_block(tiles, rounded + (first + row) * stride, row_scales + first + row, matrix, panel, size, block,
                         pitch);
        }
      }
    };
  });
}

}  // namespace onward
