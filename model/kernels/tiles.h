// Products of bytes, and of bfloat16, in the tile registers of AMX. Runs only where `has_tiles` returns true.
#pragma once

#include <cstdint>

namespace onward {

// Whether this process may use tile registers. The first call asks Linux to permit them, which makes signal frames
// larger, and tries them with a handler of its own for SIGILL: some virtual machines announce what they do not have.
bool has_tiles();

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileColumns = 16;

// The thread's tile registers, configured while this lives: 0 to 3 for sums `[16][16]` int32, 4 and 5 for rows
// `[16][depth]`, 6 and 7 for weights `[depth / 4][16][4]` int8. With a depth of 64 bytes, all are alike: rows of bfloat16
// are `[16][32]`, what they are multiplied by is `[16][16][2]`, sums are float.
template <int depth>
class Tiles {
 public:
  Tiles() { asm volatile("ldtilecfg %0" ::"m"(kConfiguration)); }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  template <int tile>
  void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
  }

  // `pitch` is the distance of rows in bytes.
  template <int tile>
  void load(const void* bytes, int64_t pitch) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(bytes), "r"(pitch), "i"(tile) : "memory");
  }

  template <int tile>
  void store(void* sums, int64_t pitch) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(sums), "r"(pitch), "i"(tile) : "memory");
  }

  // Adds rows of unsigned bytes times weights.
  template <int sums, int rows, int weights>
  void add_unsigned() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(weights));
  }

  // Adds rows of signed bytes times weights.
  template <int sums, int rows, int weights>
  void add_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(weights));
  }

  // Adds rows of bfloat16 times columns to sums of floats: for each sum, the products of even places and of odd ones
  // are added up in order, then the two.
  template <int sums, int rows, int columns>
  void add_floats() {
    static_assert(depth == 64);
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(columns));
  }

 private:
  struct Configuration {
    uint8_t palette = 1;
    uint8_t start = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, depth, depth, 64, 64};
    uint8_t num_rows[16] = {16, 16, 16, 16, 16, 16, depth / 4, depth / 4};
  };
  static_assert(sizeof(Configuration) == 64);
  static constexpr Configuration kConfiguration{};
};

}  // namespace onward
