// Registers of sixteen numbers. For files that are compiled for AVX-512.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace onward {

constexpr int64_t kLanes = 16;

// The mask of the first `count` lanes.
inline __mmask16 first_lanes(int64_t count) {
  return count >= kLanes ? 0xFFFF : static_cast<__mmask16>((1u << count) - 1);
}

}  // namespace onward
