// The operators of the domain `onward`: each checks its inputs and calls the kernel that computes its outputs.
//
// A class has a name, ports, a constructor that reads attributes and constant inputs, and `compute`, which must be
// thread-safe. `is_supported` says whether this processor has the instructions that the kernel needs.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "checked.h"
#include "float_linear.h"
#include "int4_linear.h"
#include "linear.h"
#include "lookup.h"
#include "rows.h"
#include "runtime.h"

namespace onward {

// Input 0, the left side of a product.
inline Tensor input_rows(const Runtime& runtime, const ort::KernelContext* context, int64_t width) {
  const Tensor rows = runtime.input(context, 0);
  runtime.require(!rows.shape.empty() && rows.shape.back() == width, "rows must be K numbers wide");
  return rows;
}

// Columns of a product's output.
template <typename Number>
int64_t num_results(const FloatMatrix<Number>& matrix) {
  return matrix.num_columns;
}
template <typename Matrix>
int64_t num_results(const Matrix& matrix) {
  return matrix.activation == Activation::kSwiGlu ? matrix.num_columns / 2 : matrix.num_columns;
}

// Computes output 0, rows times matrix. `rounding` is int8's.
template <typename Matrix, typename... Roundings>
void multiply_rows(const Runtime& runtime, ort::KernelContext* context, const Tensor& rows, const Matrix& matrix,
                   const Roundings&... rounding) {
  const Tensor output = runtime.output(context, 0, rows.shape.with_last(num_results(matrix)));
  const SessionThreads threads{&runtime, context};
  multiply(threads.parallel(), rows.as<float>(), rows.shape.num_rows(), rounding..., matrix, output.as<float>());
}

// The shape of the panels of a matrix `[K, N]` in int8.
inline Shape int8_panels_shape(int64_t num_rows, int64_t num_columns) {
  return {(num_columns + kPanelColumns - 1) / kPanelColumns, (num_rows + kGroupRows - 1) / kGroupRows, kPanelColumns,
          kGroupRows};
}
constexpr char kInt8PanelsMessage[] = "panels must be [ceil(N / 32), ceil(K / 4), 32, 4]";

// `Int8Linear(rows [..., K], panels [⌈N / 32⌉, ⌈K / 4⌉, 32, 4] int8, scales [N]) → [..., N]`, and `BiasedInt8Linear`
// with a bias `[N]` as a fourth input; the suffix `Gelu` applies GELU to the output, `SwiGLU` gives silu(gate) · up of
// its halves `[..., N / 2]`. See linear.h.
template <bool kHasBias, Activation kActivation>
class Int8Linear {
 public:
  static constexpr const char* kNames[][2] = {{"Int8Linear", "BiasedInt8Linear"},
                                              {"Int8LinearGelu", "BiasedInt8LinearGelu"},
                                              {"Int8LinearSwiGLU", "BiasedInt8LinearSwiGLU"}};
  static constexpr const char* kName = kNames[static_cast<int>(kActivation)][kHasBias];
  static constexpr std::array<Port, 3 + kHasBias> kInputs = {{{ort::kFloat}, {ort::kInt8}, {ort::kFloat}}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_supported() { return can_multiply(); }

  Int8Linear(const Runtime& runtime, const ort::KernelInfo* info)
      : rounding_{runtime.attribute(info, "step", kMinStep, 1.0f),
                  static_cast<int32_t>(runtime.attribute<int64_t>(info, "zero", 0, 255))},
        num_rows_(runtime.attribute<int64_t>(info, "K", 1, kMaxRows)),
        panels_(runtime.constant(info, 1)),
        scales_(runtime.constant(info, 2)),
        bias_(runtime, info, 3),
        resident_(runtime.resident(info, 1, sizeof(int8_t))) {
    // Constants, as the column sums below are computed from them once.
    runtime.require(panels_.data && scales_.data, "panels and scales must be stored in the graph");
    runtime.require(scales_.shape.size() == 1 && panels_.shape.size() == 4,
                    "panels must have 4 dimensions and scales 1");
    runtime.require(panels_.shape == int8_panels_shape(num_rows_, scales_.shape[0]), kInt8PanelsMessage);
    runtime.require(ends_in_zeros(matrix(nullptr)), "panels must be zero past K");
    runtime.require(kActivation != Activation::kSwiGlu || scales_.shape[0] % (2 * kPanelColumns) == 0,
                    "N must be a multiple of 64, gates and ups");
    offsets_.resize(scales_.shape[0]);
    sum_columns(matrix(nullptr), rounding_.zero, offsets_.data());
  }

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const float* bias = bias_.get(runtime, context, scales_.shape[0]);
    multiply_rows(runtime, context, input_rows(runtime, context, num_rows_), matrix(bias), rounding_);
  }

