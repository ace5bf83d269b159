#include "int4_linear.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "scratch.h"
#include "tiles.h"

// Runs only where `can_multiply` of linear.h returns true.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

#include "lanes.h"
#include "panels.h"
#include "rounding.h"

namespace onward {
namespace {

constexpr int64_t kVectorRows = 16;  // more rows amortize the unpacking of codes
constexpr int64_t kMinTileRows = 14;  // fewer are multiplied faster by vectors
constexpr int32_t kZeroCode = 8;
constexpr float kStep = 1.0f / 127;
constexpr int64_t kGroup = 4;   // codes of a column that one instruction multiplies
constexpr int kPairs = 4;       // pairs of groups in a block, each pair in one register
constexpr int kChains = 4;      // chains of additions that hide the latency of one: of rows, or of parts of few rows
constexpr int64_t kBlockBytes = kPairs * 64;
constexpr int64_t kDelay = 4;  // blocks in flight: a block's sums are scaled three blocks after they are stored
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

// Writes one panel's columns of a row from its sum over blocks.
inline void write_columns(__m512 sum, float scale, const Int4Matrix& matrix, int64_t panel, float* output) {
  const int64_t column = panel * kInt4PanelColumns;
  const __mmask16 mask = first_lanes(matrix.num_columns - column);
  __m512 y = _mm512_mul_ps(sum, _mm512_set1_ps(scale));
  if (matrix.bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, matrix.bias + column));
  if (matrix.activation == Activation::kGelu) y = gelu(y);
  _mm512_mask_storeu_ps(output, mask, y);
}

// One panel's columns for `num_rows` quantized rows; rows of output are `pitch` apart.
template <int num_rows>
void multiply_vectors(const Rounded& rows, const Int4Matrix& matrix, int64_t panel, float* output, int64_t pitch) {
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
  for (int row = 0; row < num_rows; ++row)
    write_columns(sums[row], rows.scales[row], matrix, panel, output + row * pitch);
}

using Vectors = void (*)(const Rounded&, const Int4Matrix&, int64_t, float*, int64_t);
constexpr Vectors kVectors[kVectorRows] = {
    multiply_vectors<1>,  multiply_vectors<2>,  multiply_vectors<3>,  multiply_vectors<4>,
    multiply_vectors<5>,  multiply_vectors<6>,  multiply_vectors<7>,  multiply_vectors<8>,
    multiply_vectors<9>,  multiply_vectors<10>, multiply_vectors<11>, multiply_vectors<12>,
    multiply_vectors<13>, multiply_vectors<14>, multiply_vectors<15>, multiply_vectors<16>};

// Writes a panel's weights as tiles: `[K / 32][8][16][4]`.
void unpack(const uint8_t* codes, int64_t num_blocks, int8_t* weights) {
  const __m512i low_bits = _mm512_set1_epi8(0xF), zero = _mm512_set1_epi8(kZeroCode);
  for (int64_t i = 0; i < num_blocks * kPairs; ++i, codes += 64, weights += 128) {
    const __m512i both = _mm512_loadu_si512(codes);
    _mm512_store_si512(weights, _mm512_sub_epi8(_mm512_and_si512(both, low_bits), zero));
    _mm512_store_si512(weights + 64,
                       _mm512_sub_epi8(_mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits), zero));
  }
}

using BlockTiles = Tiles<kInt4Block>;
using BlockSums = int32_t[kTileRows][kTileColumns];

// Writes a tile of rows' sums over one block, by the tile register `block % kDelay`.
template <int tile = 0>
void multiply_block(BlockTiles& tiles, const int8_t* rows, int64_t width, const int8_t* weights, int64_t block,
                    BlockSums* sums) {
  if constexpr (tile < kDelay) {
    if (block % kDelay != tile) return multiply_block<tile + 1>(tiles, rows, width, weights, block, sums);
    tiles.clear<tile>();
    tiles.load<4>(rows + block * kInt4Block, width);
    tiles.load<6>(weights + block * kInt4Block * kInt4PanelColumns, sizeof(int32_t) * kTileColumns);
    tiles.add_signed<tile, 4, 6>();
    tiles.store<tile>(sums[tile][0], sizeof(int32_t) * kTileColumns);
  }
}

// One panel's columns for `count` quantized rows. Memory past them is read, up to a whole tile. The next panel's codes
// come while the first rows are multiplied.
void multiply_tile(BlockTiles& tiles, const int8_t* rows, const float* row_scales, const Int4Matrix& matrix,
                   const int8_t* weights, int64_t panel, int64_t count, bool is_first, float* output, int64_t pitch) {
  const int64_t width = matrix.num_rows, num_blocks = width / kInt4Block;
  const uint16_t* block_scales = matrix.scales + panel * num_blocks * kInt4PanelColumns;
  const uint8_t* next_codes = matrix.panels + (panel + 1) * num_blocks * kBlockBytes;
  alignas(64) BlockSums exact[kDelay];
  alignas(64) float found[kTileRows][kTileColumns];
  __m512 sums[kTileRows];
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) sums[row] = _mm512_setzero_ps();
  for (int64_t next = 0; next < kDelay - 1 && next < num_blocks; ++next)
    multiply_block(tiles, rows, width, weights, next, exact);
  for (int64_t block = 0; block < num_blocks; ++block, block_scales += kInt4PanelColumns) {
    if (const int64_t next = block + kDelay - 1; next < num_blocks)
      multiply_block(tiles, rows, width, weights, next, exact);
    for (int pair = 0; pair < kPairs && is_first; ++pair)
      _mm_prefetch(next_codes + block * kBlockBytes + pair * 64, _MM_HINT_T0);
    const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(block_scales)));
    const BlockSums& products = exact[block % kDelay];
