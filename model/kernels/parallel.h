// How kernels share work among threads: whoever calls them lends the threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace onward {

// Runs `fn(data, index)` once for each index below `count`, on however many threads there are; returns when all are
// done.
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

// Into how many pieces `share` cuts, at most: threads that come late or are held up find less left to do.
constexpr int64_t kPieces = 16;

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
