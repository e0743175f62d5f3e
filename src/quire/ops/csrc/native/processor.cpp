// Permissions that a library needs from the operating system before its first instruction.
#include "native/simd.h"

#if defined(__AMX_TILE__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace {

// Linux gives a process memory to save tile registers only on request. The permission then holds
// for all its threads, running ones and forked children included (Linux 5.16,
// Documentation/arch/x86/xstate.rst).
constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr long kTileData = 18;               // XFEATURE_XTILEDATA

std::string request_tiles() {
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
  return std::string("the system gives this process no tile registers: ") + std::strerror(errno);
}

}  // namespace

// Returns why this process cannot run the library, or null when it can.
QUIRE_API const char* quire_unavailable() {
  static const std::string reason = request_tiles();
  return reason.empty() ? nullptr : reason.c_str();
}
#else
QUIRE_API const char* quire_unavailable() { return nullptr; }
#endif
