// Registers the kernels as custom operators of ONNX Runtime, in the domain `onward`.
//
// Each operator has a function body of standard operators in every graph that uses it, which ONNX Runtime runs without
// this library. So an operator is registered only if the processor supports its kernel.

#include <string>

#include "onnxruntime_abi.h"
#include "operators.h"
#include "runtime.h"
#include "tiles.h"

namespace onward {
namespace {

constexpr char kDomain[] = "onward";

// ONNX Runtime's table of functions for the operator `Kernel`.
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

// Those kernels that this processor supports.
template <typename... Kernels>
struct Supported {
  template <bool kCopiesWeights>
  static ort::Status* add(const ort::Api& api, ort::CustomOpDomain* domain) {
    ort::Status* status = nullptr;
    ((status = status || !Kernels::is_supported() ? status
                                             : api.add_to_domain(domain, &operator_of<Kernels, kCopiesWeights>())),
     ...);
    return status;
  }

  // Comma-separated.
  static std::string names() {
    std::string names;
    ((names += !Kernels::is_supported() ? "" : (names.empty() ? "" : ",") + std::string(Kernels::kName)), ...);
    return names;
  }
};

using Operators =
    Supported<Linear<float, false, false>, Linear<float, true, false>, Linear<float, false, true>,
              Linear<float, true, true>, Linear<Bfloat16, false, false>, Linear<Bfloat16, true, false>,
              Linear<Bfloat16, false, true>, Linear<Bfloat16, true, true>,
              Int8Linear<false, Activation::kNone>, Int8Linear<true, Activation::kNone>,
              Int8Linear<false, Activation::kGelu>, Int8Linear<true, Activation::kGelu>,
              Int8Linear<false, Activation::kSwiGlu>, Int8Linear<true, Activation::kSwiGlu>,
              Int4Linear<false, Activation::kNone>, Int4Linear<true, Activation::kNone>,
              Int4Linear<false, Activation::kGelu>, Int4Linear<true, Activation::kGelu>,
              Int4Linear<false, Activation::kSwiGlu>, Int4Linear<true, Activation::kSwiGlu>,
              Gather<float>, Gather<Bfloat16>, Int8Gather, Int4Gather, GroupQueryAttention, Int8CacheAttention, SwiGlu, AddNorm<false>, AddNorm<true>>;

// Adds the operators to a session's options. Sessions keep a pointer to the domain, so all share one that is never
// freed.
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

// Whether a session's options disable prepacking: then our operators copy no weights, either.
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

// The operators that this processor supports, comma-separated: for the server's log.
extern "C" __attribute__((visibility("default"))) const char* OnwardOperators() {
  static const std::string names = onward::Operators::names();
  return names.c_str();
}

// Whether int8 and int4 products of many rows use AMX: for the server's log.
extern "C" __attribute__((visibility("default"))) int OnwardHasTiles() {
  return onward::can_multiply() && onward::has_tiles();
}

// ONNX Runtime calls this when a session's options register the library.
extern "C" __attribute__((visibility("default"))) ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                                                const ort::ApiBase* base) {
  void* const* functions = base->get_api(ort::kVersion);
  if (!functions) return ort::Api{base->get_api(1)}.create_status(ort::kFail, "this ONNX Runtime is older than 1.24");
  const ort::Api api{functions};
  onward::has_tiles();  // asked here, not by the first product
  return onward::leaves_weights(api, options) ? onward::add_domain<false>(api, options)
                                              : onward::add_domain<true>(api, options);
}
