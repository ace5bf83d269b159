// How kernels share work among threads: whoever calls them lends the threads.
#pragma once

#include <cstddef>

namespace onward {

// Runs `fn(data, index)` once for each index below `count`, on however many threads there are; returns when all are done.
struct Parallel {
  void* context;
  void (*run)(void* context, void (*fn)(void* data, size_t index), size_t count, void* data);

  // The same for anything that can be called with an index.
  template <typename Body>
  void operator()(size_t count, Body body) const {
    if (count == 1) return body(size_t{0});
    run(context, [](void* data, size_t index) { (*static_cast<Body*>(data))(index); }, count, &body);
  }
};

}  // namespace onward