#pragma GCC unroll 16
    for (int row = 0; row < kTileRows; ++row)
      sums[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(products[row])), scales, sums[row]);
  }
#pragma GCC unroll 16
  for (int row = 0; row < kTileRows; ++row) _mm512_store_ps(found[row], sums[row]);  // for an index known only here
  for (int64_t row = 0; row < count; ++row)
    write_columns(_mm512_load_ps(found[row]), row_scales[row], matrix, panel, output + row * pitch);
}

}  // namespace

void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Int4Matrix& matrix, float* output) {
  if (num_rows == 0) return;
  const int64_t width = matrix.num_rows, num_blocks = width / kInt4Block;
  thread_local Scratch<int8_t> byte_scratch;
  thread_local Scratch<float> scale_scratch;
  thread_local Scratch<int32_t> block_scratch;
  // Plain pointers for the lambdas: the thread_local names mean other objects on other threads.
  const bool uses_tiles = num_rows >= kMinTileRows && has_tiles();
  const int64_t num_read = uses_tiles ? (num_rows + kTileRows - 1) / kTileRows * kTileRows : num_rows;
  int8_t* const bytes = byte_scratch.at_least(num_read * width);
  float* const scales = scale_scratch.at_least(num_rows);
  int32_t* const offsets = block_scratch.at_least(num_rows * num_blocks);

  for_each_row(parallel, num_rows, width, [=](int64_t row) {
    scales[row] = round_row(rows + row * width, width, kStep, 0, bytes + row * width);
    // Tiles take signed weights; rows that fill none are left to vectors.
    if (!uses_tiles || row >= num_rows / kTileRows * kTileRows)
      sum_blocks(bytes + row * width, num_blocks, offsets + row * num_blocks);
  });
  const auto by_vectors = [=, &matrix](int64_t panel, int64_t first, int64_t count, float* results, int64_t pitch) {
    for (int64_t row = 0; row < count; row += kVectorRows) {
      const Rounded rounded{bytes + (first + row) * width, scales + first + row, offsets + (first + row) * num_blocks};
      kVectors[std::min(kVectorRows, count - row) - 1](rounded, matrix, panel, results + row * pitch, pitch);
    }
  };
  const Results results{output, num_rows, matrix.num_columns, matrix.activation};
  // A panel's results by `multiply`, or a panel of gates' and its ups'.
  const auto write = [=](int64_t panel, int64_t first, int64_t count, float* numbers, int64_t pitch, auto& multiply) {
    if (results.activation != Activation::kSwiGlu) return multiply(panel, first, count, numbers, pitch);
    write_gated<kInt4PanelColumns>(results, panel, first, count, numbers, pitch, multiply);
  };
  if (!uses_tiles) {
    share_panels<kInt4PanelColumns>(parallel, results, [&] {
      return [&](int64_t panel, int64_t first, int64_t count, float* numbers, int64_t pitch) {
        write(panel, first, count, numbers, pitch, by_vectors);
      };
    });
    return;
  }
  share_panels<kInt4PanelColumns>(parallel, results, [=, &matrix] {
    thread_local Scratch<int8_t> weight_scratch;
    // Of two panels: gates and ups take turns.
    int8_t* const weights = weight_scratch.at_least(2 * width * kInt4PanelColumns);
    return [=, &matrix, unpacked = std::array<int64_t, 2>{-1, -1}, tiles = BlockTiles()](
               int64_t pair, int64_t from, int64_t num_all, float* output, int64_t distance) mutable {
      const auto by_tiles = [&](int64_t panel, int64_t first, int64_t count, float* numbers, int64_t pitch) {
        const bool is_up =
            matrix.activation == Activation::kSwiGlu && 2 * panel * kInt4PanelColumns >= matrix.num_columns;
        int8_t* const own = weights + is_up * width * kInt4PanelColumns;
        const bool is_new = std::exchange(unpacked[is_up], panel) != panel;
        if (is_new) unpack(matrix.panels + panel * num_blocks * kBlockBytes, num_blocks, own);
        for (int64_t row = 0; row < count; row += kTileRows) {
          const int64_t size = std::min(kTileRows, count - row);
          if (size < kMinTileRows) {
            by_vectors(panel, first + row, size, numbers + row * pitch, pitch);
          } else {
            multiply_tile(tiles, bytes + (first + row) * width, scales + first + row, matrix, own, panel, size,
                          is_new && row == 0, numbers + row * pitch, pitch);
          }
        }
      };
      write(pair, from, num_all, output, distance, by_tiles);
    };
  });
}

}  // namespace onward
