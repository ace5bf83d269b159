// Causal attention over a cache that it extends in place, as `com.microsoft.GroupQueryAttention` defines it.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

struct AttentionShape {
  int64_t batch;         // B
  int64_t new_tokens;    // S, of each row
  int64_t total_tokens;  // the largest number of cached and new tokens of a row; S means that nothing was cached
  int64_t num_heads;     // H
  int64_t num_kv_heads;  // Hkv, divides H
  int64_t head_dim;      // D, a multiple of 16
  int64_t capacity;      // of the buffers
  int64_t window;        // tokens that a query attends to, itself included; 0 for all
  float scale;           // of scores: 1 / sqrt(D)
  bool appends;          // false: there are no new keys, each query attends to all of its row's cached ones
};

// Tensors are contiguous, except those with a stride. Number is the type of cached K/V: float, or int8_t with scales.
// Appended K/V are quantized first, and queries attend to the quantized ones: x becomes x · (1 / scale), rounded to the
// nearest integer, ties to even, clamped to [-128, 127]; NaN becomes 127. The bits are ONNX Runtime's.
template <typename Number>
struct AttentionTensors {
  const float* query;      // B, S rows of H * D, `query_stride` apart
  const float* key;        // B, S rows of Hkv * D, `key_stride` apart; null where nothing is appended
  const float* value;      // as keys
  int64_t query_stride;
  int64_t key_stride;
  Number* past_key;        // [B, Hkv, capacity, D], read and extended
  Number* past_value;      // the same
  const float* key_scales;    // [Hkv, D]; null for float
  const float* value_scales;  // the same
  const int32_t* last;     // [B], each row's cached and new tokens together, minus one
  const float* cosines;    // [positions, D / 2], rotate queries and new keys; null for no rotation
  const float* sines;      // the same
  const float* sinks;      // [H], each head's attention sink: a score without a value; null for none
  float* output;           // [B, S, H * D]
};

// Whether this processor has the instructions that `attend` needs.
bool can_attend();

// Batch-invariant: the bits of a row's output depend on its own tokens, lengths and cache alone, not on other rows or
// the number of threads. K/V past a row's length has no effect, even NaN. Number is float or int8_t.
template <typename Number>
void attend(const Parallel& parallel, const AttentionShape& shape, const AttentionTensors<Number>& tensors);

}  // namespace onward
