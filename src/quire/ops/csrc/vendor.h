// Which processor this is, where instruction sets do not tell how it takes to memory.
#pragma once

namespace quire {

inline bool is_amd() {
  static const bool amd = __builtin_cpu_is("amd");
  return amd;
}

}  // namespace quire
