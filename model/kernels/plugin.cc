// The kernels as custom operators of ONNX Runtime, in the domain `onward`: what `RegisterCustomOps` adds to a session.
//
// Each operator has a body of standard ones in every graph that uses it, which ONNX Runtime computes where this library
// is not registered. So an operator is registered only where the processor has the instructions that its kernel needs.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "checked.h"
#include "float_linear.h"
#include "int4_linear.h"
#include "linear.h"
#include "onnxruntime_abi.h"
#include "parallel.h"
#include "resident.h"
#include "rows.h"

namespace onward {
namespace {

constexpr char kDomain[] = "onward";

// An error on its way to ONNX Runtime, which takes no exceptions.
struct Refused : std::exception {
  explicit Refused(ort::Status* status) : status(status) {}
  ort::Status* status;
};

// Dimensions of a tensor. A step of one row has a hundred operators with ten tensors each: no memory is asked for.
class Shape {
 public:
  static constexpr size_t kMostDimensions = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dimensions) : Shape(dimensions.begin(), dimensions.size()) {}

  // Of `rank` dimensions, kMostDimensions at most.
  Shape(const int64_t* dimensions, size_t rank) : rank_(rank) { std::copy_n(dimensions, rank, dimensions_.begin()); }

  const int64_t* data() const { return dimensions_.data(); }
  size_t size() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  int64_t operator[](size_t index) const { return dimensions_[index]; }

  // The last dimension; there must be one, as for `num_rows` and `with_last`.
  int64_t back() const { return dimensions_[rank_ - 1]; }

  bool operator==(const Shape& other) const {
    return std::equal(data(), data() + rank_, other.data(), other.data() + other.rank_);
  }
  bool operator!=(const Shape& other) const { return !(*this == other); }

  // How many numbers there are, and how many rows of them along the last dimension. Throw where 64 bits cannot hold it,
  // as a dimension of zero beside large ones allows.
  int64_t count() const { return leading(rank_); }
  int64_t num_rows() const { return leading(rank_ - 1); }

  Shape with_last(int64_t last) const {
    Shape shape = *this;
    shape.dimensions_[rank_ - 1] = last;
    return shape;
  }

 private:
  int64_t leading(size_t rank) const {
    int64_t count = 1;
    for (size_t index = 0; index < rank; ++index) count = product(count, dimensions_[index]);
    return count;
  }

  std::array<int64_t, kMostDimensions> dimensions_{};
  size_t rank_ = 0;
};

struct Tensor {
  void* data = nullptr;
  Shape shape;

  template <typename Number>
  Number* as() const {
    return static_cast<Number*>(data);
  }

  // An optional input that a node leaves out: even one without numbers has dimensions.
  bool is_absent() const { return !data && shape.empty(); }
};

// How many bytes a number takes of the types that ports have.
constexpr size_t num_bytes(ort::ElementType type) {
  return type == ort::kUint8 || type == ort::kInt8 ? 1 : type == ort::kFloat16 ? 2 : 4;
}

// ONNX Runtime's interface with errors as exceptions.
class Runtime {
 public:
  Runtime(void* const* functions, bool copies_weights) : api_{functions}, copies_weights_(copies_weights) {}

  void require(bool is_so, const char* message) const {
    if (!is_so) throw Refused(api_.create_status(ort::kInvalidArgument, message));
  }

  // An attribute from `least` to `most`, both allowed; no bounds allow NaN.
  template <typename Number>
  Number attribute(const ort::KernelInfo* info, const char* name, Number least, Number most) const {
    Number value{};
    check(api_.attribute(info, name, &value));
    if (!(least <= value && value <= most)) {
      std::ostringstream message;
      message << name << " is " << value << ", must be from " << least << " to " << most;
      require(false, message.str().c_str());
    }
    return value;
  }

