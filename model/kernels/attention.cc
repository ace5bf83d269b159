// Attention over a cache that it extends in place, for processors with AVX-512.
//
// Decoding is bound by memory bandwidth, prefill by arithmetic. So there are two ways to compute scores: few query rows
// read K in the cache's layout, many rows have K packed once, 16 keys side by side. Both add in the same order, and so
// do all later steps. A token's output has the same bits whatever the way, chunk, tile or thread (batch invariance).
// Long chunks are a third way where the processor has tile registers (attention_tiles.h), in an order of its own: keys
// come in blocks of kKeysScored, which stay in the L2 cache for all rows, and each block's softmax is relative to the
// largest score so far (Milakov and Gimelshein, 2018). A token's output has the same bits in any chunk of at least
// kTokensForTiles tokens, padding included. In the first two ways:
//
//   - a dot product is 16 chains, chain c over dimensions c, c + 16, c + 32, ..., and then a tree over the chains;
//   - a softmax sums in 16 lanes, key k in lane k % 16, in the order of keys, and then over the lanes;
//   - an output adds up its values key by key, from the first visible key to the last.
//
// Masked keys have no effect: their scores are overwritten, their values never multiplied. (In tiles, values of up to 78
// keys before a window and 46 after a token are multiplied by 0, so a NaN or an infinity among a request's values may
// reach its tokens near them; which ones depends on the chunk and on the number of threads.)
//
// K/V in int8 are converted to floats as they are loaded, or once for many rows; both are exact. The scales of keys are
// folded into the query, those of values into the last factor of the output.
#include "attention.h"

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <thread>
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

#include "attention_tiles.h"

namespace onward {
namespace {

constexpr int64_t kRowsToPack = 16;             // least query rows of one K/V head for which packing K pays
constexpr int64_t kTokensForTiles = 96;         // least new tokens of a row that are computed in tile registers
constexpr int64_t kRowsOfTask = 48;             // query rows of one task at most: a multiple of kTile
constexpr int64_t kScoresOfTask = 96 * 1024;    // floats for a task's scores: part of the L2 cache
constexpr int64_t kValuesAtOnce = 64;           // keys whose values stay in the L1 cache for all rows
constexpr int64_t kKeysOfPacking = 256;         // keys that one task packs: whole blocks
constexpr int64_t kTokensAhead = 4;             // prefetch distance of new tokens, which lie far apart
constexpr int64_t kFetchAhead = 32;             // prefetch distance in keys
constexpr int64_t kFetched = 128;               // keys at the beginning of a cache that are prefetched
constexpr int64_t kInt8FetchAhead = 64;         // prefetch distance for int8, of which all keys are prefetched
constexpr int64_t kPackedAtOnce = 2 << 20;      // floats that are packed at a time: part of the L3 cache
// The same if that is too little to keep the threads busy: 32 MiB, which the calling thread keeps, or one head's K.
constexpr int64_t kPackedAtMost = 8 << 20;

thread_local Scratch<float> packed_scratch;  // the calling thread's: packed K, read by all threads
thread_local Scratch<float> task_scratch;    // each task's thread: its queries, scores and K/V as floats

// One row of the batch: its tokens have positions below `length`; those from `past` on are new.
struct Sequence {
  int64_t past;
  int64_t length;
  int64_t first_query, end_query;  // the queries that are tokens; others are padding
  int64_t base;                    // the first key of the first block that any query attends to
  // Floats between the scores of two rows: an odd number of blocks, since rows a power of two apart share cache sets.
  int64_t stride;
};

// The K/V of one head, from the beginning of a block on.
template <typename Number>
struct Keys {
  const Number* cached;
  const float* packed;   // null: scores read `cached`
  const Number* values;
  Prefetch next;         // the first keys of the next head
  float* spare;          // scratch for kValuesAtOnce keys or values as floats
  int64_t length;
};

// One call. A K/V head's query rows are numbered query by query: row = query * group + head in the group.
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
    sequence.base = std::min(visible(sequence, sequence.first_query).from, sequence.length) / kAtOnce * kAtOnce;
    sequence.stride = (round_up(sequence.length - sequence.base, kLanes) / kLanes | 1) * kLanes;
    return sequence;
  }

