#include "linear.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "scratch.h"
#include "tiles.h"

namespace onward {

bool can_multiply() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

}  // namespace onward

// All above runs on any processor, all below only where it returns true.
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")

#include "lanes.h"
#include "panels.h"
#include "rounding.h"

namespace onward {
namespace {

constexpr int64_t kVectorRows = 8;  // with two registers of columns: sixteen sums hide the latency of one addition
constexpr int64_t kRowsBetween = 4;  // that vectors write between products of tiles
constexpr int64_t kLine = 64;       // bytes of a cache line
constexpr int kTileBytes = 64;      // of a row in a tile register
constexpr int64_t kBlockRows = 2 * kTileRows;
constexpr int64_t kGatedRows = 8 * kBlockRows;  // so many rows' gates stay in the L2 cache
constexpr int64_t kAhead = 64;  // prefetch distance of vectors, in groups of rows: into the next panel, too
constexpr int64_t kMinTileRows = 8;  // fewer are multiplied faster by vectors

// Bytes of a quantized row, in whole groups. Bytes past the row meet weights of zero.
int64_t padded(int64_t width) { return (width + kGroupRows - 1) / kGroupRows * kGroupRows; }

// A panel's sums over the first `depth` bytes of each row; `depth` is 0 for none.
struct Begun {
  int64_t depth;
  const int32_t (*sums)[kPanelColumns];
};

constexpr int64_t kPanelPitch = kPanelColumns * kGroupRows;  // bytes of a group of rows

const int8_t* panel_weights(const Int8Matrix& matrix, int64_t panel) {
  return matrix.panels + panel * kPanelColumns * padded(matrix.num_rows);
}

// The results of a panel for `num_rows` quantized rows, of which sums may have begun; rows of output are `pitch` apart.
// With the results of its gates, `[num_rows, kPanelColumns]`, the panel is ups, and the results are theirs together.
template <int num_rows>
void multiply_vectors(const uint8_t* rows, const float* row_scales, const Int8Matrix& matrix, int64_t panel,
                      const float* gates, float* output, int64_t pitch, const Begun& begun) {
  const int64_t width = padded(matrix.num_rows);
  __m512i sums[num_rows][2];
  for (int row = 0; row < num_rows; ++row) {
    for (int half = 0; half < 2; ++half)
      sums[row][half] =
          begun.depth ? _mm512_load_si512(begun.sums[row] + half * kLanes) : _mm512_setzero_si512();
  }
  const int8_t* weights = panel_weights(matrix, panel) + begun.depth * kPanelColumns;
  for (int64_t k = begun.depth; k < width; k += kGroupRows, weights += kPanelPitch) {
    _mm_prefetch(weights + kAhead * kPanelPitch, _MM_HINT_T0);
    _mm_prefetch(weights + kAhead * kPanelPitch + kLine, _MM_HINT_T0);
    const __m512i lefts = _mm512_loadu_si512(weights), rights = _mm512_loadu_si512(weights + kLine);
    for (int row = 0; row < num_rows; ++row) {
      int32_t group;
      std::memcpy(&group, rows + row * width + k, sizeof group);
      const __m512i bytes = _mm512_set1_epi32(group);
      sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], bytes, lefts);
      sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], bytes, rights);
    }
  }
  __mmask16 mask[2];
  __m512 scales[2], bias[2];
  __m512i offsets[2];
  for (int half = 0; half < 2; ++half) {
    const int64_t column = panel * kPanelColumns + half * kLanes;
    mask[half] = first_lanes(std::max<int64_t>(matrix.num_columns - column, 0));
    scales[half] = _mm512_maskz_loadu_ps(mask[half], matrix.scales + column);
    offsets[half] = _mm512_maskz_loadu_epi32(mask[half], matrix.offsets + column);
    bias[half] = matrix.bias ? _mm512_maskz_loadu_ps(mask[half], matrix.bias + column) : _mm512_setzero_ps();
  }
  for (int row = 0; row < num_rows; ++row, output += pitch) {
    __m512 y[2];
    for (int half = 0; half < 2; ++half) {
      const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(sums[row][half], offsets[half]));
      y[half] = _mm512_mul_ps(_mm512_mul_ps(exact, scales[half]), _mm512_set1_ps(row_scales[row]));
      if (matrix.bias) y[half] = _mm512_add_ps(y[half], bias[half]);
      if (matrix.activation == Activation::kGelu) y[half] = gelu(y[half]);
    }
    for (int half = 0; half < 2; ++half) {
      if (gates) y[half] = swiglu(_mm512_loadu_ps(gates + row * kPanelColumns + half * kLanes), y[half]);
      _mm512_mask_storeu_ps(output + half * kLanes, mask[half], y[half]);
    }
  }
}

using Vectors = decltype(&multiply_vectors<1>);
constexpr Vectors kVectors[kVectorRows] = {multiply_vectors<1>, multiply_vectors<2>, multiply_vectors<3>,
                                           multiply_vectors<4>, multiply_vectors<5>, multiply_vectors<6>,
                                           multiply_vectors<7>, multiply_vectors<8>};

