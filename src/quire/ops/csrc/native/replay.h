// Kernel calls that were recorded once and are repeated without their caller.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

namespace quire {

// Unpacks an argument from its 8 bytes; a narrower parameter takes the first of them.
template <class T>
T unpack_argument(uint64_t slot) {
  static_assert(sizeof(T) <= sizeof slot);
  T value;
  std::memcpy(&value, &slot, sizeof value);
  return value;
}

template <class... P, size_t... I>
int call_unpacked(int (*kernel)(P...), const uint64_t* arguments, std::index_sequence<I...>) {
  return kernel(unpack_argument<P>(arguments[I])...);
}

template <class... P>
int call_unpacked(int (*kernel)(P...), const uint64_t* arguments) {
  return call_unpacked(kernel, arguments, std::index_sequence_for<P...>{});
}

}  // namespace quire

// Exports a kernel that a captured step may call in the form that replay.cpp takes. Write it below
// the kernel.
#define QUIRE_REPLAYABLE(kernel)                                  \
  QUIRE_API int kernel##_replay(const uint64_t* arguments) {      \
    return quire::call_unpacked(kernel, arguments);               \
  }
