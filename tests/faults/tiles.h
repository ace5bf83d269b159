// A double of the kernels' tiles.h in plain C++: for processors with VNNI that lack AMX, and for sanitizers, which see no
// access of its instructions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace onward {

// Registers belong to one thread: what ThreadSanitizer would see of them costs most of its time.
#ifdef __SANITIZE_THREAD__
#define ONWARD_REGISTERS __attribute__((no_sanitize("thread")))
#else
#define ONWARD_REGISTERS
#endif

inline bool has_tiles() { return true; }

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileColumns = 16;

template <int depth>
class Tiles {
 public:
  template <int tile>
  void clear() {
    std::memset(tiles_[tile], 0, sizeof tiles_[tile]);
  }

  template <int tile>
  void load(const void* bytes, int64_t pitch) {
    constexpr int rows = tile < 6 ? 16 : depth / 4, width = tile < 4 || tile > 5 ? 64 : depth;
    for (int row = 0; row < rows; ++row)
      std::memcpy(tiles_[tile][row], static_cast<const uint8_t*>(bytes) + row * pitch, width);
  }

  template <int tile>
  void store(void* sums, int64_t pitch) const {
    static_assert(tile < 4);
    for (int row = 0; row < 16; ++row)
      std::memcpy(static_cast<uint8_t*>(sums) + row * pitch, tiles_[tile][row], 64);
  }

  template <int sums, int rows, int weights>
  void add_unsigned() {
    add<sums, rows, weights, uint8_t>();
  }

  template <int sums, int rows, int weights>
  void add_signed() {
    add<sums, rows, weights, int8_t>();
  }

  template <int sums, int rows, int columns>
  ONWARD_REGISTERS void add_floats() {
    static_assert(depth == 64 && sums < 4 && rows >= 4 && columns >= 4);
    float left[16][32], right[32][16];
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < 32; ++k) left[row][k] = half(rows, row, k);
    for (int k = 0; k < 32; ++k)
      for (int column = 0; column < 16; ++column) right[k][column] = half(columns, k / 2, 2 * column + k % 2);
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 16; ++column) {
        float even = 0.0f, odd = 0.0f, sum;
        for (int k = 0; k < 32; k += 2) {
          even = std::fma(left[row][k], right[k][column], even);
          odd = std::fma(left[row][k + 1], right[k + 1][column], odd);
        }
        std::memcpy(&sum, &tiles_[sums][row][4 * column], sizeof sum);
        sum += even + odd;
        std::memcpy(&tiles_[sums][row][4 * column], &sum, sizeof sum);
      }
    }
  }

 private:
  ONWARD_REGISTERS float half(int tile, int row, int place) const {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<uint8_t*>(&bits) + 2, &tiles_[tile][row][2 * place], 2);
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  }

  template <int sums, int rows, int weights, typename Byte>
  ONWARD_REGISTERS void add() {
    static_assert(sums < 4 && (rows == 4 || rows == 5) && weights >= 6);
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 16; ++column) {
        int32_t sum;
        std::memcpy(&sum, &tiles_[sums][row][4 * column], sizeof sum);
        for (int k = 0; k < depth; ++k)
          sum += static_cast<Byte>(tiles_[rows][row][k]) *
                 static_cast<int8_t>(tiles_[weights][k / 4][4 * column + k % 4]);
        std::memcpy(&tiles_[sums][row][4 * column], &sum, sizeof sum);
      }
    }
  }

  uint8_t tiles_[8][16][64] = {};
};

}  // namespace onward
