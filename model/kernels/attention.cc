// Attention over a cache that it extends in place, for processors with AVX-512.
//
// Decoding is bound by the reading of K and V, a prompt's prefill by arithmetic, hence two ways to the scores: few
// query rows read K as it lies in the cache, many have it packed once, 16 keys side by side. Both add in the same
// order, and so does all that follows, so that a token's output is the same bits whichever way, chunk, tile or thread
// it came by:
//
//   - a dot product is 16 chains, chain c over dimensions c, c + 16, c + 32, ..., and then a tree over the chains;
//   - a softmax sums in 16 lanes, key k in lane k % 16, in the order of keys, and then over the lanes;
//   - an output adds up its values key by key, from the first key that the query sees to the last.
//
// Keys that a query does not see take no part: their scores are overwritten, their values never multiplied.
//
// K/V in eight bits become floats as they are loaded, or where many rows want them, once for all; either way exactly.
// Their scales are nowhere near: a key's are in the query, a value's in the last factor of the output.
#include "attention.h"

#include <immintrin.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "checked.h"
#include "scratch.h"

namespace onward {

bool can_attend() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}

// All above runs on any processor, all below only where `can_attend`.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma")

}  // namespace onward

#include "exponential.h"

namespace onward {
namespace {

using Vec = __m512;

constexpr int64_t kLanes = 16;                   // floats in a Vec, keys in a block
constexpr int kTile = 6;                         // query rows that share what is loaded: their sums fill the registers
constexpr int kRowsAtOnce = 3;                   // query rows that share what becomes a float as it is loaded
constexpr int64_t kRowsToPack = 16;              // from this many query rows of one K/V head on, packing K pays
constexpr int64_t kRowsOfTask = 48;              // query rows of one task at most: a multiple of kTile
constexpr int64_t kScoresOfTask = 96 * 1024;     // floats that a task's scores should fit into: part of the L2 cache
constexpr int64_t kValuesAtOnce = 64;            // keys whose values stay in the L1 cache while all rows pass over them
constexpr int64_t kKeysOfPacking = 256;          // keys that one task packs: whole blocks
constexpr int64_t kFetchAhead = 32;              // keys between the one that is scored and the one that is fetched
constexpr int64_t kFetched = 128;                // keys at the beginning of a cache that are fetched so
constexpr int64_t kInt8FetchAhead = 64;          // the same of eight bits, of which all are fetched
constexpr int64_t kLine = 64;                    // bytes that are fetched together
constexpr int64_t kPackedAtOnce = 2 * 1024 * 1024;  // floats of packed K to hold at a time: part of the L3 cache
// The same where that is too few to keep threads busy: 32 MiB, which the calling thread keeps, or one head's K.
constexpr int64_t kPackedAtMost = 8 * 1024 * 1024;

// Eight bits are read so fast that the processor's own fetching comes late at each head: rows of them to bring into the
// L2 cache while others, as wide, are computed with.
struct Ahead {
  const int8_t* rows;
  int64_t count;
};

thread_local Scratch<float> packed_scratch;  // of the thread that calls: packed K, which all threads read
thread_local Scratch<float> task_scratch;    // of the thread that runs a task: its queries, scores and K/V as floats

int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

Vec load(const float* numbers) { return _mm512_loadu_ps(numbers); }

Vec load(const int8_t* numbers) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers))));
}

// Numbers as they are cached, as floats; `count` is a multiple of kLanes.
template <typename Number>
void widen(const Number* numbers, int64_t count, float* floats) {
  for (int64_t i = 0; i < count; i += kLanes) _mm512_storeu_ps(floats + i, load(numbers + i));
}

// Numbers as they are to be cached, see attention.h.
void narrow(const float* floats, const float* scales, int64_t count, int8_t* numbers) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec inverse = _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_loadu_ps(scales + i));
    const Vec steps = _mm512_mul_ps(_mm512_loadu_ps(floats + i), inverse);
    // Of no number and 127, the smaller is the second: in this order.
    const Vec bounded = _mm512_max_ps(_mm512_min_ps(steps, _mm512_set1_ps(127.0f)), _mm512_set1_ps(-128.0f));
    const __m512i whole = _mm512_cvt_roundps_epi32(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(numbers + i), _mm512_cvtepi32_epi8(whole));
  }
}

// Both halves of an exchange between two vectors DISTANCE apart: 16 vectors that go through it at distances 8, 4, 2 and
// 1 are transposed, but for the order of lanes, see `slot_of`.
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