  // An input that is stored in the graph, and so stays where it is for the kernel's life; without data where it is
  // computed, or not there.
  Tensor stored(const ort::KernelInfo* info, size_t index) const {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    check(api_.constant_input(info, index, &is_constant, &value));
    return is_constant && value ? read(value) : Tensor{};
  }

  // A copy of a stored input of `num_bytes` a number in huge pages; null where weights are to stay in the file, or the
  // input is not stored or is small.
  std::shared_ptr<const void> resident(const ort::KernelInfo* info, size_t index, size_t num_bytes) const {
    const Tensor tensor = copied(info, index, num_bytes);
    return tensor.data ? make_resident(tensor.data, product(tensor.shape.count(), num_bytes)) : nullptr;
  }

  // The same for a matrix whose rows are `stride` numbers apart in the copy.
  std::shared_ptr<const void> resident_rows(const ort::KernelInfo* info, size_t index, size_t num_bytes,
                                            int64_t (*stride)(int64_t width)) const {
    const Tensor tensor = copied(info, index, num_bytes);
    if (!tensor.data || tensor.shape.size() != 2) return nullptr;
    const int64_t width = tensor.shape[1];
    const int64_t pitch = product(stride(width), num_bytes);
    product(tensor.shape[0], pitch);  // may be more than the tensor has
    return make_resident(tensor.data, width * num_bytes, tensor.shape[0], pitch);
  }

  Tensor input(const ort::KernelContext* context, size_t index) const {
    const ort::Value* value = nullptr;
    check(api_.input(context, index, &value));
    return value ? read(value) : Tensor{};
  }

  Tensor output(ort::KernelContext* context, size_t index, const Shape& shape) const {
    ort::Value* value = nullptr;
    check(api_.output(context, index, shape.data(), shape.size(), &value));
    require(value, "a node must have all outputs of its operator");
    Tensor tensor{nullptr, shape};
    check(api_.data(value, &tensor.data));
    return tensor;
  }

  void parallel_for(const ort::KernelContext* context, void (*fn)(void*, size_t), size_t count, void* data) const {
    check(api_.parallel_for(context, fn, count, data));
  }

  ort::Status* status(const char* message) const { return api_.create_status(ort::kFail, message); }

 private:
  void check(ort::Status* status) const {
    if (status) throw Refused(status);
  }

  // A stored input that is to be copied; without data where it is not.
  Tensor copied(const ort::KernelInfo* info, size_t index, size_t num_bytes) const {
    const Tensor tensor = copies_weights_ ? stored(info, index) : Tensor{};
    return tensor.data && product(tensor.shape.count(), num_bytes) >= kLeastResident ? tensor : Tensor{};
  }

  Tensor read(const ort::Value* value) const {
    Tensor tensor;
    ort::ElementType type{};
    const int64_t* dimensions = nullptr;
    size_t rank = 0;
    check(api_.type_and_shape(value, &type, &dimensions, &rank));
    static_assert(Shape::kMostDimensions == 8);
    require(rank <= Shape::kMostDimensions, "tensors must have 8 dimensions at most");
    tensor.shape = Shape(dimensions, rank);
    // What is read is not written, but for what one buffer is both of: the caller says so by tying it to an output,
    // too.
    check(api_.data(const_cast<ort::Value*>(value), &tensor.data));
    // A file's weights are read where the file has them, which may be anywhere.
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    require(address % num_bytes(type) == 0, "tensors must be aligned to their numbers");
    return tensor;
  }

  static constexpr int64_t kLeastResident = 1 << 16;

  ort::Api api_;
  bool copies_weights_;
};

// Lends kernels the threads of the session that computes.
struct Lender {
  const Runtime* runtime;
  const ort::KernelContext* context;

