// Scores and weighted sums of blocks of 16 keys, in registers: the arithmetic of attention.cc, the only file that
// includes this one. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <limits>

#include "exponential.h"
#include "lanes.h"

namespace onward {
namespace {

using Vec = __m512;

// The keys that a query attends to: `from` inclusive, `to` exclusive.
struct KeyRange {
  int64_t from, to;
};

constexpr int kTile = 6;        // query rows that share each load: their sums fill the registers
constexpr int kRowsAtOnce = 3;  // query rows that share each conversion to float
constexpr int64_t kLine = 64;   // bytes of a cache line

// Rows of int8 to prefetch into the L2 cache during the computation on other rows of the same width: int8 is read so
// fast that the hardware prefetcher is late at each head.
struct Prefetch {
  const int8_t* rows;
  int64_t count;
};

int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

Vec load(const float* numbers) { return _mm512_loadu_ps(numbers); }

Vec load(const int8_t* numbers) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers))));
}

// Converts cached numbers to floats, without scales; `count` is a multiple of kLanes.
template <typename Number>
void widen(const Number* numbers, int64_t count, float* floats) {
  for (int64_t i = 0; i < count; i += kLanes) _mm512_storeu_ps(floats + i, load(numbers + i));
}

// Writes 1 / x for each number.
void invert(const float* numbers, int64_t count, float* inverses) {
  for (int64_t i = 0; i < count; i += kLanes) {
    _mm512_storeu_ps(inverses + i, _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(numbers + i)));
  }
}

// Quantizes numbers for the cache, by the inverses of scales; see attention.h.
void quantize(const float* floats, const float* inverses, int64_t count, int8_t* numbers) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec steps = _mm512_mul_ps(_mm512_loadu_ps(floats + i), _mm512_loadu_ps(inverses + i));
    // The minimum of NaN and 127 is its second operand, so the order matters.
    const Vec bounded = _mm512_max_ps(_mm512_min_ps(steps, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-128.0f));
    const __m512i whole = _mm512_cvt_roundps_epi32(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + i), _mm512_cvtepi32_epi8(whole));
  }
}

// Both halves of an exchange between two vectors DISTANCE apart: exchanges at distances 8, 4, 2 and 1 transpose 16
// vectors, up to the order of lanes, see `slot_of`.
template <int DISTANCE>
Vec low(Vec a, Vec b) {
  if constexpr (DISTANCE == 8) return _mm512_shuffle_f32x4(a, b, 0x44);
  if constexpr (DISTANCE == 4) return _mm512_shuffle_f32x4(a, b, 0x88);
  if constexpr (DISTANCE == 2) return _mm512_shuffle_ps(a, b, 0x44);
  if constexpr (DISTANCE == 1) return _mm512_shuffle_ps(a, b, 0x88);
}

template <int DISTANCE>
Vec high(Vec a, Vec b) {
  if constexpr (DISTANCE == 8) return _mm512_shuffle_f32x4(a, b, 0xEE);
  if constexpr (DISTANCE == 4) return _mm512_shuffle_f32x4(a, b, 0xDD);
  if constexpr (DISTANCE == 2) return _mm512_shuffle_ps(a, b, 0xEE);
  if constexpr (DISTANCE == 1) return _mm512_shuffle_ps(a, b, 0xDD);
}

// The vector that the exchanges move to lane `key`: bits 3 and 2 swapped, and bits 1 and 0.
constexpr int slot_of(int key) { return (key & 8) >> 1 | (key & 4) << 1 | (key & 2) >> 1 | (key & 1) << 1; }

template <int DISTANCE>
void exchange(Vec* v) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    if (i & DISTANCE) continue;
    const Vec a = v[i], b = v[i + DISTANCE];
    v[i] = low<DISTANCE>(a, b);
    v[i + DISTANCE] = high<DISTANCE>(a, b);
  }
}

