// Picks of a step sorted by expert, and the tasks that they make.
#pragma once

#include <algorithm>
#include <cstdint>

#include "native/parallel.h"
#include "native/scratch.h"

namespace quire::moe {

// Rows of a task: the most that share one reading of the weights while the rows between two layers
// stay in the caches.
constexpr int64_t kRowsPerTask = 256;
// Rows whose products take as long as reading the weights.
constexpr int64_t kReadingRows = 16;
constexpr int64_t kMostThreads = 512;

// Rows of a step: one for each pick of an expert by a token. Rows of an expert are adjacent, in the
// order of their tokens. They lie in scratch memory of this thread, which holds one Picks at a
// time.
class Picks {
 public:
  // Returns false without memory.
  bool sort(const int32_t* ids, int64_t tokens, int64_t top_k, int64_t first,
            int64_t num_experts) {
    struct Owner;
    const int64_t picks = tokens * top_k;
    starts_ = static_cast<int64_t*>(
        thread_scratch<Owner>((num_experts + 2 + 2 * picks) * sizeof(int64_t)));
    if (starts_ == nullptr) return false;
    tokens_ = starts_ + num_experts + 2;
    rows_ = tokens_ + picks;
    top_k_ = top_k;
    num_experts_ = num_experts;
    // starts_[e + 2] counts the rows of expert e. Prefix sums then make starts_[e + 1] the place of
    // its next row.
    std::fill_n(starts_, num_experts + 2, int64_t{0});
    const auto local = [&](int64_t pick) {
      const int64_t expert = ids[pick] - first;
      return expert >= 0 && expert < num_experts ? expert : -1;
    };
    for (int64_t pick = 0; pick < picks; ++pick) {
      if (local(pick) >= 0) ++starts_[local(pick) + 2];
    }
    for (int64_t e = 0; e < num_experts; ++e) starts_[e + 2] += starts_[e + 1];
    for (int64_t pick = 0; pick < picks; ++pick) {
      const int64_t expert = local(pick);
      rows_[pick] = expert < 0 ? -1 : starts_[expert + 1]++;
      if (expert >= 0) tokens_[rows_[pick]] = pick / top_k;
    }
    return true;
  }

  int64_t top_k() const { return top_k_; }
  int64_t num_experts() const { return num_experts_; }
  int64_t first_row(int64_t expert) const { return starts_[expert]; }
  int64_t end_row(int64_t expert) const { return starts_[expert + 1]; }
  int64_t token(int64_t row) const { return tokens_[row]; }
  // Returns -1 for an expert outside this range.
  int64_t row(int64_t token, int64_t slot) const { return rows_[token * top_k_ + slot]; }

 private:
  int64_t *starts_ = nullptr, *tokens_ = nullptr, *rows_ = nullptr;
  int64_t top_k_ = 0, num_experts_ = 0;
};

struct Task {
  int64_t expert, first, rows;
};

// Tasks, those with most rows first. They lie in scratch memory of this thread, like Picks.
class Tasks {
 public:
  // Returns false without memory.
  bool make(const Picks& picks) {
    struct Owner;
    count_ = 0;
    for (int64_t e = 0; e < picks.num_experts(); ++e) {
      count_ += pieces(picks.end_row(e) - picks.first_row(e));
    }
    tasks_ = static_cast<Task*>(thread_scratch<Owner>((count_ + 1) * sizeof(Task)));
    if (tasks_ == nullptr) return false;
    Task* next = tasks_;
    for (int64_t e = 0; e < picks.num_experts(); ++e) {
      const int64_t first = picks.first_row(e), rows = picks.end_row(e) - first;
      const int64_t count = pieces(rows);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t start = i * rows / count, end = (i + 1) * rows / count;
        *next++ = {e, first + start, end - start};
      }
    }
    std::sort(tasks_, next, [](const Task& a, const Task& b) {
      return a.rows != b.rows ? a.rows > b.rows : a.first < b.first;
    });
    return true;
  }

  int64_t count() const { return count_; }
  const Task& operator[](int64_t index) const { return tasks_[index]; }

  // Returns whether all threads have work nearly to the end if each takes one task after the other.
  bool keep_busy(int64_t threads) const {
    if (threads == 1) return true;
    if (threads > kMostThreads) return false;
    int64_t busy[kMostThreads] = {}, total = 0;
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t cost = std::max(tasks_[i].rows, kReadingRows);
      *std::min_element(busy, busy + threads) += cost;
      total += cost;
    }
    return *std::max_element(busy, busy + threads) * threads * 4 <= total * 5;
  }

 private:
  static int64_t pieces(int64_t rows) { return (rows + kRowsPerTask - 1) / kRowsPerTask; }

  Task* tasks_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace quire::moe