  Parallel parallel() const {
    return {const_cast<Lender*>(this), [](void* lender, void (*fn)(void*, size_t), size_t count, void* data) {
              const auto* self = static_cast<const Lender*>(lender);
              self->runtime->parallel_for(self->context, fn, count, data);
            }};
  }
};

template <typename Body>
ort::Status* guarded(const Runtime& runtime, Body body) {
  try {
    body();
    return nullptr;
  } catch (const Refused& refused) {
    return refused.status;
  } catch (const std::bad_alloc&) {
    return runtime.status("out of memory");
  } catch (const std::exception& error) {
    return runtime.status(error.what());
  }
}

// An operator's input: its type, and whether it may be absent. All outputs are there.
struct Port {
  ort::ElementType type = ort::kFloat;
  ort::Characteristic presence = ort::kRequired;
};

// An input that is asked for once where the graph stores it; where it is computed, or not there, in each run.
class Weight {
 public:
  Weight(const Runtime& runtime, const ort::KernelInfo* info, size_t index)
      : index_(index), stored_(runtime.stored(info, index)) {}

  Tensor of(const Runtime& runtime, const ort::KernelContext* context) const {
    return stored_.data ? stored_ : runtime.input(context, index_);
  }

 private:
  size_t index_;
  Tensor stored_;
};

// Where a stored input is read: its copy, if there is one.
template <typename Number>
const Number* where(const std::shared_ptr<const void>& resident, const Tensor& stored) {
  return resident ? static_cast<const Number*>(resident.get()) : stored.as<Number>();
}

// The bias of a product, an input that not all have: null where there is none.
template <bool kIsThere>
class Bias {
 public:
  Bias(const Runtime& runtime, const ort::KernelInfo* info, size_t index) : weight_(runtime, info, index) {}

  // `[N]`
  const float* of(const Runtime& runtime, const ort::KernelContext* context, int64_t num_columns) const {
    if constexpr (!kIsThere) return nullptr;
    const Tensor bias = weight_.of(runtime, context);
    runtime.require(bias.shape == Shape{num_columns}, "bias must be as long as the matrix has columns");
    return bias.as<float>();
  }

 private:
  Weight weight_;
};

// `Int8Linear(rows [..., K], panels [⌈N / 32⌉, ⌈K / 4⌉, 32, 4] int8, scales [N]) → [..., N]`, and `BiasedInt8Linear`
// with one more input, `[N]`; either with `Gelu` behind its name puts what comes out through it. See linear.h.
template <bool kIsBiased, bool kIsGelu>
class Int8Linear {
 public:
  static constexpr const char* kName =
      kIsGelu ? (kIsBiased ? "BiasedInt8LinearGelu" : "Int8LinearGelu") : kIsBiased ? "BiasedInt8Linear" : "Int8Linear";
  static constexpr std::array<Port, 3 + kIsBiased> kInputs = {{{ort::kFloat}, {ort::kInt8}, {ort::kFloat}}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_able() { return can_multiply(); }

  Int8Linear(const Runtime& runtime, const ort::KernelInfo* info)
      : rounding_{runtime.attribute(info, "step", kLeastStep, 1.0f),
                  static_cast<int32_t>(runtime.attribute<int64_t>(info, "zero", 0, 255))},
        num_rows_(runtime.attribute<int64_t>(info, "K", 1, kMostRows)),
        panels_(runtime.stored(info, 1)),
        scales_(runtime.stored(info, 2)),
        bias_(runtime, info, 3),
        resident_(runtime.resident(info, 1, sizeof(int8_t))) {
    // Weights are stored, and what is derived from them is as good as stored.
    runtime.require(panels_.data && scales_.data, "panels and scales must be stored in the graph");
    runtime.require(scales_.shape.size() == 1 && panels_.shape.size() == 4,
                    "panels must have 4 dimensions and scales 1");
    const Shape shape = {(scales_.shape[0] + kPanelColumns - 1) / kPanelColumns,
                         (num_rows_ + kGroupRows - 1) / kGroupRows, kPanelColumns, kGroupRows};
    runtime.require(panels_.shape == shape, "panels must be [ceil(N / 32), ceil(K / 4), 32, 4]");
    runtime.require(ends_in_zeros(matrix(nullptr)), "panels must be zero past K");
    offsets_.resize(scales_.shape[0]);
    sum_columns(matrix(nullptr), rounding_.zero, offsets_.data());
  }

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor rows = runtime.input(context, 0);
    const Int8Matrix matrix = this->matrix(bias_.of(runtime, context, scales_.shape[0]));
    runtime.require(!rows.shape.empty() && rows.shape.back() == num_rows_, "rows must be K numbers wide");
    const Tensor output = runtime.output(context, 0, rows.shape.with_last(scales_.shape[0]));
    const Lender lender{&runtime, context};
    multiply(lender.parallel(), rows.as<float>(), rows.shape.num_rows(), rounding_, matrix, output.as<float>());
  }

