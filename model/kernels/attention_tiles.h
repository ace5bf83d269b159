// Scores and weighted sums in tile registers: the arithmetic of long chunks in attention.cc, the only file that includes
// this one. For files that are compiled for AVX-512.
//
// A float is the sum of three bfloat16: its first 8 significant bits, the next 8, and the rest. A product of floats is
// the sum of six products of such parts; the three that are left out are below its rounding. A number of the int8 cache
// is one part, and what it is multiplied by two: the nearest bfloat16 and 8 significant bits of the rest, within 2^-16 of
// it. Each sum adds its products in one order, 32 dimensions or keys at a time.
//
// Vectors and tiles take turns: the processor does not run them side by side well enough to pay for smaller pieces.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_blocks.h"
#include "scratch.h"
#include "tiles.h"

namespace onward {
namespace {

constexpr int64_t kAtOnce = 32;                 // numbers that a product of tiles sums
constexpr int64_t kGroup = 64;                  // keys that stay in the L1 cache for all rows: packed, then their values
constexpr int kSums = 4;                        // tiles of sums
constexpr int kRow = 4, kColumn = 7;            // tiles of parts: 4, 5 and 6 of rows, 7 of keys or values
constexpr int64_t kRowsInTiles = 512;           // query rows of one task at most: a multiple of kTileRows
constexpr int64_t kNumbersInTiles = 32 * 1024;  // of these rows' queries at most: with the keys part of the L2 cache
constexpr int64_t kRowsScored = 32;             // of these rows are scored at a time
constexpr int64_t kKeysScored = 512;            // for so many keys: whole groups
// Between the scores of two rows: an odd number of lines, since rows a power of two apart share cache sets.
constexpr int64_t kStride = (kKeysScored / kLanes | 1) * kLanes;

// The most rows of one head in a task.
int64_t most_rows_in_tiles(int64_t dim) {
  return std::clamp(kNumbersInTiles / dim / kTileRows * kTileRows, kTileRows, kRowsInTiles);
}

using FloatTiles = Tiles<64>;

// Parts of a cached number, and of a query's and a weight.
template <typename Number>
constexpr int kPartsOf = sizeof(Number) == 1 ? 1 : 3;
template <typename Number>
constexpr int kRowParts = sizeof(Number) == 1 ? 2 : 3;

// Between the parts of two rows' weights. Two parts of a block take the place of its scores.
template <typename Number>
constexpr int64_t kWeightPitch = kRowParts<Number> == 2 ? 2 * kStride : (3 * kKeysScored / kAtOnce | 1) * kAtOnce;

// The parts of 16 numbers, in the upper halves of their places; below the last one's are more digits. The first of two
// is infinite from 3.39e38 on.
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
    parts.part[i] = _mm512_castps_si512(numbers);
    if (i == PARTS - 1) break;
    if (PARTS == 2) parts.part[i] = _mm512_add_epi32(parts.part[i], half);
    parts.part[i] = _mm512_and_si512(parts.part[i], upper);
    numbers = _mm512_sub_ps(numbers, _mm512_castsi512_ps(parts.part[i]));
  }
  return parts;
}

// The same part of 32 numbers: the upper halves of their places. Numbers 16 apart are neighbors; so are those that they
// are multiplied by.
[[gnu::always_inline]] inline __m512i pairs(__m512i first, __m512i second) {
  return _mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_srli_epi32(first, 16), second);
}

// Writes the parts of `count` numbers, a multiple of 32: part i from `parts` + i * `distance` on.
template <int PARTS>
void write_parts(const float* numbers, int64_t count, uint16_t* parts, int64_t distance) {
  for (int64_t n = 0; n < count; n += kAtOnce) {
    const auto first = split<PARTS>(_mm512_load_ps(numbers + n));
    const auto second = split<PARTS>(_mm512_load_ps(numbers + n + kLanes));
#pragma GCC unroll 3
    for (int i = 0; i < PARTS; i++) {
      _mm512_store_si512(parts + i * distance + n, pairs(first.part[i], second.part[i]));
    }
  }
}