  // Writes one head's new keys and values at positions [`from`, `to`) into the cache.
  void append(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t from, int64_t to) const {
    if (!s.appends) return;
    const int64_t dim = s.head_dim;
    const int64_t first = std::max(sequence.first_query, from - sequence.past);
    const int64_t end = std::min(sequence.end_query, to - sequence.past);
    float *rotated = nullptr, *key_inverses = nullptr, *value_inverses = nullptr;
    if constexpr (kIsRounded) {
      rotated = task_scratch.at_least(3 * dim);
      key_inverses = rotated + dim;
      value_inverses = key_inverses + dim;
      invert(t.key_scales + kv_head * dim, dim, key_inverses);
      invert(t.value_scales + kv_head * dim, dim, value_inverses);
    }
    for (int64_t i = first; i < end; i++) {
      const int64_t position = sequence.past + i, token = (b * s.new_tokens + i) * t.key_stride + kv_head * dim;
      const int64_t place = cached(b, kv_head) + position * dim;
      if constexpr (kIsRounded) {
        // Prefetches the next head's place.
        __builtin_prefetch(t.past_key + place + s.capacity * dim, 1);
        __builtin_prefetch(t.past_value + place + s.capacity * dim, 1);
        for (int64_t d = 0; d < dim && i + kTokensAhead < end; d += kLanes) {
          _mm_prefetch(t.key + token + kTokensAhead * t.key_stride + d, _MM_HINT_T0);
          _mm_prefetch(t.value + token + kTokensAhead * t.key_stride + d, _MM_HINT_T0);
        }
        rotate(t.key + token, position, 1.0f, rotated);
        quantize(rotated, key_inverses, dim, t.past_key + place);
        quantize(t.value + token, value_inverses, dim, t.past_value + place);
      } else {
        rotate(t.key + token, position, 1.0f, t.past_key + place);
        std::copy_n(t.value + token, dim, t.past_value + place);
      }
    }
  }

  // Packs one head's keys in [`first`, `end`), in whole blocks; keys past the length as zeros.
  void pack_keys(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t first, int64_t end,
                 float* packed) const {
    const int64_t dim = s.head_dim;
    const Number* keys = t.past_key + cached(b, kv_head);
    for (int64_t k = first; k < end; k += kLanes, packed += kLanes * dim) {
      pack(keys + k * dim, std::min(sequence.length - k, kLanes), dim, packed);
    }
  }

  // Computes the outputs of one head's rows [`first`, `end`), at most kRowsOfTask. `packed` are its packed keys from
  // `base` on, or null.
  void attend(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t first, int64_t end,
              const float* packed) const {
    const int64_t dim = s.head_dim;
    if (!skip_padding(b, kv_head, sequence, first, end)) return;
    const int count = static_cast<int>(end - first), padded = static_cast<int>(round_up(count, kTile));
    const int64_t base = sequence.base;
    KeyRange row[kRowsOfTask];
    float* outputs[kRowsOfTask];
    float* queries = task_scratch.at_least(padded * (dim + sequence.stride) + kValuesAtOnce * dim);
    float* scores = queries + padded * dim;
    float* spare = scores + padded * sequence.stride;
    for (int r = 0; r < count; r++) {
      row[r] = load_query(b, kv_head, sequence, first + r, queries + r * dim);
      outputs[r] = output(b, kv_head, first + r);
      std::fill_n(outputs[r], dim, 0.0f);
    }
    std::fill(queries + count * dim, scores, 0.0f);

    const int64_t place = cached(b, kv_head) + base * dim;
    const int64_t length = sequence.length - base;
    Prefetch next{};
    if constexpr (kIsRounded) {
      const bool is_last = kv_head + 1 == s.num_kv_heads;
      if (!is_last) next = {t.past_key + place + s.capacity * dim, std::min(length, kInt8FetchAhead)};
    }
    const Keys<Number> keys{t.past_key + place, packed, t.past_value + place, next, spare, length};
    score(queries, row, count, keys, scores, sequence.stride);
    float inverse[kRowsOfTask];
    for (int r = 0; r < count; r++) {
      const float own = sink(kv_head, first + r);
      Softmax softmax{own, 0.0f};
      exponentiate(scores + r * sequence.stride, row[r].from, row[r].to, softmax);
      inverse[r] = softmax.inverse(own);
    }
    add_values(row, count, keys, scores, sequence.stride, outputs);
    for (int r = 0; r < count; r++) scale(outputs[r], inverse[r], kv_head, outputs[r]);
  }

