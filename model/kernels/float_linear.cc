// One result is 16 lanes of sums over K, so both sides are read in memory order. A tile is 3 rows by 8 columns, so each
// load serves 3 or 8 products. Few rows are bound by memory bandwidth: if they fit the L1 cache, all of them are one
// tile, and the next columns are prefetched meanwhile. Many rows are bound by arithmetic: K is split into parts that
// stay in the L1 cache; bfloat16 is widened to float32 there, once for all rows.
#include "float_linear.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>

#include "scratch.h"

namespace onward {

bool can_multiply_floats() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

}  // namespace onward

// All above runs on any processor, all below only where it returns true.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")

#include "fold.h"
#include "gelu.h"
#include "lanes.h"

namespace onward {
namespace {

constexpr int64_t kTileRows = 3;       // with eight columns: 24 sums, which leaves registers for the operands
constexpr int64_t kTileColumns = 8;    // half a register of results
constexpr int64_t kFewRows = 8;        // at most so many rows are one tile, with as many columns as give 24 sums,
constexpr int64_t kFewNumbers = 6144;  // if they have no more numbers than stay in the L1 cache: 24 KiB
constexpr int64_t kPart = 768;       // rows of K at a time: a tile's columns take three quarters of the L1 cache
constexpr int64_t kBlock = 1 << 17;  // numbers of the rows that stay in the L2 cache for all columns
constexpr int64_t kLine = 64;

// Partial sums of 16 lanes.
struct Sum {
  __m512 lanes;
};

// Sixteen numbers as float32, zeros where `mask` has none.
[[gnu::always_inline]] inline __m512 load(const float* numbers, __mmask16 mask) {
  return _mm512_maskz_loadu_ps(mask, numbers);
}
[[gnu::always_inline]] inline __m512 load(const Bfloat16* numbers, __mmask16 mask) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, numbers)), 16));
}

// One part of K, for a tile.
template <typename Number>
struct Part {
  const Number* columns;
  int64_t column_stride;
  int64_t begin, end;  // rows of K; `columns` points at `begin`
  bool is_first, is_last;
  int64_t lines_ahead;  // cache lines to prefetch per 16 numbers of K
};

// Adds the products of 16 numbers of each row and column, those of `mask`, to a tile's sums.
template <int num_rows, int num_columns, typename Number>
[[gnu::always_inline]] inline void add_products(const float* rows, int64_t row_stride, const Number* columns,
                                                int64_t column_stride, __mmask16 mask, __m512* sums) {
  // The shorter side stays in registers.
  if constexpr (num_rows > kTileRows) {
    __m512 right[num_columns];
#pragma GCC unroll 8
    for (int column = 0; column < num_columns; ++column)
      right[column] = load(columns + column * column_stride, mask);
#pragma GCC unroll 8
    for (int row = 0; row < num_rows; ++row) {
      __m512 left = load(rows + row * row_stride, mask);
      asm("" : "+v"(left));  // as below
#pragma GCC unroll 8
      for (int column = 0; column < num_columns; ++column) {
        __m512& sum = sums[row * num_columns + column];
        sum = _mm512_fmadd_ps(left, right[column], sum);
      }
    }
    return;
  }
  __m512 left[num_rows];
#pragma GCC unroll 3
  for (int row = 0; row < num_rows; ++row) left[row] = load(rows + row * row_stride, mask);
#pragma GCC unroll 8
  for (int column = 0; column < num_columns; ++column) {
    __m512 right = load(columns + column * column_stride, mask);
    // Loaded once: the compiler would repeat the load for each multiplication, and loads are as scarce.
    asm("" : "+v"(right));
#pragma GCC unroll 3
    for (int row = 0; row < num_rows; ++row) {
      __m512& sum = sums[row * num_columns + column];
      sum = _mm512_fmadd_ps(left[row], right, sum);
    }
  }
}