// Replaces a row's scores in `range` by their exponentials, relative to the largest so far, and writes their parts, those
// of 32 keys after one another; `parts` may be the scores' own place if there are two. The exponentials of other keys in
// `blocks`, whole blocks of 32, are zeros. Returns by what those of earlier keys are to be multiplied.
template <int PARTS>
float exponentiate_parts(float* scores, KeyRange range, KeyRange blocks, Softmax& softmax, uint16_t* parts) {
  const bool is_empty = range.from >= range.to;
  const int64_t from = is_empty ? blocks.to : range.from / kAtOnce * kAtOnce;
  const int64_t to = is_empty ? blocks.to : round_up(range.to, kAtOnce);
  std::fill(parts + blocks.from * PARTS, parts + from * PARTS, 0);
  std::fill(parts + to * PARTS, parts + blocks.to * PARTS, 0);
  if (is_empty) return 1.0f;
  const Vec masked = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  if (range.from >= from + kLanes) _mm512_store_ps(scores + from, masked);
  if (range.to <= to - kLanes) _mm512_store_ps(scores + to - kLanes, masked);
  const Vec largest = find_largest(scores, range.from, range.to, softmax.largest);
  Vec sum = _mm512_setzero_ps();
  const auto exponential = [&](int64_t k) {
    const Vec score = _mm512_sub_ps(_mm512_load_ps(scores + k), largest);
    const Vec weight = PARTS == 2 ? power_of_two(score, kRoughPower) : power_of_two(score);
    sum = _mm512_add_ps(sum, weight);
    return split<PARTS>(weight);
  };
  for (int64_t k = from; k < to; k += kAtOnce) {
    const auto first = exponential(k), second = exponential(k + kLanes);
#pragma GCC unroll 3
    for (int i = 0; i < PARTS; i++) {
      _mm512_store_si512(parts + k * PARTS + i * kAtOnce, pairs(first.part[i], second.part[i]));
    }
  }
  return softmax.add(largest, sum);
}

// Words of a packed block of 16 keys, or of the values of so many.
template <typename Number>
int64_t block_words(int64_t dim) {
  return kPartsOf<Number> * dim / 2 * kLanes;
}

// Packs 16 keys, of which `count` exist and the others are zeros: each part is [D / 32][16][16 keys][2 dimensions].
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
        v[i][slot_of(key)] = _mm512_castsi512_ps(pairs(low.part[i], high.part[i]));
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
  for (int64_t key = 0; key < kLanes; key++) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Number* row = values + key * dim + d;
      const auto first = split<parts>(key < count ? load(row) : _mm512_setzero_ps());
      const auto second = split<parts>(key + kLanes < count ? load(row + kLanes * dim) : _mm512_setzero_ps());
#pragma GCC unroll 3
      for (int i = 0; i < parts; i++) {
        _mm512_store_si512(packed + (i * dim + d + key) * kLanes, pairs(first.part[i], second.part[i]));
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
                 float* scores) {
  const int64_t block = block_words<Number>(dim), row_bytes = dim * sizeof(uint16_t);
  for_tiles<BLOCKS>([&](auto n) { tiles.clear<n>(); });
  for (int64_t d = 0; d < dim; d += kAtOnce) {
    for_tiles<kRowParts<Number>>([&](auto i) { tiles.load<kRow + i>(queries + i * distance + d, row_bytes); });
    for_tiles<BLOCKS>([&](auto n) {
      add_products<n, Number>(tiles, packed + n * block + d / 2 * kLanes, dim / 2 * kLanes);
    });
  }
  for_tiles<BLOCKS>([&](auto n) { tiles.store<n>(scores + n * kLanes, kStride * sizeof(float)); });
}