  // The same in tile registers, at most `most_rows_in_tiles`.
  void attend_tiles(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t first, int64_t end) const {
    if (!skip_padding(b, kv_head, sequence, first, end)) return;
    const int count = static_cast<int>(end - first);
    TileRows<Number> rows(task_scratch, count, s.head_dim);
    for (int r = 0; r < count; r++) {
      const KeyRange range = load_query(b, kv_head, sequence, first + r, rows.query());
      rows.set(r, {range.from + sequence.base, range.to + sequence.base}, sink(kv_head, first + r));
    }
    const int64_t place = cached(b, kv_head);
    rows.attend(t.past_key + place, t.past_value + place, sequence.length);
    for (int r = 0; r < count; r++) {
      const float inverse = rows.softmax(r).inverse(sink(kv_head, first + r));
      scale(rows.sums(r), inverse, kv_head, output(b, kv_head, first + r));
    }
  }

 private:
  static constexpr bool kIsRounded = !std::is_same_v<Number, float>;
  static constexpr float kNoSink = -std::numeric_limits<float>::infinity();  // has weight 0

  KeyRange visible(const Sequence& sequence, int64_t i) const {
    if (!s.appends) return {0, sequence.length};
    const int64_t position = sequence.past + i;
    return {s.window > 0 ? std::max<int64_t>(0, position - s.window + 1) : 0, position + 1};
  }

  // Clears the outputs of padding, and leaves in [`first`, `end`) the rows that are tokens; whether there are any.
  bool skip_padding(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t& first, int64_t& end) const {
    const int64_t from = std::max(first, sequence.first_query * group_);
    const int64_t to = std::min(end, sequence.end_query * group_);
    for (int64_t row = first; row < end; row++) {
      if (row < from || row >= to) std::fill_n(output(b, kv_head, row), s.head_dim, 0.0f);
    }
    first = from;
    end = to;
    return first < end;
  }

  // Writes a row's query, rotated and scaled; returns the keys that it attends to, counted from `base` on.
  KeyRange load_query(int64_t b, int64_t kv_head, const Sequence& sequence, int64_t row, float* query) const {
    const int64_t dim = s.head_dim, i = row / group_, head = kv_head * group_ + row % group_;
    const float* given = t.query + (b * s.new_tokens + i) * t.query_stride + head * dim;
    for (int64_t d = 0; d < dim && i + kTokensAhead < s.new_tokens; d += kLanes) {
      _mm_prefetch(given + kTokensAhead * t.query_stride + d, _MM_HINT_T0);
    }
    rotate(given, sequence.past + i, s.scale * kLog2E, query);
    if constexpr (kIsRounded) {
      for (int64_t d = 0; d < dim; d++) query[d] *= t.key_scales[kv_head * dim + d];
    }
    const KeyRange range = visible(sequence, i);
    return {range.from - sequence.base, range.to - sequence.base};
  }

  float sink(int64_t kv_head, int64_t row) const {
    return t.sinks ? t.sinks[kv_head * group_ + row % group_] * kLog2E : kNoSink;
  }

