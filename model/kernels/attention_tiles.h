// Scores and weighted sums in tile registers: the arithmetic of long chunks in attention.cc, the only file that includes
// this one. For files that are compiled for AVX-512.
//
// A float is the sum of three bfloat16: its first 8 significant bits, the next 8, and the rest. A product of floats is
// the sum of six products of such parts; the three that are left out are below its rounding. A number of the int8 cache
// is one part, and what it is multiplied by two: the nearest bfloat16 and 8 significant bits of the rest, within 2^-16 of
// it. Each sum adds its products in one order, 32 dimensions or keys at a time.
#pragma once

#include <type_traits>

#include "attention_blocks.h"
#include "tiles.h"

namespace onward {
namespace {

constexpr int64_t kAtOnce = 32;        // numbers that a product of tiles sums
constexpr int64_t kGroup = 64;         // keys that stay in the L1 cache for all rows: packed, then their values
constexpr int kSums = 4;               // tiles of sums
constexpr int kRow = 4, kColumn = 7;   // tiles of parts: 4, 5 and 6 of rows, 7 of keys or values

using FloatTiles = Tiles<64>;

// Parts of a cached number, and of a query's and a weight.
template <typename Number>
constexpr int kPartsOf = sizeof(Number) == 1 ? 1 : 3;
template <typename Number>
constexpr int kRowParts = sizeof(Number) == 1 ? 2 : 3;

// The parts of 16 numbers, in the upper halves of their places. The first of two is infinite from 3.39e38 on.
template <int PARTS>
struct Split {
  __m512i part[PARTS];
};

template <int PARTS>
[[gnu::always_inline]] inline Split<PARTS> split(Vec numbers) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000)), half = _mm512_set1_epi32(0x8000);
  Split<PARTS> parts;
#pragma GCC unroll 3
  for (int i = 0; i < PARTS; i++) {
    const __m512i bits = _mm512_castps_si512(numbers);
    parts.part[i] = _mm512_and_si512(PARTS == 2 && i == 0 ? _mm512_add_epi32(bits, half) : bits, upper);
    numbers = _mm512_sub_ps(numbers, _mm512_castsi512_ps(parts.part[i]));
  }
  return parts;
}

// The same part of 32 numbers, in order: the upper halves of their places.
[[gnu::always_inline]] inline __m512i upper_halves(__m512i first, __m512i second) {
  const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25,
                                       23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  return _mm512_permutex2var_epi16(first, odd, second);
}

// Writes the parts of `count` numbers, a multiple of 32: part i from `parts` + i * `distance` on.
template <int PARTS>
void write_parts(const float* numbers, int64_t count, uint16_t* parts, int64_t distance) {
  for (int64_t n = 0; n < count; n += kAtOnce) {
    const auto first = split<PARTS>(_mm512_load_ps(numbers + n));
    const auto second = split<PARTS>(_mm512_load_ps(numbers + n + kLanes));
#pragma GCC unroll 3
    for (int i = 0; i < PARTS; i++) {
      _mm512_store_si512(parts + i * distance + n, upper_halves(first.part[i], second.part[i]));
    }
  }
}

// Words of a packed block of 16 keys, or of the values of so many.
template <typename Number>
int64_t block_words(int64_t dim) {
  return kPartsOf<Number> * dim / 2 * kLanes;
}

// Packs 16 keys, of which `count` exist and the others are zeros: each part is [D / 2][16 keys][2 dimensions].
template <typename Number>
void pack_key_tiles(const Number* keys, int64_t count, int64_t dim, uint32_t* packed) {
  constexpr int parts = kPartsOf<Number>;
  for (int64_t d = 0; d < dim; d += kAtOnce) {
    Vec v[parts][kLanes];
    for (int key = 0; key < kLanes; key++) {
      const bool is_there = key < count;
      const Number* row = keys + (is_there ? key * dim + d : 0);
      const auto low = split<parts>(is_there ? load(row) : _mm512_setzero_ps());
      const auto high = split<parts>(is_there ? load(row + kLanes) : _mm512_setzero_ps());
#pragma GCC unroll 3
      for (int i = 0; i < parts; i++) {
        v[i][slot_of(key)] = _mm512_castsi512_ps(upper_halves(low.part[i], high.part[i]));
      }
    }
    for (int i = 0; i < parts; i++) {
      exchange<8>(v[i]);
      exchange<4>(v[i]);
      exchange<2>(v[i]);
      exchange<1>(v[i]);
      float* rows = reinterpret_cast<float*>(packed + (i * dim + d) / 2 * kLanes);
      for (int pair = 0; pair < kLanes; pair++) _mm512_store_ps(rows + pair * kLanes, v[i][pair]);
    }
  }
}

