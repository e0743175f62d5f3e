// Vendor of this processor, for behaviour of memory that instruction sets do not tell.
#pragma once

#include <cstdlib>

namespace quire {

inline bool is_amd() {
#if defined(QUIRE_SANITIZED)  // tests take the path of other vendors too
  static const bool amd =
      __builtin_cpu_is("amd") != (std::getenv("QUIRE_OTHER_VENDOR") != nullptr);
#else
  static const bool amd = __builtin_cpu_is("amd");
#endif
  return amd;
}

}  // namespace quire