 private:
  Int8Matrix matrix(const float* bias) const {
    return {numbers<int8_t>(resident_, panels_), num_rows_, scales_.shape[0], scales_.as<float>(), bias,
            offsets_.data(), kActivation};
  }

  static constexpr int64_t kMaxRows = 1 << 16;  // sums of bytes stay exact in 32 bits
  static constexpr float kMinStep = 0x1p-16f;   // no scale is subnormal, no quotient past 32 bits

  Rounding rounding_;
  int64_t num_rows_;
  Tensor panels_, scales_;
  Bias<kHasBias> bias_;
  std::shared_ptr<const void> resident_;
  std::vector<int32_t> offsets_;
};

// A matrix in int4: inputs 1 and 2, attributes K and N.
class Int4Weight {
 public:
  Int4Weight(const Runtime& runtime, const ort::KernelInfo* info)
      : num_rows_(runtime.attribute<int64_t>(info, "K", kInt4Block, kMax)),
        num_columns_(runtime.attribute<int64_t>(info, "N", 1, kMax)),
        panels_(runtime, info, 1),
        scales_(runtime, info, 2),
        resident_panels_(runtime.resident(info, 1, sizeof(uint8_t))),
        resident_scales_(runtime.resident(info, 2, sizeof(uint16_t))) {
    runtime.require(num_rows_ % kInt4Block == 0, "K must be a multiple of 32");
  }

  int64_t num_rows() const { return num_rows_; }
  int64_t num_columns() const { return num_columns_; }

  // Without bias and activation.
  Int4Matrix get(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor panels = panels_.get(runtime, context), scales = scales_.get(runtime, context);
    const int64_t num_blocks = num_rows_ / kInt4Block;
    const int64_t num_panels = (num_columns_ + kInt4PanelColumns - 1) / kInt4PanelColumns;
    runtime.require(panels.shape == Shape{num_panels, num_blocks, 4, kInt4PanelColumns, 4} &&
                        scales.shape == Shape{num_panels, num_blocks, kInt4PanelColumns},
                    "panels must be [ceil(N / 16), K / 32, 4, 16, 4] and scales [ceil(N / 16), K / 32, 16]");
    return {numbers<uint8_t>(resident_panels_, panels), numbers<uint16_t>(resident_scales_, scales),
            num_rows_, num_columns_, nullptr, Activation::kNone};
  }

 private:
  static constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

  int64_t num_rows_, num_columns_;
  Weight panels_, scales_;
  std::shared_ptr<const void> resident_panels_;
  std::shared_ptr<const void> resident_scales_;
};

// `Int4Linear(rows [..., K], panels [⌈N / 16⌉, K / 32, 4, 16, 4] uint8, scales [⌈N / 16⌉, K / 32, 16] float16) →
// [..., N]`, and `BiasedInt4Linear` with a bias `[N]`; `Gelu` and `SwiGLU` as above. See int4_linear.h.
template <bool kHasBias, Activation kActivation>
class Int4Linear {
 public:
  static constexpr const char* kNames[][2] = {{"Int4Linear", "BiasedInt4Linear"},
                                              {"Int4LinearGelu", "BiasedInt4LinearGelu"},
                                              {"Int4LinearSwiGLU", "BiasedInt4LinearSwiGLU"}};
  static constexpr const char* kName = kNames[static_cast<int>(kActivation)][kHasBias];
  static constexpr std::array<Port, 3 + kHasBias> kInputs = {{{ort::kFloat}, {ort::kUint8}, {ort::kFloat16}}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_supported() { return can_multiply(); }

  Int4Linear(const Runtime& runtime, const ort::KernelInfo* info) : matrix_(runtime, info), bias_(runtime, info, 3) {
    runtime.require(kActivation != Activation::kSwiGlu || matrix_.num_columns() % (2 * kInt4PanelColumns) == 0,
                    "N must be a multiple of 32, gates and ups");
  }

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor rows = input_rows(runtime, context, matrix_.num_rows());
    Int4Matrix matrix = matrix_.get(runtime, context);
    matrix.bias = bias_.get(runtime, context, matrix.num_columns);
    matrix.activation = kActivation;
    multiply_rows(runtime, context, rows, matrix);
  }

