#include "tiles.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>

namespace onward {
namespace {

constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM of Linux's asm/prctl.h
constexpr int kTileData = 18;               // the state component that is permitted

thread_local sigjmp_buf* escape = nullptr;

// Whether a product runs. Signals of other threads meanwhile are not ours to catch: they go on as by default.
bool can_run() {
  struct sigaction trap {}, before {};
  trap.sa_handler = [](int number) {
    if (escape) siglongjmp(*escape, 1);
    signal(number, SIG_DFL);
  };
  if (sigaction(SIGILL, &trap, &before)) return false;
  sigjmp_buf place;
  bool has_run = false;
  if (sigsetjmp(place, 1) == 0) {
    escape = &place;
    Tiles<64> tiles;
    tiles.clear<0>();
    tiles.clear<4>();
    tiles.clear<6>();
    tiles.add_unsigned<0, 4, 6>();
    has_run = true;
  }
  escape = nullptr;
  sigaction(SIGILL, &before, nullptr);
  return has_run;
}

}  // namespace

bool has_tiles() {
  static const bool found = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                            syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 && can_run();
  return found;
}

}  // namespace onward