// Adds lane c to lane c + DISTANCE of each vector; half as many vectors remain.
template <int DISTANCE>
void fold(Vec* v) {
#pragma GCC unroll 8
  for (int i = 0; i < DISTANCE; i++) {
    const Vec a = v[i], b = v[i + DISTANCE];
    v[i] = _mm512_add_ps(low<DISTANCE>(a, b), high<DISTANCE>(a, b));
  }
}

// The scores of one query row for 16 keys in the cache's layout. DIM is D, or 0 if only `dim` has it. If FETCHES, it
// prefetches half a block from `ahead` on into the L2 cache, spread over the keys.
template <int DIM, bool FETCHES>
Vec score_cached(const float* query, const float* keys, const float* ahead, int64_t dim) {
  const int64_t width = DIM ? DIM : dim, chain = width / kLanes;
  Vec parts[DIM ? DIM / kLanes : 1], sums[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < DIM / kLanes; i++) parts[i] = _mm512_load_ps(query + i * kLanes);
#pragma GCC unroll 16
  for (int key = 0; key < kLanes; key++) {
    const float* row = keys + key * width;
    if constexpr (FETCHES) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < (chain + 1) / 2; i++, ahead += kLanes) _mm_prefetch(ahead, _MM_HINT_T1);
    }
    Vec sum = _mm512_mul_ps(DIM ? parts[0] : _mm512_load_ps(query), load(row));
#pragma GCC unroll 8
    for (int64_t i = 1; i < chain; i++) {
      sum = _mm512_fmadd_ps(DIM ? parts[i] : _mm512_load_ps(query + i * kLanes), load(row + i * kLanes), sum);
    }
    sums[slot_of(key)] = sum;
    // Keeps the loads in the order of memory, which the hardware prefetcher needs: the compiler would load the first
    // parts of all keys, then the second ones.
    asm volatile("" ::: "memory");
  }
  fold<8>(sums);
  fold<4>(sums);
  fold<2>(sums);
  fold<1>(sums);
  return sums[0];
}

template <int ROWS>
struct Sums {
  Vec row[ROWS];
};

// The part of ROWS query rows' scores that keys in slots FIRST, FIRST + STEP, ... contribute: the tree of
// `score_cached`, walked depth first, so that few partial sums are live and rows share loads. Each key prefetches a
// row.
template <int DIM, int ROWS, int FIRST, int STEP, typename Number>
[[gnu::always_inline]] inline Sums<ROWS> score_keys(const float* queries, const Number* keys, Prefetch ahead,
                                                    int64_t dim) {
  const int64_t width = DIM ? DIM : dim;
  Sums<ROWS> sums;
  if constexpr (STEP < kLanes) {
    sums = score_keys<DIM, ROWS, FIRST, 2 * STEP>(queries, keys, ahead, dim);
    const auto others = score_keys<DIM, ROWS, FIRST + STEP, 2 * STEP>(queries, keys, ahead, dim);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Vec a = sums.row[r], b = others.row[r];
      sums.row[r] = _mm512_add_ps(low<STEP>(a, b), high<STEP>(a, b));
    }
  } else {
    const Number* row = keys + slot_of(FIRST) * width;
    if (ahead.count) {
      for (int64_t d = 0; d < width; d += kLine) _mm_prefetch(ahead.rows + slot_of(FIRST) * width + d, _MM_HINT_T1);
    }
    const Vec key = load(row);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sums.row[r] = _mm512_mul_ps(_mm512_load_ps(queries + r * width), key);
#pragma GCC unroll 8
    for (int64_t d = kLanes; d < width; d += kLanes) {
      const Vec next = load(row + d);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        sums.row[r] = _mm512_fmadd_ps(_mm512_load_ps(queries + r * width + d), next, sums.row[r]);
      }
    }
  }
  return sums;
}