 private:
  Int8Matrix matrix(const float* bias) const {
    return {where<int8_t>(resident_, panels_), num_rows_, scales_.shape[0], scales_.as<float>(), bias, offsets_.data(),
            kIsGelu};
  }

  static constexpr int64_t kMostRows = 1 << 16;  // sums of bytes stay exact in 32 bits
  static constexpr float kLeastStep = 0x1p-16f;  // no scale is subnormal, no quotient past 32 bits

  Rounding rounding_;
  int64_t num_rows_;
  Tensor panels_, scales_;
  Bias<kIsBiased> bias_;
  std::shared_ptr<const void> resident_;
  std::vector<int32_t> offsets_;
};

// `Int4Linear(rows [..., K], panels [⌈N / 16⌉, K / 32, 4, 16, 4] uint8, scales [⌈N / 16⌉, K / 32, 16] float16) →
// [..., N]`, and `BiasedInt4Linear` with one more input, `[N]`; `Gelu` as above. See int4_linear.h.
template <bool kIsBiased, bool kIsGelu>
class Int4Linear {
 public:
  static constexpr const char* kName =
      kIsGelu ? (kIsBiased ? "BiasedInt4LinearGelu" : "Int4LinearGelu") : kIsBiased ? "BiasedInt4Linear" : "Int4Linear";
  static constexpr std::array<Port, 3 + kIsBiased> kInputs = {{{ort::kFloat}, {ort::kUint8}, {ort::kFloat16}}};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_able() { return can_multiply(); }

  Int4Linear(const Runtime& runtime, const ort::KernelInfo* info)
      : num_rows_(runtime.attribute<int64_t>(info, "K", kInt4Block, kMost)),
        num_columns_(runtime.attribute<int64_t>(info, "N", 1, kMost)),
        panels_(runtime, info, 1),
        scales_(runtime, info, 2),
        bias_(runtime, info, 3),
        resident_panels_(runtime.resident(info, 1, sizeof(uint8_t))),
        resident_scales_(runtime.resident(info, 2, sizeof(uint16_t))) {
    runtime.require(num_rows_ % kInt4Block == 0, "K must be a multiple of 32");
  }

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor rows = runtime.input(context, 0), panels = panels_.of(runtime, context);
    const Tensor scales = scales_.of(runtime, context);
    const float* bias = bias_.of(runtime, context, num_columns_);
    runtime.require(!rows.shape.empty() && rows.shape.back() == num_rows_, "rows must be K numbers wide");
    const int64_t num_blocks = num_rows_ / kInt4Block;
    const int64_t num_panels = (num_columns_ + kInt4PanelColumns - 1) / kInt4PanelColumns;
    runtime.require(panels.shape == Shape{num_panels, num_blocks, 4, kInt4PanelColumns, 4} &&
                        scales.shape == Shape{num_panels, num_blocks, kInt4PanelColumns},
                    "panels must be [ceil(N / 16), K / 32, 4, 16, 4] and scales [ceil(N / 16), K / 32, 16]");
    const Int4Matrix matrix{where<uint8_t>(resident_panels_, panels), where<uint16_t>(resident_scales_, scales),
                            num_rows_, num_columns_, bias, kIsGelu};
    const Tensor output = runtime.output(context, 0, rows.shape.with_last(num_columns_));
    const Lender lender{&runtime, context};
    multiply(lender.parallel(), rows.as<float>(), rows.shape.num_rows(), matrix, output.as<float>());
  }