// Adds the weighted values of `blocks` blocks of 32 keys to SUMS * 16 dimensions of 16 rows' sums, [16, D]. `weights`
// are 16 rows of parts, kWeightPitch apart, `values` the packed values of these dimensions.
template <typename Number, int SUMS>
void weigh_tiles(FloatTiles& tiles, const uint16_t* weights, const uint32_t* values, int64_t blocks, int64_t dim,
                 float* sums) {
  const int64_t row_bytes = dim * sizeof(float), pitch = kWeightPitch<Number> * sizeof(uint16_t);
  for_tiles<SUMS>([&](auto n) { tiles.load<n>(sums + n * kLanes, row_bytes); });
  for (int64_t block = 0; block < blocks; block++) {
    for_tiles<kRowParts<Number>>([&](auto i) {
      tiles.load<kRow + i>(weights + (block * kRowParts<Number> + i) * kAtOnce, pitch);
    });
    const uint32_t* packed = values + block * 2 * block_words<Number>(dim);
    for_tiles<SUMS>([&](auto n) {
      add_products<n, Number>(tiles, packed + n * kLanes * kLanes, dim * kLanes);
    });
  }
  for_tiles<SUMS>([&](auto n) { tiles.store<n>(sums + n * kLanes, row_bytes); });
}

// By the number of blocks, and of sums.
template <typename Number>
constexpr decltype(&score_tiles<Number, 1>) kScoreTiles[kGroup / kLanes] = {
    score_tiles<Number, 1>, score_tiles<Number, 2>, score_tiles<Number, 3>, score_tiles<Number, 4>};
template <typename Number>
constexpr decltype(&weigh_tiles<Number, 1>) kWeighTiles[kSums] = {weigh_tiles<Number, 1>, weigh_tiles<Number, 2>,
                                                                  weigh_tiles<Number, 3>, weigh_tiles<Number, 4>};

// Query rows of one K/V head in the order of their tokens, and what they have added up so far.
template <typename Number>
class TileRows {
 public:
  TileRows(Scratch<float>& scratch, int count, int64_t dim)
      : count_(count),
        dim_(dim),
        part_(round_up(count, kTileRows) * dim),
        block_(kKeysScored / kLanes * block_words<Number>(dim)) {
    constexpr int parts = kRowParts<Number>;
    const int64_t weights = parts == 2 ? 0 : kRowsScored * kWeightPitch<Number> / 2;
    sums_ = scratch.at_least(part_ + kRowsScored * kStride + dim + 2 * block_ + parts * part_ / 2 + weights);
    scores_ = sums_ + part_;
    query_ = scores_ + kRowsScored * kStride;
    keys_ = reinterpret_cast<uint32_t*>(query_ + dim);
    values_ = keys_ + block_;
    queries_ = reinterpret_cast<uint16_t*>(values_ + block_);
    weights_ = parts == 2 ? reinterpret_cast<uint16_t*>(scores_) : queries_ + parts * part_;
    std::fill(sums_, scores_, 0.0f);
    for (int i = 0; i < parts; i++) std::fill(queries_ + i * part_ + count * dim, queries_ + (i + 1) * part_, 0);
  }

  float* query() { return query_; }
  const float* sums(int row) const { return sums_ + row * dim_; }
  const Softmax& softmax(int row) const { return softmax_[row]; }

  // Takes a row's query from `query()`, rotated and scaled, with the keys that it attends to.
  void set(int row, KeyRange range, float sink) {
    write_parts<kRowParts<Number>>(query_, dim_, queries_ + row * dim_, part_);
    range_[row] = range;
    softmax_[row] = {sink, 0.0f};
  }