 private:
  Int4Weight matrix_;
  Bias<kHasBias> bias_;
};

// Computes output 0: for each id of input 0, that column of the matrix.
template <typename Matrix>
void look_up_ids(const Runtime& runtime, ort::KernelContext* context, const Matrix& matrix) {
  const Tensor ids = runtime.input(context, 0);
  const int64_t count = ids.shape.count();
  const Tensor output = runtime.output(context, 0, ids.shape.with_appended(matrix.num_rows));
  const auto is_column = [&](int64_t id) { return 0 <= id && id < matrix.num_columns; };
  runtime.require(std::all_of(ids.as<int64_t>(), ids.as<int64_t>() + count, is_column), "ids must be from 0 to N - 1");
  const SessionThreads threads{&runtime, context};
  look_up(threads.parallel(), ids.as<int64_t>(), count, matrix, output.as<float>());
}

// `Int8Gather(ids [...] int64, panels, scales) → [..., K]`: columns of the matrix of an `Int8Linear`. See lookup.h.
class Int8Gather {
 public:
  static constexpr char kName[] = "Int8Gather";
  static constexpr Port kInputs[] = {{ort::kInt64}, {ort::kInt8}, {ort::kFloat}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_supported() { return can_multiply(); }

  Int8Gather(const Runtime& runtime, const ort::KernelInfo* info)
      : num_rows_(runtime.attribute<int64_t>(info, "K", 1, kMax)),
        panels_(runtime, info, 1),
        scales_(runtime, info, 2),
        resident_(runtime.resident(info, 1, sizeof(int8_t))) {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor panels = panels_.get(runtime, context), scales = scales_.get(runtime, context);
    runtime.require(scales.shape.size() == 1, "scales must have 1 dimension");
    const int64_t num_columns = scales.shape[0];
    runtime.require(panels.shape == int8_panels_shape(num_rows_, num_columns), kInt8PanelsMessage);
    look_up_ids(runtime, context,
                Int8Matrix{numbers<int8_t>(resident_, panels), num_rows_, num_columns, scales.as<float>(), nullptr,
                           nullptr, Activation::kNone});
  }

 private:
  static constexpr int64_t kMax = std::numeric_limits<int32_t>::max();

  int64_t num_rows_;
  Weight panels_, scales_;
  std::shared_ptr<const void> resident_;
};

// `Int4Gather(ids [...] int64, panels, scales) → [..., K]`: columns of the matrix of an `Int4Linear`. See lookup.h.
class Int4Gather {
 public:
  static constexpr char kName[] = "Int4Gather";
  static constexpr Port kInputs[] = {{ort::kInt64}, {ort::kUint8}, {ort::kFloat16}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_supported() { return can_multiply(); }

  Int4Gather(const Runtime& runtime, const ort::KernelInfo* info) : matrix_(runtime, info) {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    look_up_ids(runtime, context, matrix_.get(runtime, context));
  }

 private:
  Int4Weight matrix_;
};

template <typename Number>
constexpr bool kIsBfloat16 = std::is_same_v<Number, Bfloat16>;

// A matrix of floats: input 1, `[N, K]`.
template <typename Number>
class FloatWeight {
 public:
  FloatWeight(const Runtime& runtime, const ort::KernelInfo* info)
      : weight_(runtime, info, 1), resident_(runtime.resident_rows(info, 1, sizeof(Number), best_stride<Number>)) {}

  // Without bias and GELU.
  FloatMatrix<Number> get(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor weight = weight_.get(runtime, context);
    runtime.require(weight.shape.size() == 2, "weight must be [N, K]");
    const int64_t width = weight.shape[1];
    return {{width, weight.shape[0], nullptr, false},
            numbers<Number>(resident_, weight),
            resident_ ? best_stride<Number>(width) : width};
  }

