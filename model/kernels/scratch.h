// Memory that a thread keeps between calls; grows to the largest request.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace onward {

template <typename Number>
class Scratch {
 public:
  // Space for `count` numbers, aligned to a cache line; earlier contents are lost.
  Number* at_least(size_t count) {
    if (count > size_) {
      constexpr size_t kLine = 64;
      memory_.reset();
      size_ = 0;
      size_t bytes = 0;
      if (__builtin_mul_overflow(count, sizeof(Number), &bytes) || __builtin_add_overflow(bytes, kLine - 1, &bytes))
        throw std::bad_alloc();
      memory_.reset(static_cast<Number*>(std::aligned_alloc(kLine, bytes / kLine * kLine)));
      if (!memory_) throw std::bad_alloc();
      size_ = count;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(Number* memory) const { std::free(memory); }
  };
  std::unique_ptr<Number[], Free> memory_;
  size_t size_ = 0;
};

}  // namespace onward
