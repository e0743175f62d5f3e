// Work for a team of threads. Only GOMP_parallel is needed, which the OpenMP runtime that torch
// has loaded provides: linking a second runtime would give the process a second set of threads.
#pragma once

#include <atomic>
#include <cstdint>

namespace quire {

// Calls body(i) for 0 <= i < count, each once, in no order. Threads take `grain` indices at a time.
template <class F>
void parallel_for(int64_t count, int64_t grain, int num_threads, F&& body) {
  if (num_threads <= 1 || count <= grain) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(num_threads)
  {
    for (;;) {
      const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= count) break;
      const int64_t last = first + grain < count ? first + grain : count;
      for (int64_t i = first; i < last; ++i) body(i);
    }
  }
}

}  // namespace quire