// The vector from which the exchanges bring a key into the lane of its own number: bits 3 and 2 swapped, bits 1 and 0
// too.
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

// The scores of one query row for 16 keys as they lie in the cache. DIM is D, or 0 where `dim` says it. Where it
// FETCHES, it brings half a block from `ahead` on into the L2 cache, a little with each key.
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
    // The compiler would read all keys' first parts, then all second ones; the processor fetches ahead best in the
    // order of memory.
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

// The part of the scores of ROWS query rows for 16 keys that keys whose slots are FIRST, FIRST + STEP, ... have: the
// tree of `score_cached`, walked depth first so that few sums wait and rows can share what is loaded. Each key fetches
// a row.
template <int DIM, int ROWS, int FIRST, int STEP, typename Number>
[[gnu::always_inline]] inline Sums<ROWS> score_keys(const float* queries, const Number* keys, Ahead ahead,
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
void score_rows(const float* queries, const Number* keys, Ahead ahead, int64_t dim, float* scores, int64_t stride) {
  const auto sums = score_keys<DIM, ROWS, 0, 1>(queries, keys, ahead, dim);
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) _mm512_store_ps(scores + r * stride, sums.row[r]);
}

// The scores of `rows` query rows, kRowsAtOnce at most, for 16 keys.
template <int DIM, typename Number>
void score_rows(int rows, const float* queries, const Number* keys, Ahead ahead, int64_t dim, float* scores,
                int64_t stride) {
  static_assert(kRowsAtOnce == 3);
  switch (rows) {
    case 1: return score_rows<DIM, 1>(queries, keys, ahead, dim, scores, stride);
    case 2: return score_rows<DIM, 2>(queries, keys, ahead, dim, scores, stride);
    default: return score_rows<DIM, 3>(queries, keys, ahead, dim, scores, stride);
  }
}

// Packs 16 keys, of which `count` are there and zeros follow: [16, D] becomes [D, 16]. Fetches the 16 keys after them.
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

// The part of a tile's scores for 16 packed keys that chains FIRST, FIRST + STEP, FIRST + 2 STEP, ... add up to: the
// tree of `score_cached`, lane for lane, walked depth first so that few sums wait.
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

// Turns scores `from` to `to` (exclusive) of a row into their exponentials, relative to the largest; returns the
// inverse of their sum, the sink's among them. Other scores of the first and the last block become 0.
float soften(float* scores, int64_t from, int64_t to, float sink) {
  const int64_t first = from / kLanes * kLanes, end = round_up(to, kLanes);
  const Vec unseen = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  _mm512_mask_store_ps(scores + first, static_cast<__mmask16>((1u << (from - first)) - 1), unseen);
  _mm512_mask_store_ps(scores + end - kLanes, static_cast<__mmask16>(0xFFFFu << (to - end + kLanes)), unseen);
  Vec largest = _mm512_set1_ps(sink);
  for (int64_t k = first; k < end; k += kLanes) largest = _mm512_max_ps(largest, _mm512_load_ps(scores + k));
  largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  Vec sum = _mm512_setzero_ps();
  for (int64_t k = first; k < end; k += kLanes) {
    const Vec weight = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + k), largest));
    _mm512_store_ps(scores + k, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  const Vec rest = power_of_two(_mm512_sub_ps(_mm512_set1_ps(sink), largest));
  return 1.0f / (_mm512_reduce_add_ps(sum) + _mm512_cvtss_f32(rest));
}

