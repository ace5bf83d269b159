#include "tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>

namespace onward {
namespace {

constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM of Linux's asm/prctl.h
constexpr int kTileData = 18;               // the state component that is permitted

alignas(64) constexpr uint16_t kOneAndTwo[16 * 32] = {0x3F80, 0x4000};  // in bfloat16, and zeros

struct sigaction before {};
thread_local sigjmp_buf* volatile escape = nullptr;

void multiply_one(const uint8_t* rows, const uint8_t* weights, int32_t* sums, float* float_sums) {
  auto* const tiles = new Tiles<64>;  // no local variable: a jump out of here may skip no destructor
  tiles->clear<0>();
  tiles->load<4>(rows, 64);
  tiles->load<6>(weights, 64);
  tiles->add_unsigned<0, 4, 6>();
  tiles->store<0>(sums, 64);
  tiles->clear<0>();
  tiles->load<4>(kOneAndTwo, 64);
  tiles->load<6>(kOneAndTwo, 64);
  tiles->add_floats<0, 4, 6>();
  tiles->store<0>(float_sums, 64);
  delete tiles;
}

// Whether a product runs and is right. Signals of other threads meanwhile go to whoever handled them before.
bool can_multiply_tiles() {
  struct sigaction trap {};
  trap.sa_handler = [](int) {
    if (escape) siglongjmp(*escape, 1);
    sigaction(SIGILL, &before, nullptr);  // the instruction is tried again
  };
  if (sigaction(SIGILL, &trap, &before)) return false;
  alignas(64) static const uint8_t first[16 * 64] = {1, 2, 3, 4};  // and zeros
  alignas(64) int32_t sums[16 * 16] = {};
  alignas(64) float float_sums[16 * 16] = {};
  static sigjmp_buf place;
  if (sigsetjmp(place, 1) == 0) {
    escape = &place;
    multiply_one(first, first, sums, float_sums);
  }
  escape = nullptr;
  sigaction(SIGILL, &before, nullptr);
  return sums[0] == 1 * 1 + 2 * 2 + 3 * 3 + 4 * 4 && sums[1] == 0 && float_sums[0] == 1 + 4 && float_sums[1] == 0;
}

}  // namespace

bool has_tiles() {
  static const bool found = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                            __builtin_cpu_supports("amx-bf16") &&
                            syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 && can_multiply_tiles();
  return found;
}

}  // namespace onward