  // Attends to a head's cached keys and values, `length` of each.
  void attend(const Number* keys, const Number* values, int64_t length) {
    FloatTiles tiles;
    const int64_t last = range_[count_ - 1].to, words = block_words<Number>(dim_);
    for (int64_t k = range_[0].from / kAtOnce * kAtOnce, next; k < last; k = next) {
      next = std::min((k / kKeysScored + 1) * kKeysScored, last);
      for (int64_t i = k; i < next; i += kAtOnce) {
        const int64_t there = std::min(length - i, kAtOnce), place = (i - k) / kLanes * words;
        pack_key_tiles(keys + i * dim_, there, dim_, keys_ + place);
        pack_key_tiles(keys + (i + kLanes) * dim_, there - kLanes, dim_, keys_ + place + words);
        pack_value_tiles(values + i * dim_, there, dim_, values_ + place);
      }
      for (int r = 0; r < count_; r += kRowsScored) {
        add_keys(tiles, r, std::min<int>(r + kRowsScored, count_), {k, next});
      }
    }
  }

 private:
  // Adds what rows [`first`, `end`) attend to among the packed keys.
  void add_keys(FloatTiles& tiles, int first, int end, KeyRange among) {
    const int64_t words = block_words<Number>(dim_), length = among.to - among.from;
    KeyRange seen[kRowsScored];
    for (int r = first; r < end; r++) {
      seen[r - first] = {std::max(range_[r].from - among.from, int64_t{0}), std::min(range_[r].to - among.from, length)};
    }
    // The keys that any of 16 rows attends to.
    const auto seen_by = [&](int r) {
      return KeyRange{seen[r - first].from, seen[std::min<int>(r + kTileRows, end) - 1 - first].to};
    };
    // Calls `use(first row, blocks)` for each 16 rows and the blocks of these keys from key `k` on.
    const auto for_rows = [&](int64_t k, int64_t block, const auto& use) {
      for (int r = first; r < end; r += kTileRows) {
        const KeyRange any = seen_by(r);
        const int64_t to = std::min(any.to, k + kGroup);
        if (to > k && any.from < to) use(r, (to - k + block - 1) / block);
      }
    };
    for (int64_t k = 0; k < length; k += kGroup) {
      for_rows(k, kLanes, [&](int r, int64_t blocks) {
        kScoreTiles<Number>[blocks - 1](tiles, queries_ + r * dim_, part_, keys_ + k / kLanes * words, dim_,
                                        scores_ + (r - first) * kStride + k);
      });
    }
    for (int r = first; r < end; r++) {
      const int place = r - first;
      const KeyRange any = seen_by(first + place / kTileRows * kTileRows);
      if (any.from >= any.to) continue;
      const float factor = exponentiate_parts<kRowParts<Number>>(
          scores_ + place * kStride, seen[place], {any.from / kGroup * kGroup, round_up(any.to, kAtOnce)}, softmax_[r],
          weights_ + place * kWeightPitch<Number>);
      if (factor == 1.0f) continue;
      for (int64_t d = 0; d < dim_; d++) sums_[r * dim_ + d] *= factor;
    }
    // Rows past the end have any weights: nothing reads their sums.
    for (int64_t k = 0; k < length; k += kGroup) {
      for_rows(k, kAtOnce, [&](int r, int64_t blocks) {
        for (int64_t d = 0; d < dim_; d += kSums * kLanes) {
          kWeighTiles<Number>[std::min<int64_t>((dim_ - d) / kLanes, kSums) - 1](
              tiles, weights_ + (r - first) * kWeightPitch<Number> + k * kRowParts<Number>,
              values_ + k / kLanes * words + d * kLanes, blocks, dim_, sums_ + r * dim_ + d);
        }
      });
    }
  }

  const int count_;
  const int64_t dim_;
  const int64_t part_;   // numbers of a part of all queries
  const int64_t block_;  // words of packed keys, and of values
  float* sums_;          // [count, padded to whole tiles, D]
  float* scores_;        // [kRowsScored, kStride]
  float* query_;         // [D]
  uint32_t* keys_;
  uint32_t* values_;
  uint16_t* queries_;    // parts of the shape of sums
  uint16_t* weights_;    // [kRowsScored, kWeightPitch]
  KeyRange range_[kRowsInTiles];
  Softmax softmax_[kRowsInTiles];
};

}  // namespace
}  // namespace onward
