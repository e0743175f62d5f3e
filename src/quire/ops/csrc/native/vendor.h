// Which processor this is, where instruction sets do not tell how it takes to memory.
#pragma once

#include <cstdlib>

namespace quire {

inline bool is_amd() {
#if defined(QUIRE_SANITIZED)  // there tests take the way of the other vendors too
  static const bool amd =
      __builtin_cpu_is("amd") != (std::getenv("QUIRE_OTHER_VENDOR") != nullptr);
#else
  static const bool amd = __builtin_cpu_is("amd");
#endif
  return amd;
}

}  // namespace quire
