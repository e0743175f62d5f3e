// Loops whose iterations a team of threads shares.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "team.h"

namespace quire {

inline int team_size(const Team* team) { return team == nullptr ? 1 : team->size(); }

// Calls body(i) for 0 <= i < count, each once, in no order. Threads take `grain` indices at a time.
// team: null for the caller alone. What enter() returns lives in each thread while it does so.
template <class F, class Enter>
void parallel_for(int64_t count, int64_t grain, Team* team, F&& body, Enter&& enter) {
  if (team == nullptr || count <= grain) {
    [[maybe_unused]] const auto& entered = enter();
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
  auto share = [&] {
    [[maybe_unused]] const auto& entered = enter();
    for (;;) {
      const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= count) return;
      const int64_t last = first + grain < count ? first + grain : count;
      for (int64_t i = first; i < last; ++i) body(i);
    }
  };
  team->run([](void* context) { (*static_cast<decltype(share)*>(context))(); }, &share);
}

template <class F>
void parallel_for(int64_t count, int64_t grain, Team* team, F&& body) {
  parallel_for(count, grain, team, body, [] { return 0; });
}

// The same, but every thread takes neighbours: it starts in a range of its own, and goes on in those
// of the others when that is empty. enter(first) makes what a thread needs, `first` being the index
// it is likely to start with; body(i, needed) uses it.
template <class F, class Enter>
void parallel_ranges_of(int64_t count, int64_t grain, Team* team, F&& body, Enter&& enter) {
  if (team == nullptr || count <= grain) {
    auto&& needed = enter(0);
    for (int64_t i = 0; i < count; ++i) body(i, needed);
    return;
  }
  constexpr int64_t kMost = 64;
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  Range ranges[kMost];
  const int64_t size = std::min<int64_t>(team_size(team), kMost);
  for (int64_t i = 0; i < size; ++i) {
    ranges[i].next.store(i * count / size, std::memory_order_relaxed);
    ranges[i].end = (i + 1) * count / size;
  }
  std::atomic<int64_t> entrants{0};
  const auto has_work = [](const Range& range) {
    return range.next.load(std::memory_order_relaxed) < range.end;
  };
  auto share = [&] {
    if (std::none_of(ranges, ranges + size, has_work)) return;  // late, and enter() may be long
    const int64_t own = entrants.fetch_add(1, std::memory_order_relaxed) % size;
    auto&& needed = enter(ranges[own].next.load(std::memory_order_relaxed));
    for (int64_t i = 0; i < size; ++i) {
      Range& range = ranges[(own + i) % size];
      for (;;) {
        const int64_t first = range.next.fetch_add(grain, std::memory_order_relaxed);
        if (first >= range.end) break;
        const int64_t last = std::min(range.end, first + grain);
        for (int64_t at = first; at < last; ++at) body(at, needed);
      }
    }
  };
  team->run([](void* context) { (*static_cast<decltype(share)*>(context))(); }, &share);
}

// The same where threads need nothing: body(i).
template <class F>
void parallel_ranges(int64_t count, int64_t grain, Team* team, F&& body) {
  parallel_ranges_of(
      count, grain, team, [&](int64_t i, int) { body(i); }, [](int64_t) { return 0; });
}

}  // namespace quire