template <int DIM, int ROWS, typename Number>
void score_rows(const float* queries, const Number* keys, Prefetch ahead, int64_t dim, float* scores, int64_t stride) {
  const auto sums = score_keys<DIM, ROWS, 0, 1>(queries, keys, ahead, dim);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) _mm512_store_ps(scores + r * stride, sums.row[r]);
}

// The scores of `rows` query rows, at most kRowsAtOnce, for 16 keys.
template <int DIM, typename Number>
void score_rows(int rows, const float* queries, const Number* keys, Prefetch ahead, int64_t dim, float* scores,
                int64_t stride) {
  static_assert(kRowsAtOnce == 3);
  switch (rows) {
    case 1: return score_rows<DIM, 1>(queries, keys, ahead, dim, scores, stride);
    case 2: return score_rows<DIM, 2>(queries, keys, ahead, dim, scores, stride);
    default: return score_rows<DIM, 3>(queries, keys, ahead, dim, scores, stride);
  }
}

// Packs 16 keys, of which `count` exist and the others are zeros: [16, D] becomes [D, 16]. Prefetches the next 16 keys.
template <typename Number>
void pack(const Number* keys, int64_t count, int64_t dim, float* packed) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    Vec v[kLanes];
#pragma GCC unroll 16
    for (int key = 0; key < kLanes; key++) {
      v[slot_of(key)] = key < count ? load(keys + key * dim + d) : _mm512_setzero_ps();
    }
    exchange<8>(v);
    exchange<4>(v);
    exchange<2>(v);
    exchange<1>(v);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      _mm512_store_ps(packed + (d + i) * kLanes, v[i]);
      if (i % (kLine / (kLanes * sizeof(Number))) == 0) {
        _mm_prefetch(keys + (dim + d + i) * kLanes, _MM_HINT_T0);  // as much of the next block
      }
    }
  }
}

using TileSums = Sums<kTile>;

// The part of a tile's scores for 16 packed keys that chains FIRST, FIRST + STEP, ... contribute: the tree of
// `score_cached`, lane for lane, walked depth first, so that few partial sums are live.
template <int DIM, int FIRST, int STEP>
[[gnu::always_inline]] inline TileSums score_packed(const float* queries, const float* packed, int64_t dim) {
  TileSums sums;
  if constexpr (STEP < kLanes) {
    sums = score_packed<DIM, FIRST, 2 * STEP>(queries, packed, dim);
    const TileSums others = score_packed<DIM, FIRST + STEP, 2 * STEP>(queries, packed, dim);
#pragma GCC unroll 8
    for (int r = 0; r < kTile; r++) sums.row[r] = _mm512_add_ps(sums.row[r], others.row[r]);
  } else {
    const int64_t width = DIM ? DIM : dim;
    const Vec key = _mm512_load_ps(packed + FIRST * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kTile; r++) sums.row[r] = _mm512_mul_ps(_mm512_set1_ps(queries[r * width + FIRST]), key);
#pragma GCC unroll 8
    for (int64_t d = FIRST + kLanes; d < width; d += kLanes) {
      const Vec next = _mm512_load_ps(packed + d * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kTile; r++) {
        sums.row[r] = _mm512_fmadd_ps(_mm512_set1_ps(queries[r * width + d]), next, sums.row[r]);
      }
    }
  }
  return sums;
}

template <int DIM>
void score_tile(const float* queries, const float* packed, int64_t dim, float* scores, int64_t stride) {
  const TileSums sums = score_packed<DIM, 0, 1>(queries, packed, dim);
#pragma GCC unroll 8
  for (int r = 0; r < kTile; r++) _mm512_store_ps(scores + r * stride, sums.row[r]);
}

// A row's softmax over the keys so far: the largest score, a sink's included, and the sum of exponentials relative to it,
// without the sink's.
struct Softmax {
  float largest;
  float sum;