 private:
  static constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

  int64_t num_rows_, num_columns_;
  Weight panels_, scales_;
  Bias<kIsBiased> bias_;
  std::shared_ptr<const void> resident_panels_;
  std::shared_ptr<const void> resident_scales_;
};

// `Linear(rows [..., K], weight [N, K]) → [..., N]`, and `BiasedLinear` with one more input, `[N]`; `Gelu` as above. See
// float_linear.h.
template <bool kIsBiased, bool kIsGelu>
class Linear {
 public:
  static constexpr const char* kName =
      kIsGelu ? (kIsBiased ? "BiasedLinearGelu" : "LinearGelu") : kIsBiased ? "BiasedLinear" : "Linear";
  static constexpr std::array<Port, 2 + kIsBiased> kInputs = {};
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat};
  static bool is_able() { return can_multiply_floats(); }

  Linear(const Runtime& runtime, const ort::KernelInfo* info)
      : weight_(runtime, info, 1),
        bias_(runtime, info, 2),
        resident_(runtime.resident_rows(info, 1, sizeof(float), best_stride)) {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor rows = runtime.input(context, 0), weight = weight_.of(runtime, context);
    runtime.require(weight.shape.size() == 2, "weight must be [N, K]");
    const float* bias = bias_.of(runtime, context, weight.shape[0]);
    runtime.require(!rows.shape.empty() && rows.shape.back() == weight.shape[1], "rows must be K numbers wide");
    const int64_t width = weight.shape[1];
    const FloatMatrix matrix{where<float>(resident_, weight), width, weight.shape[0],
                             resident_ ? best_stride(width) : width, bias, kIsGelu};
    const Tensor output = runtime.output(context, 0, rows.shape.with_last(weight.shape[0]));
    const Lender lender{&runtime, context};
    multiply(lender.parallel(), rows.as<float>(), rows.shape.num_rows(), matrix, output.as<float>());
  }

 private:
  Weight weight_;
  Bias<kIsBiased> bias_;
  std::shared_ptr<const void> resident_;
};

// `GroupQueryAttention` of `com.microsoft`, without what no graph of ours asks for; see attention.h. Number is what K/V
// are kept in.
template <typename Number>
class AttentionOver {
 public:
  static bool is_able() { return can_attend(); }

  AttentionOver(const Runtime& runtime, const ort::KernelInfo* info)
      : num_heads_(runtime.attribute<int64_t>(info, "num_heads", 1, kMost)),
        num_kv_heads_(runtime.attribute<int64_t>(info, "kv_num_heads", 1, num_heads_)),
        rotates_(runtime.attribute<int64_t>(info, "do_rotary", 0, 1) != 0),
        window_(std::max<int64_t>(runtime.attribute<int64_t>(info, "local_window_size", -1, kMostPositions), 0)),
        cosines_(runtime, info, 7),
        sines_(runtime, info, 8),
        int8_(runtime, info) {
    runtime.require(num_heads_ % num_kv_heads_ == 0, "kv_num_heads must divide num_heads");
  }

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor query = runtime.input(context, 0), key = runtime.input(context, 1), value = runtime.input(context, 2);
    const Tensor past_key = runtime.input(context, 3), past_value = runtime.input(context, 4);
    const Tensor last = runtime.input(context, 5), total = runtime.input(context, 6);
    const Tensor cosines = cosines_.of(runtime, context), sines = sines_.of(runtime, context);
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
    // Keys that are given and none are those of a source, which is cached already.
    shape.appends = is_packed || key.shape[1] > 0;
    runtime.require(shape.head_dim > 0 && shape.head_dim % kHeadDimMultiple == 0 && shape.head_dim <= kMost,
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
      const int64_t position = last.as<int32_t>()[row];  // -1 of a row without tokens
      runtime.require(-1 <= position && position < shape.capacity, "seqlens_k must be within the cache");
      runtime.require(position < shape.total_tokens, "seqlens_k must be within total_sequence_length");
    }

