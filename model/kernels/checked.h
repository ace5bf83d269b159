// Products of sizes from an artifact: throw instead of overflowing 64 bits.
#pragma once

#include <cstdint>
#include <stdexcept>

namespace onward {

inline int64_t product(int64_t left, int64_t right) {
  int64_t result = 0;
  if (__builtin_mul_overflow(left, right, &result)) throw std::overflow_error("dimensions multiply past 64 bits");
  return result;
}

}  // namespace onward
