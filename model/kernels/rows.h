// Row-wise operators between products: gates and norms.
#pragma once

#include <cstdint>

#include "parallel.h"

namespace onward {

// Whether this processor has the instructions that these need.
bool can_compute_rows();

// `output` `[num_rows, width]` = silu(gate) · up; each of `rows` `[num_rows, 2 · width]` is a gate, then an up.
void swiglu(const Parallel& parallel, const float* rows, int64_t num_rows, int64_t width, float* output);

// Two tensors `[num_rows, width]` and their sum, which may overwrite one of them.
struct Addition {
  const float* left;
  const float* right;
  float* sums;
  int64_t num_rows;
  int64_t width;
};

// `output` = sums / √(mean of sums² + epsilon) · weight, weight `[width]`.
void add_rms_norm(const Parallel& parallel, const Addition& addition, const float* weight, float epsilon,
                  float* output);

// `output` = (sums - mean) / √(variance + epsilon) · weight + bias, weight and bias `[width]`.
void add_layer_norm(const Parallel& parallel, const Addition& addition, const float* weight, const float* bias,
                    float epsilon, float* output);

}  // namespace onward