// Writes the sums of `num_tiles` tiles of rows over the first `depth` bytes, whole tiles. Calls `between(k)` once for
// each, from byte k on.
template <int num_tiles, typename Between>
void add_tiles(Tiles<kTileBytes>& tiles, const uint8_t* rows, int64_t width, const int8_t* weights, int64_t depth,
               int32_t (*sums)[kPanelColumns], const Between& between) {
  constexpr int64_t kSumPitch = kPanelColumns * sizeof(int32_t);
  tiles.clear<0>();
  tiles.clear<1>();
  if (num_tiles > 1) {
    tiles.clear<2>();
    tiles.clear<3>();
  }
  for (int64_t k = 0; k < depth; k += kTileBytes) {
    tiles.load<6>(weights + k * kPanelColumns, kPanelPitch);
    tiles.load<4>(rows + k, width);
    tiles.add_unsigned<0, 4, 6>();
    tiles.load<7>(weights + k * kPanelColumns + kLine, kPanelPitch);
    tiles.add_unsigned<1, 4, 7>();
    if (num_tiles > 1) {
      tiles.load<5>(rows + kTileRows * width + k, width);
      tiles.add_unsigned<2, 5, 6>();
      tiles.add_unsigned<3, 5, 7>();
    }
    between(k);
  }
  tiles.store<0>(sums[0], kSumPitch);
  tiles.store<1>(sums[0] + kTileColumns, kSumPitch);
  if (num_tiles > 1) {
    tiles.store<2>(sums[kTileRows], kSumPitch);
    tiles.store<3>(sums[kTileRows] + kTileColumns, kSumPitch);
  }
}

// One task's products in tiles. While the tiles of a block of rows are multiplied, vectors turn the sums of the block
// before into results; where a panel has one block, that is the panel before's.
class TileProducts {
 public:
  explicit TileProducts(const Int8Matrix& matrix)
      : matrix_(matrix), width_(padded(matrix.num_rows)), depth_(width_ / kTileBytes * kTileBytes) {}
  TileProducts(const TileProducts&) = delete;
  TileProducts& operator=(const TileProducts&) = delete;
  ~TileProducts() { write_all(); }

  // The results of a panel, or of a panel of gates and its ups, for `count` quantized rows. Those of the last block are
  // written by the next call or when this ends: until then, its rows and their scales are read. Returns how many rows it
  // takes: too few are left for tiles. Memory past them is read, up to whole tiles.
  int64_t multiply(const uint8_t* rows, const float* row_scales, int64_t panel, int64_t count, float* output,
                   int64_t pitch) {
    if (matrix_.activation != Activation::kSwiGlu)
      return multiply_panel(rows, row_scales, panel, nullptr, count, output, pitch);
    const int64_t num_gates = matrix_.num_columns / 2 / kPanelColumns;
    int64_t taken = 0;
    for (int64_t row = 0; row < count; row += kGatedRows) {
      const int64_t size = std::min(kGatedRows, count - row);
      multiply_panel(rows + row * width_, row_scales + row, panel, nullptr, size, gates_[0], kPanelColumns);
      taken += multiply_panel(rows + row * width_, row_scales + row, num_gates + panel, gates_[0], size,
                              output + row * pitch, pitch);
    }
    return taken;
  }

 private:
  // What vectors need for a block's results.
  struct Block {
    const uint8_t* rows;
    const float* row_scales;
    int64_t panel;
    const float* gates;
    float* output;
    int64_t pitch;
  };

  int64_t multiply_panel(const uint8_t* rows, const float* row_scales, int64_t panel, const float* gates, int64_t count,
                         float* output, int64_t pitch) {
    const int64_t num_blocks = (count + kBlockRows - 1) / kBlockRows, fetched = kTileBytes * kPanelColumns / num_blocks;
    const int64_t pause = depth_ / (kBlockRows / kRowsBetween) / kTileBytes * kTileBytes;  // between vectors
    const int64_t size = width_ * kPanelColumns;
    const int8_t *const weights = panel_weights(matrix_, panel), *const end = weights + 2 * size, *ahead = weights + size;
    int64_t row = 0;
    for (; count - row >= kMinTileRows; row += kBlockRows) {
      int64_t next = pause - kTileBytes;
      const auto between = [&](int64_t k) {
        // The next panel, in order, so that the hardware prefetcher runs ahead: it alone has enough lines on their way.
        for (const int8_t* const until = std::min(ahead + fetched, end); ahead < until; ahead += kLine)
          _mm_prefetch(ahead, _MM_HINT_T1);
        if (k < next) return;
        write_some();
        next += pause;
      };
      auto* const block = sums_[place_ ^ 1];
      if (count - row > kTileRows) {
        add_tiles<2>(tiles_, rows + row * width_, width_, weights, depth_, block, between);
      } else {
        add_tiles<1>(tiles_, rows + row * width_, width_, weights, depth_, block, between);
      }
      write_all();
      place_ ^= 1;
      written_ = 0;
      size_ = std::min(kBlockRows, count - row);
      block_ = {rows + row * width_, row_scales + row, panel, gates ? gates + row * kPanelColumns : nullptr,
                output + row * pitch, pitch};
    }
    return std::min(row, count);
  }