// Adds `count` values, times each row's weights, to the outputs of ROWS rows, VECS vectors of them.
template <typename Number, int ROWS, int VECS>
void weigh(const float* weights, int64_t stride, const Number* values, int64_t dim, int64_t count,
           float* const* outputs, int64_t offset, Ahead ahead) {
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

constexpr int kSlab = 4;  // vectors of an output that a tile's sums hold at a time

template <typename Number>
using Weigh = decltype(&weigh<Number, 1, 1>);

template <typename Number, int ROWS>
constexpr Weigh<Number> kWeighRows[kSlab] = {weigh<Number, ROWS, 1>, weigh<Number, ROWS, 2>, weigh<Number, ROWS, 3>,
                                             weigh<Number, ROWS, 4>};
template <typename Number>
constexpr const Weigh<Number>* kWeigh[kTile] = {kWeighRows<Number, 1>, kWeighRows<Number, 2>, kWeighRows<Number, 3>,
                                                kWeighRows<Number, 4>, kWeighRows<Number, 5>, kWeighRows<Number, 6>};

// The keys that a query sees, from the first to behind the last.
struct Seen {
  int64_t from, to;
};

// One row of the batch: its tokens have positions below `length`, of which those from `past` on are new.
struct Sequence {
  int64_t past;
  int64_t length;
  int64_t first_query, end_query;  // the queries that are tokens; others are padding
  int64_t base;                    // the first key of the first block that any query sees
  // Floats between the scores of two rows: an odd number of blocks, as rows a power of two apart would share cache
  // sets.
  int64_t stride;
};

// The keys of one head, from a whole block on.
template <typename Number>
struct Keys {
  const Number* cached;
  const float* packed;   // null: they are scored as they are cached
  const Number* values;  // theirs
  Ahead next;            // the first of the next head
  float* spare;          // room for kValuesAtOnce of either
  int64_t length;
};

// A call's arguments and what follows from them. A K/V head's rows, a query of a head each, are numbered query by
// query.
template <typename Number>
class Attention {
 public:
  Attention(const AttentionShape& shape, const AttentionTensors<Number>& tensors)
      : s(shape), t(tensors), group_(shape.num_heads / shape.num_kv_heads), rows_(shape.new_tokens * group_) {}

  int64_t rows() const { return rows_; }

  Sequence sequence(int64_t b) const {
    const int64_t tokens = int64_t{t.last[b]} + 1;
    Sequence sequence{};
    sequence.length = std::clamp<int64_t>(tokens, 0, s.capacity);
    if (s.appends) {
      sequence.past = s.total_tokens == s.new_tokens ? 0 : tokens - s.new_tokens;
      sequence.first_query = std::clamp<int64_t>(-sequence.past, 0, s.new_tokens);
      sequence.end_query = std::clamp<int64_t>(sequence.length - sequence.past, sequence.first_query, s.new_tokens);
    } else {
      sequence.end_query = sequence.length > 0 ? s.new_tokens : 0;
    }
    sequence.base = std::min(seen(sequence, sequence.first_query).from, sequence.length) / kLanes * kLanes;
    sequence.stride = (round_up(sequence.length - sequence.base, kLanes) / kLanes | 1) * kLanes;
    return sequence;
  }

  // Writes the new keys and values of one head whose positions are from `from` to `to` (exclusive) into the cache.
  void append(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t from, int64_t to) const {
    if (!s.appends) return;
    const int64_t dim = s.head_dim;
    const int64_t first = std::max(sequence.first_query, from - sequence.past);
    const int64_t end = std::min(sequence.end_query, to - sequence.past);
    for (int64_t i = first; i < end; i++) {
      const int64_t position = sequence.past + i, token = (b * s.new_tokens + i) * t.key_stride + kv_head * dim;
      const int64_t place = cached(b, kv_head) + position * dim;
      if constexpr (kIsRounded) {
        // The next head's place, while there is other work to do.
        __builtin_prefetch(t.past_key + place + s.capacity * dim, 1);
        __builtin_prefetch(t.past_value + place + s.capacity * dim, 1);
        float* turned = task_scratch.at_least(dim);
        turn(t.key + token, position, 1.0f, turned);
        narrow(turned, t.key_scales + kv_head * dim, dim, t.past_key + place);
        narrow(t.value + token, t.value_scales + kv_head * dim, dim, t.past_value + place);
      } else {
        turn(t.key + token, position, 1.0f, t.past_key + place);
        std::copy_n(t.value + token, dim, t.past_value + place);
      }
    }
  }

  // Packs the keys of one head from block `first` to `end` (exclusive, and those of no token as zeros).
  void pack_keys(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t first, int64_t end,
                 float* packed) const {
    const int64_t dim = s.head_dim;
    const Number* keys = t.past_key + cached(b, kv_head);
    for (int64_t k = first; k < end; k += kLanes, packed += kLanes * dim) {
      pack(keys + k * dim, std::min(sequence.length - k, kLanes), dim, packed);
    }
  }

  // Computes the outputs of rows `first` to `end` (exclusive, kRowsOfTask at most) of one head, whose keys from `base`
  // on are packed, or not where `packed` is null.
  void attend(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t first, int64_t end,
              const float* packed) const {
    const int64_t dim = s.head_dim;
    for (int64_t row = first; row < end; row++) std::fill_n(output(b, kv_head, row), dim, 0.0f);
    first = std::max(first, sequence.first_query * group_);
    end = std::min(end, sequence.end_query * group_);
    if (first >= end) return;

    const int count = static_cast<int>(end - first), padded = static_cast<int>(round_up(count, kTile));
    const int64_t base = sequence.base;
    Seen row[kRowsOfTask];
    float* outputs[kRowsOfTask];
    float* queries = task_scratch.at_least(padded * (dim + sequence.stride) + kValuesAtOnce * dim);
    float* scores = queries + padded * dim;
    float* spare = scores + padded * sequence.stride;
    for (int r = 0; r < count; r++) {
      const int64_t i = (first + r) / group_, head = kv_head * group_ + (first + r) % group_;
      row[r] = seen(sequence, i);
      row[r].from -= base, row[r].to -= base;
      outputs[r] = output(b, kv_head, first + r);
      const float* query = t.query + (b * s.new_tokens + i) * t.query_stride + head * dim;
      turn(query, sequence.past + i, s.scale * kLog2E, queries + r * dim);
      if constexpr (kIsRounded) {
        for (int64_t d = 0; d < dim; d++) queries[r * dim + d] *= t.key_scales[kv_head * dim + d];
      }
    }
    std::fill(queries + count * dim, scores, 0.0f);

    const int64_t place = cached(b, kv_head) + base * dim;
    const int64_t length = sequence.length - base;
    Ahead next{};
    if constexpr (kIsRounded) {
      const bool is_last = kv_head + 1 == s.num_kv_heads;
      if (!is_last) next = {t.past_key + place + s.capacity * dim, std::min(length, kInt8FetchAhead)};
    }
    const Keys<Number> keys{t.past_key + place, packed, t.past_value + place, next, spare, length};
    score(queries, row, count, keys, scores, sequence.stride);
    float inverse[kRowsOfTask];
    for (int r = 0; r < count; r++) {
      const float sink = t.sinks ? t.sinks[kv_head * group_ + (first + r) % group_] * kLog2E : kNothing;
      inverse[r] = soften(scores + r * sequence.stride, row[r].from, row[r].to, sink);
    }
    add_values(row, count, keys, scores, sequence.stride, outputs);
    for (int r = 0; r < count; r++) {
      if constexpr (kIsRounded) {
        for (int64_t d = 0; d < dim; d++) outputs[r][d] *= inverse[r] * t.value_scales[kv_head * dim + d];
      } else {
        for (int64_t d = 0; d < dim; d++) outputs[r][d] *= inverse[r];
      }
    }
  }

 private:
  static constexpr bool kIsRounded = !std::is_same_v<Number, float>;
  static constexpr float kNothing = -std::numeric_limits<float>::infinity();  // the score of what has no weight

  Seen seen(const Sequence& sequence, int64_t i) const {
    if (!s.appends) return {0, sequence.length};
    const int64_t position = sequence.past + i;
    return {s.window > 0 ? std::max<int64_t>(0, position - s.window + 1) : 0, position + 1};
  }

  int64_t cached(int64_t b, int64_t kv_head) const { return (b * s.num_kv_heads + kv_head) * s.capacity * s.head_dim; }

  float* output(int64_t b, int64_t kv_head, int64_t row) const {
    const int64_t i = row / group_, head = kv_head * group_ + row % group_;
    return t.output + ((b * s.new_tokens + i) * s.num_heads + head) * s.head_dim;
  }

  // Writes a head's vector, turned to its position where there are cosines and then scaled.
  void turn(const float* in, int64_t position, float scale, float* out) const {
    const int64_t dim = s.head_dim, half = dim / 2;
    if (t.cosines == nullptr || !s.appends) {
      for (int64_t d = 0; d < dim; d++) out[d] = in[d] * scale;
      return;
    }
    const float* cosine = t.cosines + position * half;
    const float* sine = t.sines + position * half;
    for (int64_t d = 0; d < half; d++) {
      const float a = in[d], b = in[d + half];
      out[d] = (a * cosine[d] - b * sine[d]) * scale;
      out[d + half] = (b * cosine[d] + a * sine[d]) * scale;
    }
  }

  void score(const float* queries, const Seen* row, int count, const Keys<Number>& keys, float* scores,
             int64_t stride) const {
    switch (s.head_dim) {
      case 32: return score<32>(queries, row, count, keys, scores, stride);
      case 64: return score<64>(queries, row, count, keys, scores, stride);
      case 128: return score<128>(queries, row, count, keys, scores, stride);
      default: return score<0>(queries, row, count, keys, scores, stride);
    }
  }

  // Scores the blocks of keys that any of some rows sees; rows are in the order of what they see.
  template <int DIM>
  void score(const float* queries, const Seen* row, int count, const Keys<Number>& keys, float* scores,
             int64_t stride) const {
    const int64_t dim = DIM ? DIM : s.head_dim;
    const int step = keys.packed ? kTile : kIsRounded ? kRowsAtOnce : 1;
    for (int64_t k = row[0].from / kLanes * kLanes; k < row[count - 1].to; k += kLanes) {
      const Number* cached = keys.cached + k * dim;
      const float* block = keys.packed ? keys.packed + k * dim : as_floats(cached, keys, k, count, dim);
      const int64_t next = k + (kIsRounded ? kInt8FetchAhead : kFetchAhead);
      const Number* ahead = next < keys.length ? keys.cached + next * dim : keys.values + (next - keys.length) * dim;
      for (int r = 0; r < count; r += step) {
        if (row[std::min(r + step, count) - 1].to <= k || row[r].from >= k + kLanes) continue;
        const float* query = queries + r * dim;
        float* place = scores + r * stride + k;
        if (keys.packed) {
          score_tile<DIM>(query, block, dim, place, stride);
        } else if constexpr (kIsRounded) {
          const int rows = std::min(count - r, step);
          const Ahead fetched = r == 0 ? Ahead{ahead, kLanes} : Ahead{};
          if (block) {
            score_rows<DIM>(rows, query, block, fetched, dim, place, stride);
          } else {
            score_rows<DIM>(rows, query, cached, fetched, dim, place, stride);
          }
        } else {
          // The processor itself fetches ahead once it knows a stream: only the beginnings of keys and of values want
          // help.
          const bool fetches = r < 2 && (next < kFetched || next >= keys.length);
          const float* half = ahead + r * (kLanes / 2) * dim;
          _mm512_store_ps(place, fetches ? score_cached<DIM, true>(query, block, half, dim)
                                         : score_cached<DIM, false>(query, block, half, dim));
        }
      }
    }
  }

  // Key `k` and those after it of its block as floats, with zeros for those that are not there: what follows may be no
  // memory. Null where they are best scored as they are cached.
  static const float* as_floats(const Number* block, const Keys<Number>& keys, int64_t k, int count, int64_t dim) {
    const int64_t there = std::min(keys.length - k, kLanes);
    if (there == kLanes) {
      if constexpr (!kIsRounded) return block;
      if (count <= 2 * kRowsAtOnce) return nullptr;
    }
    widen(block, there * dim, keys.spare);
    std::fill(keys.spare + there * dim, keys.spare + kLanes * dim, 0.0f);
    return keys.spare;
  }

  // Adds the values that rows see, times their weights, to the rows' outputs.
  void add_values(const Seen* row, int count, const Keys<Number>& keys, const float* weights, int64_t stride,
                  float* const* outputs) const {
    const int64_t dim = s.head_dim;
    for (int64_t begin = row[0].from; begin < row[count - 1].to; begin += kValuesAtOnce) {
      const Number* values = keys.values + begin * dim;
      if (kIsRounded && count > kTile) {
        widen(values, (std::min(begin + kValuesAtOnce, row[count - 1].to) - begin) * dim, keys.spare);
        add_block(row, count, begin, keys.spare, weights + begin, stride, outputs, {});
      } else {
        Ahead ahead = keys.next;
        if constexpr (kIsRounded) {
          const int64_t rest = row[count - 1].to - begin - kValuesAtOnce;
          if (rest > 0) ahead = {values + kValuesAtOnce * dim, rest};
        }
        add_block(row, count, begin, values, weights + begin, stride, outputs, ahead);
      }
    }
  }

  // The same for kValuesAtOnce values, of which the first is that of key `begin`, and so are the weights.
  template <typename Block>
  void add_block(const Seen* row, int count, int64_t begin, const Block* values, const float* weights, int64_t stride,
                 float* const* outputs, Ahead ahead) const {
    const auto place = [=](int64_t key) { return std::clamp<int64_t>(key - begin, 0, kValuesAtOnce); };
    for (int r = 0; r < count; r += kTile) {
      const int tile = std::min(count - r, kTile);
      // What all rows of the tile see they read together, what comes before and after it each by itself.
      const int64_t from = place(row[r + tile - 1].from), to = std::max(from, place(row[r].to));
      for (int i = r; i < r + tile; i++) {
        add(1, place(row[i].from), std::min(from, place(row[i].to)), values, weights + i * stride, 0, outputs + i, {});
      }
      add(tile, from, to, values, weights + r * stride, stride, outputs + r, ahead);
      for (int i = r; i < r + tile; i++) {
        add(1, std::max(to, place(row[i].from)), place(row[i].to), values, weights + i * stride, 0, outputs + i, {});
      }
    }
  }

  template <typename Block>
  void add(int rows, int64_t from, int64_t to, const Block* values, const float* weights, int64_t stride,
           float* const* outputs, Ahead ahead) const {
    if (from >= to) return;
    const int64_t dim = s.head_dim;
    for (int64_t d = 0; d < dim; d += kSlab * kLanes) {
      const int64_t slab = std::min<int64_t>((dim - d) / kLanes, kSlab);
      kWeigh<Block>[rows - 1][slab - 1](weights + from, stride, values + from * dim, dim, to - from, outputs, d, ahead);
    }
  }

  const AttentionShape& s;
  const AttentionTensors<Number>& t;
  const int64_t group_;  // heads that share a K/V head
  const int64_t rows_;   // of a K/V head
};

}  // namespace