// Adds one part of K to a tile of results; between parts the sums are kept in `partial`. Prefetches from `ahead` on.
template <typename Number, int num_rows, int num_columns>
void multiply_tile(const float* rows, const FloatProduct& product, int64_t column, const Part<Number>& part,
                   const char* ahead, Sum* partial, float* output) {
  const int64_t stride = product.num_rows;
  const Number* columns = part.columns;
  __m512 sums[num_rows * num_columns];
#pragma GCC unroll 24
  for (int i = 0; i < num_rows * num_columns; ++i) sums[i] = part.is_first ? _mm512_setzero_ps() : partial[i].lanes;
  int64_t k = part.begin;
  for (; k + kLanes <= part.end; k += kLanes, columns += kLanes) {
    for (int64_t i = 0; i < part.lines_ahead; ++i, ahead += kLine) _mm_prefetch(ahead, _MM_HINT_T1);
    add_products<num_rows, num_columns>(rows + k, stride, columns, part.column_stride, 0xFFFF, sums);
  }
  if (k < part.end)
    add_products<num_rows, num_columns>(rows + k, stride, columns, part.column_stride, first_lanes(part.end - k), sums);
  if (!part.is_last) {
#pragma GCC unroll 24
    for (int i = 0; i < num_rows * num_columns; ++i) partial[i].lanes = sums[i];
    return;
  }
  // Results are row-major.
  fold<num_rows * num_columns>(sums);
  alignas(64) float results[2 * kLanes];
  for (int i = 0; i < num_rows * num_columns; i += kLanes) _mm512_store_ps(results + i, sums[i / kLanes]);
  const __mmask16 mask = first_lanes(num_columns);
  for (int row = 0; row < num_rows; ++row) {
    __m512 y = _mm512_maskz_loadu_ps(mask, results + row * num_columns);
    if (product.bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(mask, product.bias + column));
    if (product.is_gelu) y = gelu(y);
    _mm512_mask_storeu_ps(output + row * product.num_columns + column, mask, y);
  }
}

// The number of columns of a tile.
constexpr int64_t tile_columns(int64_t num_rows) { return std::min(kTileColumns, kTileRows * kTileColumns / num_rows); }

template <typename Number>
using Tile = void (*)(const float*, const FloatProduct&, int64_t, const Part<Number>&, const char*, Sum*, float*);
template <typename Number>
using Tiles = std::array<Tile<Number>, kTileColumns>;  // by the number of columns minus one

template <typename Number, int num_rows, int... indices>
constexpr Tiles<Number> tiles_of(std::integer_sequence<int, indices...>) {
  return {multiply_tile<Number, num_rows, indices + 1>...};
}
template <typename Number, int num_rows>
constexpr Tiles<Number> kTilesOf =
    tiles_of<Number, num_rows>(std::make_integer_sequence<int, tile_columns(num_rows)>());
template <typename Number>
constexpr const Tiles<Number>* kTiles[kFewRows] = {&kTilesOf<Number, 1>, &kTilesOf<Number, 2>, &kTilesOf<Number, 3>,
                                                   &kTilesOf<Number, 4>, &kTilesOf<Number, 5>, &kTilesOf<Number, 6>,
                                                   &kTilesOf<Number, 7>, &kTilesOf<Number, 8>};

// Writes `count` numbers of each column as float32, with zeros up to a multiple of 16, `kPart` from one to the next.
void widen(const Bfloat16* columns, int64_t column_stride, int64_t num_columns, int64_t count, float* output) {
  for (int64_t column = 0; column < num_columns; ++column, columns += column_stride, output += kPart) {
    for (int64_t k = 0; k < count; k += kLanes)
      _mm512_store_ps(output + k, load(columns + k, first_lanes(count - k)));
  }
}

int64_t ceil_div(int64_t count, int64_t unit) { return (count + unit - 1) / unit; }