  // Adds exponentials, in lanes, relative to `now`; returns by what those of earlier keys are to be multiplied.
  float add(Vec now, Vec exponentials) {
    const float before = largest;
    largest = _mm512_cvtss_f32(now);
    const float factor = sum == 0.0f ? 1.0f : power_of_two(before - largest);  // nothing to multiply yet
    sum = sum * factor + _mm512_reduce_add_ps(exponentials);
    return factor;
  }

  // What the exponentials are multiplied by in the end.
  float inverse(float sink) const { return 1.0f / (sum + power_of_two(sink - largest)); }
};

// The largest of a row's scores in [`from`, `to`), at least one, and `largest`, in all lanes. Other scores of the first
// and the last block become minus infinity.
Vec find_largest(float* scores, int64_t from, int64_t to, float largest) {
  const int64_t first = from / kLanes * kLanes, end = round_up(to, kLanes);
  const Vec masked = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  _mm512_mask_store_ps(scores + first, static_cast<__mmask16>((1u << (from - first)) - 1), masked);
  _mm512_mask_store_ps(scores + end - kLanes, static_cast<__mmask16>(0xFFFFu << (to - end + kLanes)), masked);
  Vec found = _mm512_set1_ps(largest);
  for (int64_t k = first; k < end; k += kLanes) found = _mm512_max_ps(found, _mm512_load_ps(scores + k));
  return _mm512_set1_ps(_mm512_reduce_max_ps(found));
}

// Replaces these scores by their exponentials, relative to the largest so far. Other scores of their blocks become 0.
void exponentiate(float* scores, int64_t from, int64_t to, Softmax& softmax) {
  const Vec largest = find_largest(scores, from, to, softmax.largest);
  Vec sum = _mm512_setzero_ps();
  for (int64_t k = from / kLanes * kLanes; k < to; k += kLanes) {
    const Vec weight = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + k), largest));
    _mm512_store_ps(scores + k, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  softmax.add(largest, sum);
}

// Adds `count` weighted values to the outputs of ROWS rows, VECS vectors wide.
template <typename Number, int ROWS, int VECS>
void weigh(const float* weights, int64_t stride, const Number* values, int64_t dim, int64_t count,
           float* const* outputs, int64_t offset, Prefetch ahead) {
  Vec sums[ROWS][VECS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
    for (int i = 0; i < VECS; i++) sums[r][i] = _mm512_loadu_ps(outputs[r] + offset + i * kLanes);
  }
  for (int64_t k = 0; k < count; k++) {
    if constexpr (sizeof(Number) == 1) {
      if (k < ahead.count) _mm_prefetch(ahead.rows + k * dim + offset, _MM_HINT_T1);
    }
    Vec value[VECS];
#pragma GCC unroll 8
    for (int i = 0; i < VECS; i++) value[i] = load(values + k * dim + offset + i * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Vec weight = _mm512_set1_ps(weights[r * stride + k]);
#pragma GCC unroll 8
      for (int i = 0; i < VECS; i++) sums[r][i] = _mm512_fmadd_ps(weight, value[i], sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
#pragma GCC unroll 8
    for (int i = 0; i < VECS; i++) _mm512_storeu_ps(outputs[r] + offset + i * kLanes, sums[r][i]);
  }
}

constexpr int kSlab = 4;  // vectors of an output in registers at a time

template <typename Number>
using Weigh = decltype(&weigh<Number, 1, 1>);

template <typename Number, int ROWS>
constexpr Weigh<Number> kWeighRows[kSlab] = {weigh<Number, ROWS, 1>, weigh<Number, ROWS, 2>, weigh<Number, ROWS, 3>,
                                             weigh<Number, ROWS, 4>};
template <typename Number>
constexpr const Weigh<Number>* kWeigh[kTile] = {kWeighRows<Number, 1>, kWeighRows<Number, 2>, kWeighRows<Number, 3>,
                                                kWeighRows<Number, 4>, kWeighRows<Number, 5>, kWeighRows<Number, 6>};

}  // namespace
}  // namespace onward
