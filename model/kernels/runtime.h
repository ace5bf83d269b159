// ONNX Runtime's C interface for our operators: shapes, tensors, attributes and weights, with errors as exceptions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <type_traits>

#include "checked.h"
#include "onnxruntime_abi.h"
#include "parallel.h"
#include "resident.h"

namespace onward {

// An ONNX Runtime status as an exception; `guarded` returns the status.
struct StatusError : std::exception {
  explicit StatusError(ort::Status* status) : status(status) {}
  ort::Status* status;
};

// Dimensions of a tensor. Allocates nothing: a step of one row runs about a hundred operators with ten tensors each.
class Shape {
 public:
  static constexpr size_t kMaxDimensions = 8;

  Shape() = default;
  Shape(std::initializer_list<int64_t> dimensions) : Shape(dimensions.begin(), dimensions.size()) {}

  // `rank` is at most kMaxDimensions.
  Shape(const int64_t* dimensions, size_t rank) : rank_(rank) { std::copy_n(dimensions, rank, dimensions_.begin()); }

  const int64_t* data() const { return dimensions_.data(); }
  size_t size() const { return rank_; }
  bool empty() const { return rank_ == 0; }
  int64_t operator[](size_t index) const { return dimensions_[index]; }

  // The last dimension. Requires at least one, as `num_rows` and `with_last` do.
  int64_t back() const { return dimensions_[rank_ - 1]; }

  bool operator==(const Shape& other) const {
    return std::equal(data(), data() + rank_, other.data(), other.data() + other.rank_);
  }
  bool operator!=(const Shape& other) const { return !(*this == other); }

  // The number of elements, and of rows along the last dimension. Both throw if the product exceeds 64 bits, which a
  // dimension of zero beside large ones allows.
  int64_t count() const { return leading(rank_); }
  int64_t num_rows() const { return leading(rank_ - 1); }

  // With one dimension more. Throws if there are too many.
  Shape with_appended(int64_t last) const {
    if (rank_ == kMaxDimensions) throw std::length_error("tensors must have 8 dimensions at most");
    Shape shape = *this;
    shape.dimensions_[shape.rank_++] = last;
    return shape;
  }

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

  std::array<int64_t, kMaxDimensions> dimensions_{};
  size_t rank_ = 0;
};

struct Tensor {
  void* data = nullptr;
  Shape shape;

  template <typename Number>
  Number* as() const {
    return static_cast<Number*>(data);
  }

  // An optional input that a node omits. An empty tensor has dimensions.
  bool is_absent() const { return !data && shape.empty(); }
};

// Bytes of an element of the types that ports have.
constexpr size_t num_bytes(ort::ElementType type) {
  switch (type) {
    case ort::kUint8:
    case ort::kInt8:
      return 1;
    case ort::kFloat16:
    case ort::kBfloat16:
      return 2;
    case ort::kInt64:
      return 8;
    default:
      return 4;
  }
}

// ONNX Runtime's functions; a status other than success is thrown as `StatusError`.
class Runtime {
 public:
  Runtime(void* const* functions, bool copies_weights) : api_{functions}, copies_weights_(copies_weights) {}

  void require(bool is_valid, const char* message) const {
    if (!is_valid) throw StatusError(api_.create_status(ort::kInvalidArgument, message));
  }

  // An attribute in [`min`, `max`]; NaN is outside any bounds.
  template <typename Number>
  Number attribute(const ort::KernelInfo* info, const char* name, Number min, Number max) const {
    Number value{};
    check(api_.attribute(info, name, &value));
    if (!(min <= value && value <= max)) {
      std::ostringstream message;
      message << name << " is " << value << ", must be from " << min << " to " << max;
      require(false, message.str().c_str());
    }
    return value;
  }

  // A constant input (an initializer), valid for the kernel's lifetime; without data if it is computed or absent.
  Tensor constant(const ort::KernelInfo* info, size_t index) const {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    check(api_.constant_input(info, index, &is_constant, &value));
    return is_constant && value ? read(value) : Tensor{};
  }

