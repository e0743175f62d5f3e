// Memory that a team will read soon, which its threads fetch while they wait for one another.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace quire {

// A stretch of memory of which every thread reads an equal part, in the order of their numbers:
// what parallel_ranges_of gives them first.
class Upcoming {
 public:
  // How much a thread has fetched of its part.
  struct Fetched {
    const uint8_t* start = nullptr;
    int64_t bytes = 0;
  };

  // By the thread that gives the team its work. Writes only what is new: the others look at it all
  // the time, and would have to fetch it again.
  void set(const uint8_t* start, int64_t bytes) {
    const bool same = start == start_.load(std::memory_order_relaxed) &&
                      bytes == bytes_.load(std::memory_order_relaxed);
    if (same) return;
    bytes_.store(bytes, std::memory_order_relaxed);
    start_.store(start, std::memory_order_relaxed);
  }

  // Asks for a little more of the part of thread `index` of `size`. False when that is enough. May
  // see half of a set(), and memory that is gone: to ask for any address does no harm.
  bool fetch(int64_t index, int64_t size, Fetched& fetched) const {
    const uint8_t* start = start_.load(std::memory_order_relaxed);
    if (start != fetched.start) fetched = {start, 0};
    const int64_t part = bytes_.load(std::memory_order_relaxed) / size;
    if (fetched.bytes >= std::min(part, kMost)) return false;
    const uintptr_t from = reinterpret_cast<uintptr_t>(start) + index * part + fetched.bytes;
    for (int64_t i = 0; i < kAtOnce; i += kLine) {
      // Into the second-level cache: the first is for what is in use.
      __builtin_prefetch(reinterpret_cast<const void*>(from + i), 0, 2);
    }
    fetched.bytes += kAtOnce;
    return true;
  }

 private:
  static constexpr int64_t kLine = 64, kAtOnce = 4 * kLine;
  // Measured best of 32 to 512 KB: a thread seldom waits for longer, and other work needs its cache.
  static constexpr int64_t kMost = 128 << 10;

  std::atomic<const uint8_t*> start_{nullptr};
  std::atomic<int64_t> bytes_{0};
};

}  // namespace quire