template <typename Number>
void attend(const Parallel& parallel, const AttentionShape& shape, const AttentionTensors<Number>& tensors) {
  const Attention<Number> attention(shape, tensors);
  const int64_t heads = shape.num_kv_heads, rows = attention.rows();
  if (rows < kRowsToPack) {
    parallel(shape.batch * heads, [&](size_t index) {
      const int64_t b = index / heads, head = index % heads;
      const Sequence sequence = attention.sequence(b);
      attention.append(b, head, sequence, 0, sequence.length);
      attention.attend(b, head, sequence, 0, rows, nullptr);
    });
    return;
  }

  int64_t most_keys = kLanes, longest_row = kLanes;
  for (int64_t b = 0; b < shape.batch; b++) {
    const Sequence sequence = attention.sequence(b);
    most_keys = std::max(most_keys, round_up(sequence.length - sequence.base, kLanes));
    longest_row = std::max(longest_row, sequence.stride);
  }
  const int64_t pairs = shape.batch * heads;  // of a row of the batch and a head: each has keys of its own
  const int64_t packed_size = product(most_keys, shape.head_dim);
  const int64_t packings = (most_keys + kKeysOfPacking - 1) / kKeysOfPacking;
  const int64_t task_rows = std::clamp<int64_t>(kScoresOfTask / longest_row / kTile * kTile, kTile, kRowsOfTask);
  const int64_t tasks = (rows + task_rows - 1) / task_rows;
  // As many pairs as the cache holds, or as keep the threads busy, but no more than the memory allows.
  const int64_t wanted = std::max(kPackedAtOnce / packed_size, (kPieces + tasks - 1) / tasks);
  const int64_t at_once = std::clamp<int64_t>(std::min(wanted, kPackedAtMost / packed_size), 1, pairs);
  float* const packed = packed_scratch.at_least(product(at_once, packed_size));

  for (int64_t begin = 0; begin < pairs; begin += at_once) {
    const int64_t count = std::min(at_once, pairs - begin);
    parallel(count * packings, [&](size_t index) {
      const int64_t place = index / packings, pair = begin + place, b = pair / heads, head = pair % heads;
      const Sequence sequence = attention.sequence(b);
      const int64_t base = sequence.base, offset = index % packings * kKeysOfPacking;
      const int64_t from = base + offset, to = std::min(from + kKeysOfPacking, sequence.length);
      attention.append(b, head, sequence, from, to);
      attention.pack_keys(b, head, sequence, from, to, packed + place * packed_size + offset * shape.head_dim);
    });
    parallel(count * tasks, [&](size_t index) {
      const int64_t place = index / tasks, pair = begin + place, b = pair / heads, head = pair % heads;
      const int64_t first = (tasks - 1 - index % tasks) * task_rows;  // the longest first: short ones fill up the end
      attention.attend(b, head, attention.sequence(b), first, std::min(first + task_rows, rows),
                       packed + place * packed_size);
    });
  }
}

template void attend(const Parallel&, const AttentionShape&, const AttentionTensors<float>&);
template void attend(const Parallel&, const AttentionShape&, const AttentionTensors<int8_t>&);

#pragma GCC pop_options

}  // namespace onward