  // A copy of a constant input in huge pages; null if weights stay in the file, or the input is not constant or small.
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
    product(tensor.shape[0], pitch);  // may overflow where the tensor's own size does not
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
  static constexpr int64_t kMinResidentBytes = 1 << 16;

  void check(ort::Status* status) const {
    if (status) throw StatusError(status);
  }

  // A constant input that should be copied; without data otherwise.
  Tensor copied(const ort::KernelInfo* info, size_t index, size_t num_bytes) const {
    const Tensor tensor = copies_weights_ ? constant(info, index) : Tensor{};
    return tensor.data && product(tensor.shape.count(), num_bytes) >= kMinResidentBytes ? tensor : Tensor{};
  }

  Tensor read(const ort::Value* value) const {
    Tensor tensor;
    ort::ElementType type{};
    const int64_t* dimensions = nullptr;
    size_t rank = 0;
    check(api_.type_and_shape(value, &type, &dimensions, &rank));
    static_assert(Shape::kMaxDimensions == 8);
    require(rank <= Shape::kMaxDimensions, "tensors must have 8 dimensions at most");
    tensor.shape = Shape(dimensions, rank);
    // Inputs are not written, except a cache whose buffer the caller also bound as an output.
    check(api_.data(const_cast<ort::Value*>(value), &tensor.data));
    // Weights in a mapped file may have any offset.
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    require(address % num_bytes(type) == 0, "tensors must be aligned to their numbers");
    return tensor;
  }

  ort::Api api_;
  bool copies_weights_;
};

// The session's threads, for the run that `context` belongs to.
struct SessionThreads {
  const Runtime* runtime;
  const ort::KernelContext* context;

  Parallel parallel() const {
    return {const_cast<SessionThreads*>(this), [](void* threads, void (*fn)(void*, size_t), size_t count, void* data) {
              const auto* self = static_cast<const SessionThreads*>(threads);
              self->runtime->parallel_for(self->context, fn, count, data);
            }};
  }
};

// Calls `body` and returns its exception as a status: ONNX Runtime accepts no exceptions.
template <typename Body>
ort::Status* guarded(const Runtime& runtime, Body body) {
  try {
    body();
    return nullptr;
  } catch (const StatusError& error) {
    return error.status;
  } catch (const std::bad_alloc&) {
    return runtime.status("out of memory");
  } catch (const std::exception& error) {
    return runtime.status(error.what());
  }
}

// An operator's input: its type, and whether it is optional. Outputs are all required.
struct Port {
  ort::ElementType type = ort::kFloat;
  ort::Characteristic presence = ort::kRequired;
};

// An input that is usually constant: read once if it is, else in each run.
class Weight {
 public:
  Weight(const Runtime& runtime, const ort::KernelInfo* info, size_t index)
      : index_(index), constant_(runtime.constant(info, index)) {}

  Tensor get(const Runtime& runtime, const ort::KernelContext* context) const {
    return constant_.data ? constant_ : runtime.input(context, index_);
  }

 private:
  size_t index_;
  Tensor constant_;
};

// The numbers of a constant input: its copy's if there is one.
template <typename Number>
const Number* numbers(const std::shared_ptr<const void>& resident, const Tensor& constant) {
  return resident ? static_cast<const Number*>(resident.get()) : constant.as<Number>();
}

// The bias of a product, an optional input; null if `kHasBias` is false.
template <bool kHasBias>
class Bias {
 public:
  Bias(const Runtime& runtime, const ort::KernelInfo* info, size_t index) : weight_(runtime, info, index) {}

  // `[N]`
  const float* get(const Runtime& runtime, const ort::KernelContext* context, int64_t num_columns) const {
    if constexpr (!kHasBias) return nullptr;
    const Tensor bias = weight_.get(runtime, context);
    runtime.require(bias.shape == Shape{num_columns}, "bias must be as long as the matrix has columns");
    return bias.as<float>();
  }

 private:
  Weight weight_;
};

}  // namespace onward