 private:
  Weight weight_;
  std::shared_ptr<const void> resident_;
};

// `Linear(rows [..., K], weight [N, K]) → [..., N]`, and `BiasedLinear` with a bias `[N]`; `Gelu` as above. `Bf16Linear`
// is the same with a weight in bfloat16. See float_linear.h.
template <typename Number, bool kHasBias, bool kHasGelu>
class Linear {
 public:
  static constexpr const char* kNames[][2][2] = {
      {{"Linear", "LinearGelu"}, {"BiasedLinear", "BiasedLinearGelu"}},
      {{"Bf16Linear", "Bf16LinearGelu"}, {"BiasedBf16Linear", "BiasedBf16LinearGelu"}}};
  static constexpr const char* kName = kNames[kIsBfloat16<Number>][kHasBias][kHasGelu];
  static constexpr std::array<Port, 2 + kHasBias> kInputs = {{{}, {kIsBfloat16<Number> ? ort::kBfloat16 : ort::kFloat}}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_supported() { return can_multiply_floats(); }

  Linear(const Runtime& runtime, const ort::KernelInfo* info) : weight_(runtime, info), bias_(runtime, info, 2) {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    FloatMatrix<Number> matrix = weight_.get(runtime, context);
    matrix.bias = bias_.get(runtime, context, matrix.num_columns);
    matrix.is_gelu = kHasGelu;
    multiply_rows(runtime, context, input_rows(runtime, context, matrix.num_rows), matrix);
  }

 private:
  FloatWeight<Number> weight_;
  Bias<kHasBias> bias_;
};

// `Gather(ids [...] int64, weight [N, K]) → [..., K]`, and `Bf16Gather`: columns of the matrix of a `Linear` or
// `Bf16Linear`. See lookup.h.
template <typename Number>
class Gather {
 public:
  static constexpr const char* kName = kIsBfloat16<Number> ? "Bf16Gather" : "Gather";
  static constexpr Port kInputs[] = {{ort::kInt64}, {kIsBfloat16<Number> ? ort::kBfloat16 : ort::kFloat}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_supported() { return can_multiply_floats(); }

  Gather(const Runtime& runtime, const ort::KernelInfo* info) : weight_(runtime, info) {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    look_up_ids(runtime, context, weight_.get(runtime, context));
  }

 private:
  FloatWeight<Number> weight_;
};

// `com.microsoft.GroupQueryAttention`, as far as exported graphs use it; see attention.h. Number is the type of cached
// K/V.
template <typename Number>
class CachedAttention {
 public:
  static bool is_supported() { return can_attend(); }

  CachedAttention(const Runtime& runtime, const ort::KernelInfo* info)
      : num_heads_(runtime.attribute<int64_t>(info, "num_heads", 1, kMax)),
        num_kv_heads_(runtime.attribute<int64_t>(info, "kv_num_heads", 1, num_heads_)),
        rotates_(runtime.attribute<int64_t>(info, "do_rotary", 0, 1) != 0),
        window_(std::max<int64_t>(runtime.attribute<int64_t>(info, "local_window_size", -1, kMaxPositions), 0)),
        cosines_(runtime, info, 7),
        sines_(runtime, info, 8),
        int8_(runtime, info) {
    runtime.require(num_heads_ % num_kv_heads_ == 0, "kv_num_heads must divide num_heads");
  }

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor query = runtime.input(context, 0), key = runtime.input(context, 1), value = runtime.input(context, 2);
    const Tensor past_key = runtime.input(context, 3), past_value = runtime.input(context, 4);
    const Tensor last = runtime.input(context, 5), total = runtime.input(context, 6);
    const Tensor cosines = cosines_.get(runtime, context), sines = sines_.get(runtime, context);
    runtime.require(query.shape.size() == 3 && past_key.shape.size() == 4, "query must have 3 dimensions, past_key 4");
    runtime.require(total.data && total.shape.count() == 1, "total_sequence_length must be one number");
    runtime.require(past_key.shape[1] == num_kv_heads_ && past_key.shape == past_value.shape,
                    "past_key and past_value must have kv_num_heads heads");
    AttentionShape shape{};
    shape.batch = query.shape[0];
    shape.new_tokens = query.shape[1];
    shape.total_tokens = *total.as<int32_t>();
    shape.num_heads = num_heads_;
    shape.num_kv_heads = num_kv_heads_;
    shape.head_dim = past_key.shape[3];
    shape.capacity = past_key.shape[2];
    shape.window = window_;
    shape.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
    const bool is_packed = key.is_absent();
    runtime.require(is_packed == value.is_absent(), "key and value must both be given or neither");
    runtime.require(is_packed || key.shape.size() == 3, "key must have 3 dimensions");
    // Empty keys mean cross-attention: the source's are cached already.
    shape.appends = is_packed || key.shape[1] > 0;
    runtime.require(shape.head_dim > 0 && shape.head_dim % kHeadDimMultiple == 0 && shape.head_dim <= kMax,
                    "heads must be a multiple of 16 wide, 65536 at most");
    const int64_t width = product(num_heads_, shape.head_dim), kv_width = product(num_kv_heads_, shape.head_dim);
    runtime.require(query.shape[2] == (is_packed ? width + 2 * kv_width : width), "query must be as wide as its heads");
    runtime.require(past_key.shape[0] == shape.batch && last.shape == Shape{shape.batch},
                    "past_key and seqlens_k must have as many rows as query");
    if (!is_packed) {
      const Shape wanted = {shape.batch, shape.appends ? shape.new_tokens : 0, kv_width};
      runtime.require(key.shape == wanted && value.shape == wanted,
                      "key and value must be as many and wide as their heads");
    }
    if (rotates_) {
      runtime.require(cosines.shape.size() == 2 && cosines.shape[1] == shape.head_dim / 2 &&
                          cosines.shape == sines.shape && cosines.shape[0] >= shape.total_tokens,
                      "cos_cache and sin_cache must reach total_sequence_length and be half as wide as a head");
    }
    for (int64_t row = 0; row < shape.batch; ++row) {
      const int64_t position = last.as<int32_t>()[row];  // -1 for a row without tokens
      runtime.require(-1 <= position && position < shape.capacity, "seqlens_k must be within the cache");
      runtime.require(position < shape.total_tokens, "seqlens_k must be within total_sequence_length");
    }

