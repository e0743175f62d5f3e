// Threads that share the loops of the kernels.
//
// A loop waits only for threads that have begun to work on it. If another program holds the core of
// a member, the caller does that member's work as well: nothing waits at a barrier for a thread
// that the system does not run. Idle members spin for a short while, then sleep.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace quire {

inline void relax() { __builtin_ia32_pause(); }

class Team {
 public:
  // size: threads that work on a loop, the caller included. spin: time for which an idle one spins.
  // Throws what std::thread throws when the system gives no more threads; no member is left then.
  Team(int size, std::chrono::microseconds spin) : spin_(spin), process_(getpid()) {
    try {
      for (int i = 1; i < size; ++i) members_.emplace_back([this] { live(); });
    } catch (...) {
      end_members();
      throw;
    }
  }

  // Must not run in a forked child, whose members stayed with the parent: there `owned` is false,
  // and the team may run but not end.
  ~Team() { end_members(); }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  bool owned() const { return process_ == getpid(); }
  int size() const { return static_cast<int>(members_.size()) + 1; }

  // Calls work(context) in the caller and in every member that comes in time. Each call must take
  // shares until nothing is left, so that one of them alone would do. A second caller at the same
  // time works alone.
  void run(void (*work)(void*), void* context) {
    if (in_use_.exchange(true, std::memory_order_acquire)) {
      work(context);
      return;
    }
    work_ = work;
    context_ = context;
    left_.store(0, std::memory_order_relaxed);
    const uint64_t round = (gate_.load(std::memory_order_relaxed) | kEntered) + 1;
    gate_.store(round | kOpen, std::memory_order_seq_cst);
    // A forked child's copy has no members; one may have held the mutex at the fork.
    if (sleeping_.load(std::memory_order_seq_cst) > 0 && owned()) {
      { const std::lock_guard<std::mutex> lock(mutex_); }
      awake_.notify_all();
    }
    work(context);
    const uint64_t entered = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) & kEntered & ~kOpen;
    for (int spins = 0; left_.load(std::memory_order_acquire) != entered; ++spins) {
      if (spins < kSpinsBeforeYield) {
        relax();
      } else {
        std::this_thread::yield();
      }
    }
    in_use_.store(false, std::memory_order_release);
  }

 private:
  // gate_ holds the members that have entered this round, a bit while it is open to more, and its
  // number.
  static constexpr uint64_t kOpen = 1u << 15, kEntered = (1u << 16) - 1;
  static constexpr int kSpinsBeforeYield = 2000;
  static constexpr int kSpinsPerLook = 64;

  void end_members() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    awake_.notify_all();
    for (std::thread& member : members_) member.join();
  }

  void live() {
    uint64_t seen = 0;  // the round this member has worked on
    while (wait_for_round(seen)) {
      uint64_t gate = gate_.load(std::memory_order_acquire);
      bool entered = false;
      while (is_new(gate, seen) && !entered) {
        entered = gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel);
      }
      if (!entered) continue;
      seen = gate >> 16;
      work_(context_);
      left_.fetch_add(1, std::memory_order_release);
    }
  }

  static bool is_new(uint64_t gate, uint64_t seen) {
    return (gate & kOpen) != 0 && gate >> 16 != seen;
  }

  // Returns false when the team ends.
  bool wait_for_round(uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + spin_;
    do {
      for (int i = 0; i < kSpinsPerLook; ++i) {
        if (is_new(gate_.load(std::memory_order_acquire), seen)) return true;
        relax();
      }
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    awake_.wait(lock, [&] {
      return stopping_ || is_new(gate_.load(std::memory_order_seq_cst), seen);
    });
    sleeping_.fetch_sub(1, std::memory_order_relaxed);
    return !stopping_;
  }

  alignas(64) std::atomic<uint64_t> gate_{0};
  void (*work_)(void*) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> left_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> in_use_{false};
  const std::chrono::microseconds spin_;
  const pid_t process_;
  std::mutex mutex_;
  std::condition_variable awake_;
  bool stopping_ = false;
  std::vector<std::thread> members_;
};

}  // namespace quire
