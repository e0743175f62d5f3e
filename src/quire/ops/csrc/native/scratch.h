// Scratch memory that a thread keeps from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace quire {

// Returns at least `bytes`, aligned to 64, or null when memory is exhausted. Earlier contents are
// lost. The memory is valid until this thread asks again; other threads may use it as long as this
// one waits for them.
template <class Owner>  // one piece per use, so that uses do not take it from each other
inline void* thread_scratch(int64_t bytes) {
  struct Piece {
    std::unique_ptr<void, decltype(&std::free)> memory{nullptr, std::free};
    int64_t size = 0;
  };
  static thread_local Piece piece;
  if (bytes >= piece.size) {
    const int64_t whole_lines = (bytes / 64 + 1) * 64;
    piece.memory.reset();
    piece.memory.reset(std::aligned_alloc(64, whole_lines));
    piece.size = piece.memory == nullptr ? 0 : whole_lines;
  }
  return piece.memory.get();
}

}  // namespace quire
