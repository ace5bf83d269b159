#include "int4_linear.h"

#include <immintrin.h>

#include <cstring>

#include "scratch.h"

// Runs only where `can_multiply` of linear.h returns true.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

#include "gelu.h"
#include "lanes.h"
#include "rounding.h"

namespace onward {
namespace {

constexpr int64_t kTileRows = 16;  // more rows amortize the unpacking of codes
constexpr int32_t kZeroCode = 8;
constexpr float kStep = 1.0f / 127;
constexpr int64_t kGroup = 4;   // codes of a column that one instruction multiplies
constexpr int kPairs = 4;       // pairs of groups in a block, each pair in one register
constexpr int kChains = 4;      // chains of additions that hide the latency of one: of rows, or of parts of few rows
constexpr int64_t kBlockBytes = kPairs * 64;
constexpr int64_t kAhead = 8;  // prefetch distance in blocks

// Quantized rows.
struct Rounded {
  const int8_t* bytes;       // [num_rows, K]
  const float* scales;       // [num_rows]
  const int32_t* offsets;    // [num_rows, K / 32], each block's sum times minus the zero point of codes
};

// Writes a row's `Rounded::offsets`.
void sum_blocks(const int8_t* bytes, int64_t num_blocks, int32_t* offsets) {
  for (int64_t block = 0; block < num_blocks; ++block, bytes += kInt4Block) {
    int32_t sum = 0;
    for (int64_t i = 0; i < kInt4Block; ++i) sum += bytes[i];
    offsets[block] = -kZeroCode * sum;
  }
}

// One panel's columns for `num_rows` quantized rows.
template <int num_rows>
void multiply_tile(const Rounded& rows, const Int4Matrix& matrix, int64_t panel, float* output) {
  const int64_t width = matrix.num_rows, num_blocks = width / kInt4Block;
  const uint8_t* codes = matrix.panels + panel * num_blocks * kBlockBytes;
  const uint16_t* block_scales = matrix.scales + panel * num_blocks * kInt4PanelColumns;
  const __m512i low_bits = _mm512_set1_epi8(0xF);
  __m512 sums[num_rows];
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t block = 0; block < num_blocks; ++block, codes += kBlockBytes, block_scales += kInt4PanelColumns) {
    __m512i groups[2 * kPairs];
    _mm_prefetch(block_scales + kAhead * kInt4PanelColumns, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int pair = 0; pair < kPairs; ++pair) {
      _mm_prefetch(codes + kAhead * kBlockBytes + pair * 64, _MM_HINT_T0);
      __m512i both = _mm512_loadu_si512(codes + pair * 64);
      asm("" : "+v"(both));  // loaded once: the compiler would load it twice
      groups[2 * pair] = _mm512_and_si512(both, low_bits);
      groups[2 * pair + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
    }
    const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block_scales)));
#pragma GCC unroll 16
    for (int first = 0; first < num_rows; first += kChains) {
      constexpr int num_parts = num_rows == 1 ? kChains : num_rows < kChains ? kChains / 2 : 1;
      const int end = first + kChains < num_rows ? first + kChains : num_rows;
      __m512i exact[kChains][num_parts];
#pragma GCC unroll 8
      for (int group = 0; group < 2 * kPairs; ++group) {
#pragma GCC unroll 4
        for (int row = first; row < end; ++row) {
          int32_t four;
          std::memcpy(&four, rows.bytes + row * width + block * kInt4Block + group * kGroup, sizeof four);
          __m512i& sum = exact[row - first][group % num_parts];
          if (group < num_parts)
            sum = group == 0 ? _mm512_set1_epi32(rows.offsets[row * num_blocks + block]) : _mm512_setzero_si512();
          sum = _mm512_dpbusd_epi32(sum, groups[group], _mm512_set1_epi32(four));
        }
      }
#pragma GCC unroll 4
      for (int row = first; row < end; ++row) {
        __m512i* parts = exact[row - first];
#pragma GCC unroll 2
        for (int rest = num_parts / 2; rest > 0; rest /= 2) {
#pragma GCC unroll 2
          for (int i = 0; i < rest; ++i) parts[i] = _mm512_add_epi32(parts[i], parts[i + rest]);
        }
        sums[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(parts[0]), scales, sums[row]);
      }
    }
  }
  const int64_t column = panel * kInt4PanelColumns;
  const __mmask16 mask = first_lanes(matrix.num_columns - column);
  for (int row = 0; row < num_rows; ++row) {
    __m512 y = _mm512_mul_ps(sums[row], _mm512_set1_ps(rows.scales[row]));
    if (matrix.bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, matrix.bias + column));
    if (matrix.is_gelu) y = gelu(y);
    _mm512_mask_storeu_ps(output + row * matrix.num_columns + column, mask, y);
  }
}

using Tile = void (*)(const Rounded&, const Int4Matrix&, int64_t, float*);
constexpr Tile kTiles[kTileRows] = {multiply_tile<1>,  multiply_tile<2>,  multiply_tile<3>,  multiply_tile<4>,
                                    multiply_tile<5>,  multiply_tile<6>,  multiply_tile<7>,  multiply_tile<8>,
                                    multiply_tile<9>,  multiply_tile<10>, multiply_tile<11>, multiply_tile<12>,
                                    multiply_tile<13>, multiply_tile<14>, multiply_tile<15>, multiply_tile<16>};

}  // namespace

void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Int4Matrix& matrix, float* output) {
  if (num_rows == 0) return;
  const int64_t width = matrix.num_rows, num_blocks = width / kInt4Block;
  const int64_t num_panels = (matrix.num_columns + kInt4PanelColumns - 1) / kInt4PanelColumns;
  thread_local Scratch<int8_t> byte_scratch;
  thread_local Scratch<float> scale_scratch;
  thread_local Scratch<int32_t> block_scratch;
  // Plain pointers for the lambdas: the thread_local names mean other objects on other threads.
  int8_t* const bytes = byte_scratch.at_least(num_rows * width);
  float* const scales = scale_scratch.at_least(num_rows);
  int32_t* const offsets = block_scratch.at_least(num_rows * num_blocks);

  for_each_row(parallel, num_rows, width, [=](int64_t row) {
    scales[row] = round_row(rows + row * width, width, kStep, 0, bytes + row * width);
    sum_blocks(bytes + row * width, num_blocks, offsets + row * num_blocks);
  });
  for_each_tile(parallel, num_panels, num_rows, kTileRows, [=, &matrix](int64_t panel, int64_t row, int64_t count) {
    const Rounded tile{bytes + row * width, scales + row, offsets + row * num_blocks};
    kTiles[count - 1](tile, matrix, panel, output + row * matrix.num_columns);
  });
}

}  // namespace onward
