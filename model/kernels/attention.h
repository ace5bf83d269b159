// Causal attention over a cache that it extends in place, as `com.microsoft.GroupQueryAttention` defines it.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

struct AttentionShape {
  int64_t batch;         // B
  int64_t new_tokens;    // S, of each row
  int64_t total_tokens;  // the largest of all rows' cached and new tokens together; S means that nothing was cached
  int64_t num_heads;     // H
  int64_t num_kv_heads;  // Hkv, divides H
  int64_t head_dim;      // D, a multiple of 16
  int64_t capacity;      // of the buffers
  int64_t window;        // how many tokens a query sees, itself among them; 0 all
  float scale;           // of scores: 1 / sqrt(D)
  bool appends;          // false: there are no new keys, every query sees all of its row's cached ones
};

// Tensors are in the order of their dimensions, without gaps, but for those that have a stride. Number is what K/V are
// kept in: float, or int8_t with scales. What is appended is rounded then, and queries see it so, new keys of their own
// among them: a number x of scale s becomes x · (1 / s), to the nearest whole one, even of two that are as near, from
// -128 to 127; no number becomes 127. ONNX Runtime rounds so, to the bit.
template <typename Number>
struct AttentionTensors {
  const float* query;      // B, S rows of H * D, `query_stride` apart
  const float* key;        // B, S rows of Hkv * D, `key_stride` apart; null where nothing is appended
  const float* value;      // as keys
  int64_t query_stride;
  int64_t key_stride;
  Number* past_key;        // [B, Hkv, capacity, D], read and extended
  Number* past_value;      // the same
  const float* key_scales;    // [Hkv, D], what one step of an int8_t is worth; of float, null
  const float* value_scales;  // the same
  const int32_t* last;     // [B], each row's cached and new tokens together, minus one
  const float* cosines;    // [positions, D / 2], queries and new keys are turned by them; null: nothing is turned
  const float* sines;      // the same
  const float* sinks;      // [H], a score of each head that takes its part of the weights and has no value; null: none
  float* output;           // [B, S, H * D]
};

// Whether this processor has the instructions that `attend` is made of.
bool can_attend();

// A row's output depends on its own tokens, lengths and cache alone, to the bit: on no other row and no number of
// threads. K/V past a row's length may be anything, NaN included, and is not felt. Number is float or int8_t.
template <typename Number>
void attend(const Parallel& parallel, const AttentionShape& shape, const AttentionTensors<Number>& tensors);

}  // namespace onward