    AttentionTensors<Number> tensors{};
    if constexpr (std::is_same_v<Number, int8_t>) {
      const Tensor sinks = int8_.sinks.of(runtime, context);
      const Tensor key_scales = int8_.key_scales.of(runtime, context);
      const Tensor value_scales = int8_.value_scales.of(runtime, context);
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
    const Lender lender{&runtime, context};
    if (shape.batch > 0 && shape.new_tokens > 0) attend(lender.parallel(), shape, tensors);
  }

 private:
  static constexpr int64_t kHeadDimMultiple = 16;
  static constexpr int64_t kMost = 1 << 16;  // of heads, and of their width: 64 bits hold all that is made of both
  static constexpr int64_t kMostPositions = std::numeric_limits<int32_t>::max();

  // Inputs that only K/V in eight bits have.
  struct Int8Inputs {
    Weight sinks, key_scales, value_scales;
    Int8Inputs(const Runtime& runtime, const ort::KernelInfo* info)
        : sinks(runtime, info, 9), key_scales(runtime, info, 10), value_scales(runtime, info, 11) {}
  };
  struct NoInputs {
    NoInputs(const Runtime&, const ort::KernelInfo*) {}
  };

  // The cache that is written: the very one that was read where the caller has tied both to one place, else a copy.
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

class GroupQueryAttention : public AttentionOver<float> {
 public:
  using AttentionOver::AttentionOver;
  static constexpr char kName[] = "GroupQueryAttention";
  static constexpr Port kInputs[] = {
      {ort::kFloat}, {ort::kFloat, ort::kOptional}, {ort::kFloat, ort::kOptional},   // query, key, value
      {ort::kFloat}, {ort::kFloat},                                                  // past
      {ort::kInt32}, {ort::kInt32},                                                  // last, total
      {ort::kFloat, ort::kOptional}, {ort::kFloat, ort::kOptional}};                 // cosines, sines
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kFloat, ort::kFloat};
};

// The same over K/V in eight bits, with a scale for each channel.
class Int8CacheAttention : public AttentionOver<int8_t> {
 public:
  using AttentionOver::AttentionOver;
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
  static bool is_able() { return can_compute_rows(); }

  SwiGlu(const Runtime&, const ort::KernelInfo*) {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    const Tensor rows = runtime.input(context, 0);
    runtime.require(!rows.shape.empty() && rows.shape.back() % 2 == 0, "rows must be gate and up beside each other");
    const int64_t width = rows.shape.back() / 2, num_rows = rows.shape.num_rows();
    const Tensor output = runtime.output(context, 0, rows.shape.with_last(width));
    const Lender lender{&runtime, context};
    if (rows.shape.count()) swiglu(lender.parallel(), rows.as<float>(), num_rows, width, output.as<float>());
  }
};

// `AddRMSNorm(left, right, weight) → sum, normed` and `AddLayerNorm(left, right, weight, bias)`; see rows.h.
class AddNorm {
 public:
  static constexpr ort::ElementType kOutputs[] = {ort::kFloat, ort::kFloat};
  static bool is_able() { return can_compute_rows(); }

  AddNorm(const Runtime& runtime, const ort::KernelInfo* info)
      : epsilon_(runtime.attribute(info, "epsilon", 0.0f, std::numeric_limits<float>::max())) {}