    AttentionTensors<Number> tensors{};
    if constexpr (std::is_same_v<Number, int8_t>) {
      const Tensor sinks = int8_.sinks.get(runtime, context);
      const Tensor key_scales = int8_.key_scales.get(runtime, context);
      const Tensor value_scales = int8_.value_scales.get(runtime, context);
      runtime.require(!sinks.data || sinks.shape == Shape{num_heads_}, "sinks must be one of each head");
      const Shape wanted = {1, num_kv_heads_, 1, shape.head_dim};
      runtime.require(key_scales.shape == wanted && value_scales.shape == wanted,
                      "key_scales and value_scales must be [1, kv_num_heads, 1, head_dim]");
      tensors.sinks = sinks.as<float>();
      tensors.key_scales = key_scales.as<float>();
      tensors.value_scales = value_scales.as<float>();
    }
    const Tensor output = runtime.output(context, 0, {shape.batch, shape.new_tokens, width});
    tensors.query = query.as<float>();
    tensors.query_stride = query.shape[2];
    tensors.key = is_packed ? tensors.query + width : key.as<float>();
    tensors.value = is_packed ? tensors.key + kv_width : value.as<float>();
    tensors.key_stride = is_packed ? tensors.query_stride : kv_width;
    tensors.past_key = present(runtime, context, 1, past_key);
    tensors.past_value = present(runtime, context, 2, past_value);
    tensors.last = last.as<int32_t>();
    tensors.cosines = rotates_ ? cosines.as<float>() : nullptr;
    tensors.sines = rotates_ ? sines.as<float>() : nullptr;
    tensors.output = output.as<float>();
    const SessionThreads threads{&runtime, context};
    if (shape.batch > 0 && shape.new_tokens > 0) attend(threads.parallel(), shape, tensors);
  }

 private:
  static constexpr int64_t kHeadDimMultiple = 16;
  static constexpr int64_t kMax = 1 << 16;  // for heads and for their width: products of both fit 64 bits
  static constexpr int64_t kMaxPositions = std::numeric_limits<int32_t>::max();

  // Further inputs for K/V in int8.
  struct Int8Inputs {
    Weight sinks, key_scales, value_scales;
    Int8Inputs(const Runtime& runtime, const ort::KernelInfo* info)
        : sinks(runtime, info, 9), key_scales(runtime, info, 10), value_scales(runtime, info, 11) {}
  };
  struct NoInputs {
    NoInputs(const Runtime&, const ort::KernelInfo*) {}
  };

  // The cache to write: the input's buffer if the caller bound it as output, else a copy.
  static Number* present(const Runtime& runtime, ort::KernelContext* context, size_t index, const Tensor& past) {
    const Tensor present = runtime.output(context, index, past.shape);
    if (present.data != past.data) std::copy_n(past.as<Number>(), past.shape.count(), present.as<Number>());
    return present.as<Number>();
  }

