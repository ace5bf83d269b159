// Parallel loops of kernels on threads that the caller provides.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace onward {

// Runs `fn(data, index)` once for each index below `count`, on any number of threads; returns when all are done.
struct Parallel {
  void* context;
  void (*run)(void* context, void (*fn)(void* data, size_t index), size_t count, void* data);

  // The same for any callable of an index. Throws `std::bad_alloc`, a kernel's only failure, after all calls have
  // ended: the caller's threads accept no exceptions.
  template <typename Body>
  void operator()(size_t count, Body body) const {
    if (count == 1) return body(size_t{0});
    struct Call {
      Body& body;
      std::atomic<bool> has_failed{false};
    } call{body};
    run(
        context,
        [](void* data, size_t index) {
          auto* call = static_cast<Call*>(data);
          try {
            call->body(index);
          } catch (const std::bad_alloc&) {
            call->has_failed = true;
          }
        },
        count, &call);
    if (call.has_failed) throw std::bad_alloc();
  }
};

// The most tasks that `share` makes: more than threads, so that a late or slow thread takes fewer.
constexpr int64_t kMaxTasks = 64;

// Calls `body(begin, end)` for ranges that together cover [0, `count`); `count` is not 0.
template <typename Body>
void share(const Parallel& parallel, int64_t count, const Body& body) {
  const int64_t num_tasks = std::min(kMaxTasks, count);
  parallel(num_tasks, [=, &body](size_t index) {
    const int64_t task = static_cast<int64_t>(index);
    body(task * count / num_tasks, (task + 1) * count / num_tasks);
  });
}

}  // namespace onward
