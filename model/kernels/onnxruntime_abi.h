// The part of ONNX Runtime's C interface that custom operators need, declared here because its wheels have no header.
//
// ONNX Runtime only ever appends to its table of functions, so a function is identified by its place: places, signatures
// and the order of `CustomOp`'s members are those of interface version 24 (ONNX Runtime 1.24 and newer).
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

constexpr uint32_t kVersion = 24;

// Opaque.
struct Status;
struct Value;
struct KernelInfo;
struct KernelContext;
struct ShapeInferContext;
struct SessionOptions;
struct CustomOpDomain;
struct CustomOp;

enum ErrorCode : int { kFail = 1, kInvalidArgument = 2 };
enum ElementType : int { kFloat = 1, kUint8 = 2, kInt8 = 3, kInt32 = 6, kInt64 = 7, kFloat16 = 10, kBfloat16 = 16 };
enum Characteristic : int { kRequired = 0, kOptional = 1 };
enum MemoryType : int { kDefaultMemory = 0 };

// The table's functions by place; a `Status` other than null is an error, which the caller must release.
struct Api {
  void* const* functions;

  template <size_t place, typename Function>
  Function* at() const {
    return reinterpret_cast<Function*>(functions[place]);
  }

  Status* create_status(ErrorCode code, const char* message) const {
    return at<0, Status*(ErrorCode, const char*)>()(code, message);
  }
  Status* create_domain(const char* name, CustomOpDomain** domain) const {
    return at<26, Status*(const char*, CustomOpDomain**)>()(name, domain);
  }
  Status* add_to_domain(CustomOpDomain* domain, const CustomOp* op) const {
    return at<27, Status*(CustomOpDomain*, const CustomOp*)>()(domain, op);
  }
  Status* add_domain(SessionOptions* options, CustomOpDomain* domain) const {
    return at<28, Status*(SessionOptions*, CustomOpDomain*)>()(options, domain);
  }
  Status* data(Value* value, void** data) const { return at<51, Status*(Value*, void**)>()(value, data); }
  Status* attribute(const KernelInfo* info, const char* name, float* value) const {
    return at<85, Status*(const KernelInfo*, const char*, float*)>()(info, name, value);
  }
  Status* attribute(const KernelInfo* info, const char* name, int64_t* value) const {
    return at<86, Status*(const KernelInfo*, const char*, int64_t*)>()(info, name, value);
  }
  Status* input(const KernelContext* context, size_t index, const Value** value) const {
    return at<90, Status*(const KernelContext*, size_t, const Value**)>()(context, index, value);
  }
  Status* output(KernelContext* context, size_t index, const int64_t* dimensions, size_t rank, Value** value) const {
    return at<91, Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>()(context, index, dimensions, rank,
                                                                                      value);
  }
  void release(Status* status) const { at<93, void(Status*)>()(status); }
  Status* has_config_entry(const SessionOptions* options, const char* key, int* has_entry) const {
    return at<237, Status*(const SessionOptions*, const char*, int*)>()(options, key, has_entry);
  }
  Status* config_entry(const SessionOptions* options, const char* key, char* value, size_t* size) const {
    return at<238, Status*(const SessionOptions*, const char*, char*, size_t*)>()(options, key, value, size);
  }
  Status* constant_input(const KernelInfo* info, size_t index, int* is_constant, const Value** value) const {
    return at<249, Status*(const KernelInfo*, size_t, int*, const Value**)>()(info, index, is_constant, value);
  }
  Status* parallel_for(const KernelContext* context, void (*fn)(void*, size_t), size_t count, void* data) const {
    constexpr size_t kEachByItself = 0;
    return at<274, Status*(const KernelContext*, void (*)(void*, size_t), size_t, size_t, void*)>()(
        context, fn, count, kEachByItself, data);
  }
  // `dimensions` belong to the value, and are null if it has none.
  Status* type_and_shape(const Value* value, ElementType* type, const int64_t** dimensions, size_t* rank) const {
    return at<414, Status*(const Value*, ElementType*, const int64_t**, size_t*)>()(value, type, dimensions, rank);
  }
};

struct ApiBase {
  void* const* (*get_api)(uint32_t version);
  const char* (*get_version)();
};

// An operator's table of functions. ONNX Runtime calls members by their place: none may be missing.
struct CustomOp {
  uint32_t version;
  void* (*create_kernel_v1)(const CustomOp*, void* const* api, const KernelInfo*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  ElementType (*input_type)(const CustomOp*, size_t index);
  size_t (*num_inputs)(const CustomOp*);
  ElementType (*output_type)(const CustomOp*, size_t index);
  size_t (*num_outputs)(const CustomOp*);
  void (*compute_v1)(void* kernel, KernelContext*);
  void (*destroy)(void* kernel);
  Characteristic (*input_characteristic)(const CustomOp*, size_t index);
  Characteristic (*output_characteristic)(const CustomOp*, size_t index);
  MemoryType (*input_memory)(const CustomOp*, size_t index);
  int (*variadic_input_min_arity)(const CustomOp*);
  int (*variadic_input_homogeneity)(const CustomOp*);
  int (*variadic_output_min_arity)(const CustomOp*);
  int (*variadic_output_homogeneity)(const CustomOp*);
  Status* (*create_kernel)(const CustomOp*, void* const* api, const KernelInfo*, void** kernel);
  Status* (*compute)(void* kernel, KernelContext*);
  Status* (*infer_shapes)(const CustomOp*, ShapeInferContext*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
  size_t (*may_be_in_place)(int** inputs, int** outputs);
  void (*release_may_be_in_place)(int* inputs, int* outputs);
  size_t (*aliases)(int** inputs, int** outputs);
  void (*release_aliases)(int* inputs, int* outputs);
};

}  // namespace ort