  // Scales a row's sums to its output, which may be in the same place.
  void scale(const float* sums, float inverse, int64_t kv_head, float* output) const {
    if constexpr (kIsRounded) {
      const float* scales = t.value_scales + kv_head * s.head_dim;
      for (int64_t d = 0; d < s.head_dim; d++) output[d] = sums[d] * (inverse * scales[d]);
    } else {
      for (int64_t d = 0; d < s.head_dim; d++) output[d] = sums[d] * inverse;
    }
  }

  int64_t cached(int64_t b, int64_t kv_head) const { return (b * s.num_kv_heads + kv_head) * s.capacity * s.head_dim; }

  float* output(int64_t b, int64_t kv_head, int64_t row) const {
    const int64_t i = row / group_, head = kv_head * group_ + row % group_;
    return t.output + ((b * s.new_tokens + i) * s.num_heads + head) * s.head_dim;
  }

  // Writes a head's vector, rotated to its position if there are cosines, and then scaled.
  void rotate(const float* in, int64_t position, float scale, float* out) const {
    const int64_t dim = s.head_dim, half = dim / 2;
    if (t.cosines == nullptr || !s.appends) {
      for (int64_t d = 0; d < dim; d++) out[d] = in[d] * scale;
      return;
    }
    const float* cosine = t.cosines + position * half;
    const float* sine = t.sines + position * half;
    const Vec factor = _mm512_set1_ps(scale);
    for (int64_t d = 0; d < half; d += kLanes) {
      const __mmask16 mask = first_lanes(half - d);
      const Vec a = _mm512_maskz_loadu_ps(mask, in + d), b = _mm512_maskz_loadu_ps(mask, in + half + d);
      const Vec cos = _mm512_maskz_loadu_ps(mask, cosine + d), sin = _mm512_maskz_loadu_ps(mask, sine + d);
      const Vec first = _mm512_sub_ps(_mm512_mul_ps(a, cos), _mm512_mul_ps(b, sin));
      const Vec second = _mm512_add_ps(_mm512_mul_ps(b, cos), _mm512_mul_ps(a, sin));
      _mm512_mask_storeu_ps(out + d, mask, _mm512_mul_ps(first, factor));
      _mm512_mask_storeu_ps(out + half + d, mask, _mm512_mul_ps(second, factor));
    }
  }

  void score(const float* queries, const KeyRange* row, int count, const Keys<Number>& keys, float* scores,
             int64_t stride) const {
    switch (s.head_dim) {
      case 32: return score<32>(queries, row, count, keys, scores, stride);
      case 64: return score<64>(queries, row, count, keys, scores, stride);
      case 128: return score<128>(queries, row, count, keys, scores, stride);
      default: return score<0>(queries, row, count, keys, scores, stride);
    }
  }