  void write_some() {
    if (written_ == size_) return;
    const int64_t count = std::min(kRowsBetween, size_ - written_);
    const float* gates = block_.gates ? block_.gates + written_ * kPanelColumns : nullptr;
    kVectors[count - 1](block_.rows + written_ * width_, block_.row_scales + written_, matrix_, block_.panel, gates,
                        block_.output + written_ * block_.pitch, block_.pitch, {depth_, sums_[place_] + written_});
    written_ += count;
  }

  void write_all() {
    while (written_ < size_) write_some();
  }

  const Int8Matrix& matrix_;
  const int64_t width_, depth_;
  Tiles<kTileBytes> tiles_;
  alignas(64) int32_t sums_[2][kBlockRows][kPanelColumns];
  int place_ = 0;  // of the sums of `block_`, of whose `size_` rows `written_` are results
  int64_t size_ = 0, written_ = 0;
  Block block_{};
  alignas(64) float gates_[kGatedRows][kPanelColumns];
};

}  // namespace

bool ends_in_zeros(const Int8Matrix& matrix) {
  const int64_t height = padded(matrix.num_rows), rest = matrix.num_rows % kGroupRows;
  const int64_t num_panels = (matrix.num_columns + kPanelColumns - 1) / kPanelColumns;
  for (int64_t panel = 0; rest && panel < num_panels; ++panel) {
    const int8_t* group = matrix.panels + ((panel + 1) * height - kGroupRows) * kPanelColumns;
    for (int64_t i = 0; i < kPanelColumns * kGroupRows; ++i) {
      if (i % kGroupRows >= rest && group[i]) return false;
    }
  }
  return true;
}

void sum_columns(const Int8Matrix& matrix, int32_t zero, int32_t* offsets) {
  const int64_t height = padded(matrix.num_rows);
  for (int64_t column = 0; column < matrix.num_columns; ++column) {
    const int8_t* panel = matrix.panels + column / kPanelColumns * kPanelColumns * height;
    int32_t sum = 0;
    for (int64_t k = 0; k < height; ++k)
      sum += panel[(k / kGroupRows * kPanelColumns + column % kPanelColumns) * kGroupRows + k % kGroupRows];
    offsets[column] = sum * zero;
  }
}

void multiply(const Parallel& parallel, const float* rows, int64_t num_rows, const Rounding& rounding,
              const Int8Matrix& matrix, float* output) {
  if (num_rows == 0) return;
  const int64_t width = matrix.num_rows, stride = padded(width);
  thread_local Scratch<uint8_t> bytes;
  thread_local Scratch<float> scales;
  // Plain pointers for the lambdas: the thread_local names mean other objects on other threads.
  const bool uses_tiles = num_rows >= kMinTileRows && has_tiles();
  const int64_t num_read = uses_tiles ? (num_rows + kTileRows - 1) / kTileRows * kTileRows : num_rows;
  uint8_t* const rounded = bytes.at_least(num_read * stride);
  float* const row_scales = scales.at_least(num_rows);

  for_each_row(parallel, num_rows, width, [=](int64_t row) {
    row_scales[row] = round_row(rows + row * width, width, rounding.step, rounding.zero, rounded + row * stride);
  });
  const auto by_vectors = [=, &matrix](int64_t panel, int64_t first, int64_t count, float* results, int64_t pitch) {
    for (int64_t row = 0; row < count; row += kVectorRows) {
      kVectors[std::min(kVectorRows, count - row) - 1](rounded + (first + row) * stride, row_scales + first + row,
                                                       matrix, panel, nullptr, results + row * pitch, pitch, {});
    }
  };
  const Results results{output, num_rows, matrix.num_columns, matrix.activation};
  const bool is_gated = matrix.activation == Activation::kSwiGlu;
  const auto write_vectors = [=](int64_t panel, int64_t first, int64_t count, float* numbers, int64_t pitch) {
    if (!is_gated) return by_vectors(panel, first, count, numbers, pitch);
    write_gated<kPanelColumns>(results, panel, first, count, numbers, pitch, by_vectors);
  };
  if (!uses_tiles) return share_panels<kPanelColumns>(parallel, results, [&] { return write_vectors; });
  share_panels<kPanelColumns>(parallel, results, [=, &matrix] {
    return [=, products = TileProducts(matrix)](int64_t panel, int64_t first, int64_t count, float* numbers,
                                                int64_t pitch) mutable {
      const int64_t done =
          products.multiply(rounded + first * stride, row_scales + first, panel, count, numbers, pitch);
      if (done < count) write_vectors(panel, first + done, count - done, numbers + done * pitch, pitch);
    };
  });
}

}  // namespace onward
