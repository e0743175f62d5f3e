// Ranks of one host that meet in shared memory (base/platform/shared_region.py has the same layout).
//
// Every rank counts its exchanges and announces each by storing its number. It waits until all
// others have announced theirs: it spins for a short while, then sleeps on the number (futex). Data
// alternate between two slots per rank, so that no rank writes where others may still read: a rank
// begins exchange n + 2 when all have announced n + 1, and so have read the data of n.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#else
#include <thread>
#endif

#include "native/team.h"

namespace quire {

constexpr int kGroupAborted = 4, kPeerFailed = 5, kRanksDiffer = 6;
constexpr int64_t kGroupLine = 128, kGroupPage = 4096;

struct GroupControl {
  std::atomic<uint32_t> aborted;  // the group is over: no rank waits any more
  std::atomic<uint32_t> failed;   // a rank failed in its step: all give it up and meet in agree()
  uint32_t size;
  uint32_t unused;
  int64_t slot_bytes;
};

struct GroupLine {
  std::atomic<uint32_t> arrived;   // exchanges announced
  std::atomic<uint32_t> agreed;    // agreements announced
  std::atomic<uint32_t> sleepers;  // ranks that sleep on one of the two
  uint32_t votes[2];               // per parity of agreements: 1 if this rank is fine
  uint32_t number;                 // its last exchange when it voted
  uint32_t marks[2];               // like votes: mark of this rank's decisions so far
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "shared between processes");
static_assert(sizeof(GroupControl) <= kGroupLine && sizeof(GroupLine) <= kGroupLine);

class Group {
 public:
  Group(void* memory, int rank) : base_(static_cast<char*>(memory)), rank_(rank) {}

  GroupControl& control() const { return *reinterpret_cast<GroupControl*>(base_); }
  GroupLine& line(int rank) const {
    return *reinterpret_cast<GroupLine*>(base_ + kGroupLine * (1 + rank));
  }
  int size() const { return static_cast<int>(control().size); }
  int rank() const { return rank_; }
  int64_t slot_bytes() const { return control().slot_bytes; }

  char* slot(int rank, uint32_t number) const {
    const int64_t first = (kGroupLine * (1 + size()) + kGroupPage - 1) / kGroupPage * kGroupPage;
    return base_ + first + (2 * rank + (number & 1)) * slot_bytes();
  }

  // Returns the number of the exchange that begins now.
  uint32_t next() const { return line(rank_).arrived.load(std::memory_order_relaxed) + 1; }

  // Announces exchange `number` and waits for all others. Returns 0, kGroupAborted or kPeerFailed.
  int meet(uint32_t number) const {
    announce(line(rank_), line(rank_).arrived, number);
    for (int i = 1; i < size(); ++i) {
      GroupLine& other = line((rank_ + i) % size());
      const int code = await(other, other.arrived, number, true);
      if (code != 0) return code;
    }
    return 0;
  }

  // Finds whether every rank is fine. If not, all of them count their exchanges from one number on.
  // Returns 0, kGroupAborted, or kRanksDiffer if their marks differ.
  int agree(bool fine, uint32_t mark, bool* all_fine) const {
    GroupLine& own = line(rank_);
    const uint32_t turn = own.agreed.load(std::memory_order_relaxed) + 1;
    own.votes[turn & 1] = fine;
    own.marks[turn & 1] = mark;
    own.number = own.arrived.load(std::memory_order_relaxed);
    if (!fine) {
      control().failed.store(1, std::memory_order_seq_cst);
      for (int i = 0; i < size(); ++i) wake(line(i).arrived);
    }
    if (const int code = meet_agreed(turn); code != 0) return code;
    *all_fine = true;
    uint32_t latest = own.number;
    for (int i = 0; i < size(); ++i) {
      if (line(i).marks[turn & 1] != mark) return kRanksDiffer;
      *all_fine = *all_fine && line(i).votes[turn & 1] != 0;
      if (static_cast<int32_t>(line(i).number - latest) > 0) latest = line(i).number;
    }
    if (*all_fine) return 0;
    if (const int code = meet_agreed(turn + 1); code != 0) return code;  // all have read the votes
    own.arrived.store(latest, std::memory_order_relaxed);
    if (rank_ == 0) control().failed.store(0, std::memory_order_relaxed);
    return meet_agreed(turn + 2);
  }