  // Scores the blocks of keys that any of the rows attends to; rows are sorted by their key ranges.
  template <int DIM>
  void score(const float* queries, const KeyRange* row, int count, const Keys<Number>& keys, float* scores,
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
          const Prefetch fetched = r == 0 ? Prefetch{ahead, kLanes} : Prefetch{};
          if (block) {
            score_rows<DIM>(rows, query, block, fetched, dim, place, stride);
          } else {
            score_rows<DIM>(rows, query, cached, fetched, dim, place, stride);
          }
        } else {
          // The hardware prefetcher follows an established stream: only the beginnings of keys and values need help.
          const bool fetches = r < 2 && (next < kFetched || next >= keys.length);
          const float* half = ahead + r * (kLanes / 2) * dim;
          _mm512_store_ps(place, fetches ? score_cached<DIM, true>(query, block, half, dim)
                                         : score_cached<DIM, false>(query, block, half, dim));
        }
      }
    }
  }

  // The block of keys from `k` on as floats, with zeros past the length, where memory may end. Null if it is faster to
  // score the cached numbers.
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

  // Adds the weighted values to the rows' outputs.
  void add_values(const KeyRange* row, int count, const Keys<Number>& keys, const float* weights, int64_t stride,
                  float* const* outputs) const {
    const int64_t dim = s.head_dim;
    for (int64_t begin = row[0].from; begin < row[count - 1].to; begin += kValuesAtOnce) {
      const Number* values = keys.values + begin * dim;
      if (kIsRounded && count > kTile) {
        widen(values, (std::min(begin + kValuesAtOnce, row[count - 1].to) - begin) * dim, keys.spare);
        add_block(row, count, begin, keys.spare, weights + begin, stride, outputs, {});
      } else {
        Prefetch ahead = keys.next;
        if constexpr (kIsRounded) {
          const int64_t rest = row[count - 1].to - begin - kValuesAtOnce;
          if (rest > 0) ahead = {values + kValuesAtOnce * dim, rest};
        }
        add_block(row, count, begin, values, weights + begin, stride, outputs, ahead);
      }
    }
  }

  // The same for the kValuesAtOnce values and weights from key `begin` on.
  template <typename Block>
  void add_block(const KeyRange* row, int count, int64_t begin, const Block* values, const float* weights,
                 int64_t stride, float* const* outputs, Prefetch ahead) const {
    const auto place = [=](int64_t key) { return std::clamp<int64_t>(key - begin, 0, kValuesAtOnce); };
    for (int r = 0; r < count; r += kTile) {
      const int tile = std::min(count - r, kTile);
      // Keys that all rows of the tile attend to are read once, those before and after for each row.
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
           float* const* outputs, Prefetch ahead) const {
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

  if (shape.appends && shape.new_tokens >= kTokensForTiles && shape.head_dim % kAtOnce == 0 && has_tiles()) {
    // Each task packs the keys for itself: few tasks, unless that is too few to keep threads busy.
    static const int64_t wanted = std::clamp<int64_t>(4 * std::thread::hardware_concurrency(), 8, kMaxTasks);
    const int64_t share = round_up(rows * shape.batch * heads / wanted, kTileRows);
    const int64_t most = std::min(most_rows_in_tiles(shape.head_dim), std::max(share, kRowsScored));
    const int64_t tasks = (rows + most - 1) / most;
    parallel(shape.batch * heads, [&](size_t index) {
      const Sequence sequence = attention.sequence(index / heads);
      attention.append(index / heads, index % heads, sequence, 0, sequence.length);
    });
    parallel(shape.batch * heads * tasks, [&](size_t index) {
      const int64_t pair = index / tasks, b = pair / heads, first = (tasks - 1 - index % tasks) * most;
      attention.attend_tiles(b, pair % heads, attention.sequence(b), first, std::min(first + most, rows));
    });
    return;
  }

  int64_t most_keys = kLanes, longest_row = kLanes;
  for (int64_t b = 0; b < shape.batch; b++) {
    const Sequence sequence = attention.sequence(b);
    most_keys = std::max(most_keys, round_up(sequence.length - sequence.base, kLanes));
    longest_row = std::max(longest_row, sequence.stride);
  }
  const int64_t pairs = shape.batch * heads;  // (row of the batch, head): each has its own keys
  const int64_t packed_size = product(most_keys, shape.head_dim);
  const int64_t packings = (most_keys + kKeysOfPacking - 1) / kKeysOfPacking;
  const int64_t task_rows = std::clamp<int64_t>(kScoresOfTask / longest_row / kTile * kTile, kTile, kRowsOfTask);
  const int64_t tasks = (rows + task_rows - 1) / task_rows;
  // As many pairs as fit the cache, or as keep the threads busy, within the memory limit.
  const int64_t wanted = std::max(kPackedAtOnce / packed_size, (kMaxTasks + tasks - 1) / tasks);
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
      const int64_t first = (tasks - 1 - index % tasks) * task_rows;  // the longest first, for even load
      const int64_t end = std::min(first + task_rows, rows);
      attention.attend(b, head, attention.sequence(b), first, end, packed + place * packed_size);
    });
  }
}

template void attend(const Parallel&, const AttentionShape&, const AttentionTensors<float>&);
template void attend(const Parallel&, const AttentionShape&, const AttentionTensors<int8_t>&);

#pragma GCC pop_options

}  // namespace onward