 protected:
  // Checks the inputs and hands `norm(parallel, addition, weights, epsilon, output)` what it needs.
  template <size_t kNumWeights, typename Norm>
  void compute(const Runtime& runtime, ort::KernelContext* context, const std::array<Weight, kNumWeights>& inputs,
               Norm norm) const {
    const Tensor left = runtime.input(context, 0), right = runtime.input(context, 1);
    runtime.require(!left.shape.empty() && left.shape == right.shape, "left and right must have one shape");
    const int64_t width = left.shape.back();
    std::array<const float*, kNumWeights> weights{};
    for (size_t index = 0; index < kNumWeights; ++index) {
      const Tensor weight = inputs[index].of(runtime, context);
      runtime.require(weight.shape == Shape{width}, "weight and bias must be as long as a row");
      weights[index] = weight.as<float>();
    }
    const Tensor sums = runtime.output(context, 0, left.shape), output = runtime.output(context, 1, left.shape);
    const Lender lender{&runtime, context};
    const int64_t num_rows = left.shape.num_rows();
    const Addition addition{left.as<float>(), right.as<float>(), sums.as<float>(), num_rows, width};
    if (left.shape.count()) norm(lender.parallel(), addition, weights, epsilon_, output.as<float>());
  }

 private:
  float epsilon_;
};

class AddRmsNorm : public AddNorm {
 public:
  static constexpr char kName[] = "AddRMSNorm";
  static constexpr Port kInputs[] = {{ort::kFloat}, {ort::kFloat}, {ort::kFloat}};

  AddRmsNorm(const Runtime& runtime, const ort::KernelInfo* info)
      : AddNorm(runtime, info), weights_{Weight(runtime, info, 2)} {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    AddNorm::compute(runtime, context, weights_, [](const auto& parallel, const auto& addition, auto weights,
                                                    float epsilon, float* y) {
      add_rms_norm(parallel, addition, weights[0], epsilon, y);
    });
  }

 private:
  std::array<Weight, 1> weights_;
};

class AddLayerNorm : public AddNorm {
 public:
  static constexpr char kName[] = "AddLayerNorm";
  static constexpr Port kInputs[] = {{ort::kFloat}, {ort::kFloat}, {ort::kFloat}, {ort::kFloat}};

  AddLayerNorm(const Runtime& runtime, const ort::KernelInfo* info)
      : AddNorm(runtime, info), weights_{Weight(runtime, info, 2), Weight(runtime, info, 3)} {}

  void compute(const Runtime& runtime, ort::KernelContext* context) const {
    AddNorm::compute(runtime, context, weights_, [](const auto& parallel, const auto& addition, auto weights,
                                                    float epsilon, float* y) {
      add_layer_norm(parallel, addition, weights[0], weights[1], epsilon, y);
    });
  }

 private:
  std::array<Weight, 2> weights_;
};

// An operator as ONNX Runtime wants it: a table of functions, filled from what `Kernel` says of itself.
template <typename Kernel, bool kCopiesWeights>
const ort::CustomOp& operator_of() {
  struct Instance {
    Runtime runtime;
    Kernel kernel;
  };
  static const ort::CustomOp op = [] {
    ort::CustomOp table{};
    table.version = ort::kVersion;
    table.name = [](const ort::CustomOp*) { return Kernel::kName; };
    table.provider = [](const ort::CustomOp*) -> const char* { return nullptr; };
    table.num_inputs = [](const ort::CustomOp*) { return std::size(Kernel::kInputs); };
    table.input_type = [](const ort::CustomOp*, size_t index) { return Kernel::kInputs[index].type; };
    table.input_characteristic = [](const ort::CustomOp*, size_t index) {
      return Kernel::kInputs[index].presence;
    };
    table.num_outputs = [](const ort::CustomOp*) { return std::size(Kernel::kOutputs); };
    table.output_type = [](const ort::CustomOp*, size_t index) { return Kernel::kOutputs[index]; };
    table.output_characteristic = [](const ort::CustomOp*, size_t) { return ort::kRequired; };
    table.input_memory = [](const ort::CustomOp*, size_t) { return ort::kDefaultMemory; };
    table.variadic_input_min_arity = table.variadic_input_homogeneity = [](const ort::CustomOp*) { return 1; };
    table.variadic_output_min_arity = table.variadic_output_homogeneity = [](const ort::CustomOp*) { return 1; };
    table.start_version = table.end_version = [](const ort::CustomOp*) { return 1; };
    table.create_kernel = [](const ort::CustomOp*, void* const* api, const ort::KernelInfo* info, void** kernel) {
      const Runtime runtime(api, kCopiesWeights);
      return guarded(runtime, [&] { *kernel = new Instance{runtime, Kernel(runtime, info)}; });
    };
    table.compute = [](void* kernel, ort::KernelContext* context) {
      const auto* instance = static_cast<const Instance*>(kernel);
      return guarded(instance->runtime, [&] { instance->kernel.compute(instance->runtime, context); });
    };
    table.destroy = [](void* kernel) { delete static_cast<Instance*>(kernel); };
    return table;
  }();
  return op;
}