// Packs the values of 32 keys, of which `count` exist and the others are zeros: each part is [D / 16][16][16][2 keys].
template <typename Number>
void pack_value_tiles(const Number* values, int64_t count, int64_t dim, uint32_t* packed) {
  constexpr int parts = kPartsOf<Number>;
  for (int64_t pair = 0; pair < kLanes; pair++) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Number* row = values + 2 * pair * dim + d;
      const auto first = split<parts>(2 * pair < count ? load(row) : _mm512_setzero_ps());
      const auto second = split<parts>(2 * pair + 1 < count ? load(row + dim) : _mm512_setzero_ps());
#pragma GCC unroll 3
      for (int i = 0; i < parts; i++) {
        const __m512i both = _mm512_or_si512(_mm512_srli_epi32(first.part[i], 16), second.part[i]);
        _mm512_store_si512(packed + (i * dim + d + pair) * kLanes, both);
      }
    }
  }
}

// Calls `body` for 0, 1, ..., COUNT - 1, as constants.
template <int COUNT, typename Body>
[[gnu::always_inline]] inline void for_tiles(const Body& body) {
  if constexpr (COUNT > 1) for_tiles<COUNT - 1>(body);
  body(std::integral_constant<int, COUNT - 1>{});
}

// Adds the products of the rows' parts and those of a column tile, which are `distance` words apart, to a sum.
template <int SUM, typename Number>
[[gnu::always_inline]] inline void add_products(FloatTiles& tiles, const uint32_t* column, int64_t distance) {
  for_tiles<kPartsOf<Number>>([&](auto part) {
    tiles.load<kColumn>(column + part * distance, kLine);
    for_tiles<kRowParts<Number> - part>([&](auto row) { tiles.add_floats<SUM, kRow + row, kColumn>(); });
  });
}

// The scores of 16 query rows for BLOCKS blocks of 16 packed keys. `queries` are the rows' parts, `distance` apart.
template <typename Number, int BLOCKS>
void score_tiles(FloatTiles& tiles, const uint16_t* queries, int64_t distance, const uint32_t* packed, int64_t dim,
                 float* scores, int64_t stride) {
  const int64_t block = block_words<Number>(dim), row_bytes = dim * sizeof(uint16_t);
  for_tiles<BLOCKS>([&](auto n) { tiles.clear<n>(); });
  for (int64_t d = 0; d < dim; d += kAtOnce) {
    for_tiles<kRowParts<Number>>([&](auto i) { tiles.load<kRow + i>(queries + i * distance + d, row_bytes); });
    for_tiles<BLOCKS>([&](auto n) {
      add_products<n, Number>(tiles, packed + n * block + d / 2 * kLanes, dim / 2 * kLanes);
    });
  }
  for_tiles<BLOCKS>([&](auto n) { tiles.store<n>(scores + n * kLanes, stride * sizeof(float)); });
}

// Adds the weighted values of `blocks` blocks of 32 keys to SUMS * 16 dimensions of 16 rows' sums, [16, D]. `weights`
// are parts of [16][kGroup] weights, `values` the packed values of these dimensions.
template <typename Number, int SUMS>
void weigh_tiles(FloatTiles& tiles, const uint16_t* weights, const uint32_t* values, int64_t blocks, int64_t dim,
                 float* sums) {
  const int64_t row_bytes = dim * sizeof(float);
  for_tiles<SUMS>([&](auto n) { tiles.load<n>(sums + n * kLanes, row_bytes); });
  for (int64_t block = 0; block < blocks; block++) {
    for_tiles<kRowParts<Number>>([&](auto i) {
      tiles.load<kRow + i>(weights + i * kTileRows * kGroup + block * kAtOnce, kGroup * sizeof(uint16_t));
    });
    const uint32_t* packed = values + block * 2 * block_words<Number>(dim);
    for_tiles<SUMS>([&](auto n) {
      add_products<n, Number>(tiles, packed + n * kLanes * kLanes, dim * kLanes);
    });
  }
  for_tiles<SUMS>([&](auto n) { tiles.store<n>(sums + n * kLanes, row_bytes); });
}

// Writes the parts of a row's weights for keys [`begin`, `end`), kTileRows * kGroup apart; zeros where it has none.
template <int PARTS>
void write_weights(const float* row, int64_t begin, int64_t end, int64_t from, int64_t to, uint16_t* parts) {
  for (int64_t k = begin; k < end; k += kAtOnce, parts += kAtOnce) {
    alignas(kLine) float weights[kAtOnce] = {};
    for (int64_t i = 0; i < kAtOnce; i += kLanes) {
      if (k + i < to && k + i + kLanes > from) _mm512_store_ps(weights + i, _mm512_load_ps(row + k + i));
    }
    write_parts<PARTS>(weights, kAtOnce, parts, kTileRows * kGroup);
  }
}

// By the number of blocks, and of sums.
template <typename Number>
constexpr decltype(&score_tiles<Number, 1>) kScoreTiles[kGroup / kLanes] = {
    score_tiles<Number, 1>, score_tiles<Number, 2>, score_tiles<Number, 3>, score_tiles<Number, 4>};
template <typename Number>
constexpr decltype(&weigh_tiles<Number, 1>) kWeighTiles[kSums] = {weigh_tiles<Number, 1>, weigh_tiles<Number, 2>,
                                                                  weigh_tiles<Number, 3>, weigh_tiles<Number, 4>};

}  // namespace
}  // namespace onward