  int64_t num_heads_, num_kv_heads_;
  bool rotates_;
  int64_t window_;
  Weight cosines_, sines_;
  std::conditional_t<std::is_same_v<Number, int8_t>, Int8Inputs, NoInputs> int8_;
};

class GroupQueryAttention : public CachedAttention<float> {
 public:
  using CachedAttention::CachedAttention;
  static constexpr char kName[] = "GroupQueryAttention";
  static constexpr Port kInputs[] = {
      {ort::kFloat}, {ort::kFloat, ort::kOptional}, {ort::kFloat, ort::kOptional},   // query, key, value
      {ort::kFloat}, {ort::kFloat},                                                  // past
      {ort::kInt32}, {ort::kInt32},                                                  // last, total
      {ort::kFloat, ort::kOptional}, {ort::kFloat, ort::kOptional}};                 // cosines, sines
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kFloat, ort::kFloat};
};

// The same over K/V in int8, with a scale per channel.
class Int8CacheAttention : public CachedAttention<int8_t> {
 public:
  using CachedAttention::CachedAttention;
  static constexpr char kName[] = "Int8CacheAttention";
  static constexpr Port kInputs[] = {
      {ort::kFloat}, {ort::kFloat, ort::kOptional}, {ort::kFloat, ort::kOptional},   // query, key, value
      {ort::kInt8}, {ort::kInt8},                                                    // past
      {ort::kInt32}, {ort::kInt32},                                                  // last, total
      {ort::kFloat, ort::kOptional}, {ort::kFloat, ort::kOptional},                  // cosines, sines
      {ort::kFloat, ort::kOptional}, {ort::kFloat}, {ort::kFloat}};                  // sinks, scales
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kInt8, ort::kInt8};
};

// `SwiGLU(rows [..., 2 · width]) → [..., width]`; see rows.h.
class SwiGlu {
 public:
  static constexpr char kName[] = "SwiGLU";
  static constexpr Port kInputs[] = {{ort::kFloat}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_supported() { return can_compute_rows(); }

  SwiGlu(const Runtime&, const ort::KernelInfo*) {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor rows = runtime.input(context, 0);
    runtime.require(!rows.shape.empty() && rows.shape.back() % 2 == 0, "rows must be gate and up beside each other");
    const int64_t width = rows.shape.back() / 2, num_rows = rows.shape.num_rows();
    const Tensor output = runtime.output(context, 0, rows.shape.with_last(width));
    const SessionThreads threads{&runtime, context};
    if (rows.shape.count()) swiglu(threads.parallel(), rows.as<float>(), num_rows, width, output.as<float>());
  }
};

// `AddRMSNorm(left, right, weight) → sum, normed` and `AddLayerNorm(left, right, weight, bias)`; see rows.h.
template <bool kHasBias>
class AddNorm {
 public:
  static constexpr const char* kName = kHasBias ? "AddLayerNorm" : "AddRMSNorm";
  static constexpr std::array<Port, 3 + kHasBias> kInputs = {};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kFloat};
  static bool is_supported() { return can_compute_rows(); }

  AddNorm(const Runtime& runtime, const ort::KernelInfo* info)
      : epsilon_(runtime.attribute(info, "epsilon", 0.0f, std::numeric_limits<float>::max())),
        weight_(runtime, info, 2),
        bias_(runtime, info, 3) {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor left = runtime.input(context, 0), right = runtime.input(context, 1);
    runtime.require(!left.shape.empty() && left.shape == right.shape, "left and right must have one shape");
    const int64_t width = left.shape.back(), num_rows = left.shape.num_rows();
    const Tensor weight = weight_.get(runtime, context), bias = kHasBias ? bias_.get(runtime, context) : weight;
    runtime.require(weight.shape == Shape{width} && bias.shape == Shape{width},
                    "weight and bias must be as long as a row");
    const Tensor sums = runtime.output(context, 0, left.shape), output = runtime.output(context, 1, left.shape);
    if (!left.shape.count()) return;
    const SessionThreads threads{&runtime, context};
    const Addition addition{left.as<float>(), right.as<float>(), sums.as<float>(), num_rows, width};
    if constexpr (kHasBias) {
      const float* const shift = bias.as<float>();
      add_layer_norm(threads.parallel(), addition, weight.as<float>(), shift, epsilon_, output.as<float>());
    } else {
      add_rms_norm(threads.parallel(), addition, weight.as<float>(), epsilon_, output.as<float>());
    }
  }

 private:
  float epsilon_;
  Weight weight_, bias_;
};

}  // namespace onward
