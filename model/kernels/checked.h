// Sizes that an artifact decides, multiplied in 64 bits: a product that does not fit throws, it never wraps.
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