 private:
  int meet_agreed(uint32_t turn) const {
    announce(line(rank_), line(rank_).agreed, turn);
    for (int i = 1; i < size(); ++i) {
      GroupLine& other = line((rank_ + i) % size());
      const int code = await(other, other.agreed, turn, false);
      if (code != 0) return code;
    }
    return 0;
  }

  void announce(GroupLine& own, std::atomic<uint32_t>& word, uint32_t number) const {
    word.store(number, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst) > 0) wake(word);
  }

  static bool is_there(const std::atomic<uint32_t>& word, uint32_t number) {
    return static_cast<int32_t>(word.load(std::memory_order_acquire) - number) >= 0;
  }

  int await(GroupLine& other, std::atomic<uint32_t>& word, uint32_t number, bool heeds) const {
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
    do {
      for (int i = 0; i < 64; ++i) {
        if (is_there(word, number)) return 0;
        relax();
      }
      if (const int code = over(heeds); code != 0) return code;
    } while (std::chrono::steady_clock::now() < until);
    other.sleepers.fetch_add(1, std::memory_order_seq_cst);
    int code = 0;
    while (code == 0) {
      const uint32_t seen = word.load(std::memory_order_seq_cst);
      if (static_cast<int32_t>(seen - number) >= 0) break;
      code = over(heeds);
      if (code == 0) sleep_on(word, seen);
    }
    other.sleepers.fetch_sub(1, std::memory_order_relaxed);
    return code;
  }

  int over(bool heeds) const {
    if (control().aborted.load(std::memory_order_acquire) != 0) return kGroupAborted;
    if (heeds && control().failed.load(std::memory_order_acquire) != 0) return kPeerFailed;
    return 0;
  }

#if defined(__linux__)
  // Sleeps a tenth of a second at most; the caller then checks whether the group is over.
  static void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec limit{0, 100'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
  static void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
#else
  static void sleep_on(std::atomic<uint32_t>&, uint32_t) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  static void wake(std::atomic<uint32_t>&) {}
#endif

  char* const base_;
  const int rank_;
};

// Gathers `bytes` of each rank in out, one after the other. Returns 0 or a code of meet().
inline int gather(const Group& group, const void* x, int64_t bytes, void* out) {
  for (int64_t first = 0; first < bytes; first += group.slot_bytes()) {
    const int64_t n = std::min(bytes - first, group.slot_bytes());
    const uint32_t number = group.next();
    std::memcpy(group.slot(group.rank(), number), static_cast<const char*>(x) + first, n);
    if (const int code = group.meet(number); code != 0) return code;
    for (int rank = 0; rank < group.size(); ++rank) {
      std::memcpy(static_cast<char*>(out) + rank * bytes + first, group.slot(rank, number), n);
    }
  }
  return 0;
}

// out: `rows` rows of all ranks, each with its parts side by side. row_at(i): place of this rank's
// part of row i, row_bytes of it. An exchange has as many bytes as a place, whatever rows they are
// of. 0 or a code of meet().
template <class RowAt>
int gather_rows(const Group& group, int64_t rows, int64_t row_bytes, void* out, RowAt&& row_at) {
  const int64_t count = rows * row_bytes;
  for (int64_t first = 0; first < count; first += group.slot_bytes()) {
    const int64_t past = std::min(count, first + group.slot_bytes());
    const auto each_piece = [&](auto&& move) {  // move(its place, row, column, bytes)
      for (int64_t at = first; at < past;) {
        const int64_t row = at / row_bytes, column = at % row_bytes;
        const int64_t piece = std::min(row_bytes - column, past - at);
        move(at - first, row, column, piece);
        at += piece;
      }
    };
    const uint32_t number = group.next();
    char* const own = group.slot(group.rank(), number);
    each_piece([&](int64_t place, int64_t row, int64_t column, int64_t bytes) {
      std::memcpy(own + place, row_at(row) + column, bytes);
    });
    if (const int code = group.meet(number); code != 0) return code;
    for (int rank = 0; rank < group.size(); ++rank) {
      const char* const given = group.slot(rank, number);
      each_piece([&](int64_t place, int64_t row, int64_t column, int64_t bytes) {
        char* const whole = static_cast<char*>(out) + row * group.size() * row_bytes;
        std::memcpy(whole + rank * row_bytes + column, given + place, bytes);
      });
    }
  }
  return 0;
}

}  // namespace quire