// Columns [`begin`, `end`) for `num_rows` rows, which stay in the L2 cache.
template <typename Number>
void multiply_block(const float* rows, int64_t num_rows, const FloatMatrix<Number>& matrix, int64_t begin, int64_t end,
                    float* output) {
  thread_local Scratch<Sum> sums;
  const int64_t width = matrix.num_rows;
  const bool is_one_tile = num_rows <= kTileRows || (num_rows <= kFewRows && num_rows * width <= kFewNumbers);
  const int64_t tile_rows = is_one_tile ? num_rows : kTileRows, columns_at_once = tile_columns(tile_rows);
  const int64_t num_tiles = ceil_div(num_rows, tile_rows);
  // A single tile reads its columns once, so K needs no parts.
  const int64_t num_parts = is_one_tile ? 1 : std::max<int64_t>(ceil_div(width, kPart), 1);
  const int64_t step = ceil_div(ceil_div(width, num_parts), kLanes) * kLanes;
  Sum* const partial = sums.at_least(num_parts == 1 ? 0 : num_rows * kTileColumns);
  for (int64_t column = begin; column < end; column += columns_at_once) {
    const int64_t num_columns = std::min(columns_at_once, end - column);
    const Number* columns = matrix.weights + column * matrix.stride;
    const char* ahead = reinterpret_cast<const char*>(columns + num_columns * matrix.stride);
    const int64_t lines = ceil_div(columns_at_once * kLanes * sizeof(Number), kLine);
    const int64_t lines_ahead = column + num_columns < end ? ceil_div(lines, num_tiles) : 0;
    const auto multiply_tiles = [&](const auto& part, const auto& tiles) {
      for (int64_t row = 0; row < num_rows; row += tile_rows) {
        const int64_t count = std::min(tile_rows, num_rows - row);
        (*tiles[count - 1])[num_columns - 1](rows + row * width, matrix, column, part, ahead,
                                             partial + row * kTileColumns, output + row * matrix.num_columns);
        ahead += ceil_div(part.end - part.begin, kLanes) * lines_ahead * kLine;
      }
    };
    for (int64_t index = 0; index < num_parts; ++index) {
      const int64_t first = index * step, last = std::min(first + step, width);
      const bool is_first = index == 0, is_last = index == num_parts - 1;
      if constexpr (std::is_same_v<Number, Bfloat16>) {
        if (!is_one_tile) {
          alignas(kLine) float wide[kTileColumns * kPart];
          widen(columns + first, matrix.stride, num_columns, last - first, wide);
          multiply_tiles(Part<float>{wide, kPart, first, last, is_first, is_last, lines_ahead}, kTiles<float>);
          continue;
        }
      }
      multiply_tiles(Part<Number>{columns + first, matrix.stride, first, last, is_first, is_last, lines_ahead},
                     kTiles<Number>);
    }
  }
}

}  // namespace

template <typename Number>
void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const FloatMatrix<Number>& matrix,
              float* output) {
  if (num_rows == 0 || matrix.num_columns == 0) return;
  const int64_t width = matrix.num_rows;
  // Blocks of equal size: a last block of few rows would be bound by reading the matrix.
  const int64_t num_blocks = std::max<int64_t>(ceil_div(num_rows * width, kBlock), 1);
  const int64_t block = ceil_div(ceil_div(num_rows, num_blocks), kTileRows) * kTileRows;
  share(parallel, ceil_div(matrix.num_columns, kTileColumns), [=, &matrix](int64_t begin, int64_t end) {
    begin *= kTileColumns, end = std::min(end * kTileColumns, matrix.num_columns);
    for (int64_t row = 0; row < num_rows; row += block)
      multiply_block(rows + row * width, std::min(block, num_rows - row), matrix, begin, end,
                     output + row * matrix.num_columns);
  });
}

template void multiply(const Parallel&, const float*, int64_t, const FloatMatrix<float>&, float*);
template void multiply(const Parallel&, const float*, int64_t, const FloatMatrix<Bfloat16>&, float*);

}  // namespace onward