// Of all kernels those that this processor can run.
template <typename... Kernels>
struct Able {
  template <bool kCopiesWeights>
  static ort::Status* add(const ort::Api& api, ort::CustomOpDomain* domain) {
    ort::Status* status = nullptr;
    ((status = status || !Kernels::is_able() ? status
                                             : api.add_to_domain(domain, &operator_of<Kernels, kCopiesWeights>())),
     ...);
    return status;
  }

  // With commas between them.
  static std::string names() {
    std::string names;
    ((names += !Kernels::is_able() ? "" : (names.empty() ? "" : ",") + std::string(Kernels::kName)), ...);
    return names;
  }
};

using Operators =
    Able<Linear<false, false>, Linear<true, false>, Linear<false, true>, Linear<true, true>, Int8Linear<false, false>,
         Int8Linear<true, false>, Int8Linear<false, true>, Int8Linear<true, true>, Int4Linear<false, false>,
         Int4Linear<true, false>, Int4Linear<false, true>, Int4Linear<true, true>, GroupQueryAttention,
         Int8CacheAttention, SwiGlu, AddRmsNorm, AddLayerNorm>;

// Adds the operators to a session's options. Sessions refer to the domain for as long as they live: one for all of them,
// as long as the process.
template <bool kCopiesWeights>
ort::Status* add_domain(const ort::Api& api, ort::SessionOptions* options) {
  static ort::CustomOpDomain* domain = nullptr;
  static ort::Status* const failure = [&]() -> ort::Status* {
    if (ort::Status* status = api.create_domain(kDomain, &domain)) return status;
    return Operators::add<kCopiesWeights>(api, domain);
  }();
  if (failure) return api.create_status(ort::kFail, "the operators of domain onward cannot be registered");
  return api.add_domain(options, domain);
}

// Whether a session's options have ONNX Runtime leave weights where they are, as ours then do as well.
bool leaves_weights(const ort::Api& api, const ort::SessionOptions* options) {
  constexpr char kEntry[] = "session.disable_prepacking";
  int has_entry = 0;
  char value[2] = {};
  size_t size = sizeof value;
  ort::Status* status = api.has_config_entry(options, kEntry, &has_entry);
  if (!status && has_entry) status = api.config_entry(options, kEntry, value, &size);
  if (status) api.release(status);
  return !status && has_entry && value[0] == '1';
}

}  // namespace
}  // namespace onward

// The names of the operators that kernels compute on this processor, with commas between them: for a server's log.
extern "C" __attribute__((visibility("default"))) const char* OnwardOperators() {
  static const std::string names = onward::Operators::names();
  return names.c_str();
}

// What ONNX Runtime calls when a session's options register this library.
extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                const ort::ApiBase* base) {
  void* const* functions = base->get_api(ort::kVersion);
  if (!functions) return ort::Api{base->get_api(1)}.create_status(ort::kFail, "this ONNX Runtime is older than 1.24");
  const ort::Api api{functions};
  return onward::leaves_weights(api, options) ? onward::add_domain<false>(api, options)
                                              : onward::add_domain<true>(api, options);
}
