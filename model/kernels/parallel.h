// How kernels share work among threads: whoever calls them lends the threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace onward {

// Runs `fn(data, index)` once for each index below `count`, on however many threads there are; returns when all are
// done.
struct Parallel {
  void* context;
  void (*run)(void* context, void (*fn)(void* data, size_t index), size_t count, void* data);

  // The same for anything that can be called with an index. What fails for want of memory, the only way that kernels
  // fail, is told when all others are done: threads that are lent take no exceptions.
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

// Into how many pieces `share` cuts, at most: threads that come late or are held up find less left to do.
constexpr int64_t kPieces = 64;

// Calls `body(begin, end)` for pieces that together are all below `count`, which is not 0.
template <typename Body>
void share(const Parallel& parallel, int64_t count, const Body& body) {
  const int64_t num_pieces = std::min(kPieces, count);
  parallel(num_pieces, [=, &body](size_t index) {
    const int64_t piece = static_cast<int64_t>(index);
    body(piece * count / num_pieces, (piece + 1) * count / num_pieces);
  });
}

}  // namespace onward
