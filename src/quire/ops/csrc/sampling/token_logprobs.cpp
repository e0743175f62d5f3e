// Log-probabilities of tokens, their ranks, and the most likely tokens of rows of logits.
//
// The order of every sum depends on the size of a row alone: 64 columns, whatever the width of a
// vector. So the bits are the same in any batch, by any number of threads, on any instruction set.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <new>
#include <type_traits>
#include <vector>

#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"
#include "native/simd.h"

namespace quire {
namespace {

constexpr int kColumns = 64, kSums = kColumns / kLanes;
constexpr int64_t kPiece = 1024;      // summed in float32; the sums of pieces in float64
constexpr int64_t kAtOnce = 1 << 15;  // logits for which a thread of the team is worth waking

// Calls f(column, kLanes logits) for [first, last); -inf stands beyond the end.
template <class F>
QUIRE_INLINE void each_column(const float* row, int64_t first, int64_t last, F&& f) {
  int64_t i = first;
  for (; i + kColumns <= last; i += kColumns) {
    QUIRE_UNROLL
    for (int k = 0; k < kSums; ++k) f(k, load(row + i + k * kLanes));
  }
  for (int k = 0; i < last; i += kLanes, ++k) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, last - i));
    f(k, select(lanes(0, n), n == kLanes ? load(row + i) : load_part(row + i, n),
                set1(kNegativeInfinity)));
  }
}

// Folds columns onto each other, the farther ones first.
template <class F>
QUIRE_INLINE vf folded(vf (&x)[kSums], F&& combine) {
  for (int n = kSums / 2; n > 0; n /= 2) {
    for (int k = 0; k < n; ++k) x[k] = combine(x[k], x[k + n]);
  }
  return x[0];
}

// Sum of the exponentials of the logits so far, each less their largest.
struct Total {
  float largest = kNegativeInfinity;
  double sum = 0.0;

  void take(const float* row, int64_t first, int64_t last) {
    vf most[kSums], sums[kSums];
    for (int k = 0; k < kSums; ++k) most[k] = set1(kNegativeInfinity), sums[k] = zero();
    each_column(row, first, last, [&](int k, vf x) { most[k] = max(most[k], x); });
    const float own = maximum(folded(most, [](vf a, vf b) { return max(a, b); }));
    if (!(own > kNegativeInfinity)) return;
    each_column(row, first, last, [&](int k, vf x) {
      sums[k] = add(sums[k], exp2_negative(mul(sub(x, set1(own)), set1(kLog2E))));
    });
    const double added = quire::sum(folded(sums, [](vf a, vf b) { return add(a, b); }));
    if (own > largest) {
      sum = sum * std::exp(static_cast<double>(largest) - own) + added;
      largest = own;
    } else {
      sum += added * std::exp(static_cast<double>(own) - largest);
    }
  }
  double log_sum_exp() const { return largest + std::log(sum); }
};

// Returns how many of at most kPiece logits are above one, or not below it if kOrEqual.
template <bool kOrEqual>
int32_t count_above(const float* row, int64_t first, int64_t last, float logit) {
  const vf one = set1(1.0f), bound = set1(logit);
  vf counts = zero();
  each_vector(first, last, [&](int64_t i, auto size) {
    const vf x = get(row + i, size);
    const vf found = kOrEqual ? select(less(x, bound), zero(), one)
                              : select(less(bound, x), one, zero());
    counts = add(counts, kept(found, size));
  });
  return static_cast<int32_t>(sum(counts));
}

// Returns how many of [first, last), at most kPiece, are ranked before a token.
int32_t count_before(const float* row, int64_t first, int64_t last, int64_t token) {
  const int64_t middle = std::min(std::max(first, token), last);
  return count_above<true>(row, first, middle, row[token]) +
         count_above<false>(row, middle, last, row[token]);
}

// The k best tokens above -inf of a row that is read from its start to its end.
class Best {
  auto before() const {
    return [row = row_](int32_t a, int32_t b) {
      return row[a] != row[b] ? row[a] > row[b] : a < b;
    };
  }

 public:
  void begin(const float* row, int64_t k) {
    row_ = row;
    most_ = static_cast<size_t>(k);
    bound_ = kNegativeInfinity;
    tokens.clear();
  }
  void take(int64_t first, int64_t last) {
    const size_t full = std::max(2 * most_, kLeastKept);
    for (int64_t at = first; at < last; at += kStep) {
      const int64_t end = std::min(at + kStep, last);
      vf most = set1(kNegativeInfinity);
      each_column(row_, at, end, [&](int, vf x) { most = max(most, x); });
      if (!(maximum(most) > bound_)) continue;
      for (int64_t i = at; i < end; ++i) {
        if (row_[i] > bound_) tokens.push_back(static_cast<int32_t>(i));
      }
      if (tokens.size() >= full) keep_best();
    }
  }
  // Leaves `tokens` in order, equal ones by id.
  void end() {
    keep_best();
    std::sort(tokens.begin(), tokens.end(), before());
  }
  std::vector<int32_t> tokens;

 private:
  static constexpr size_t kLeastKept = 32;
  static constexpr int64_t kStep = 16;

  void keep_best() {
    if (tokens.size() <= most_) return;
    std::nth_element(tokens.begin(), tokens.begin() + (most_ - 1), tokens.end(), before());
    tokens.resize(most_);
    bound_ = row_[tokens.back()];  // tokens to come have larger ids, and so must be above it
  }

  const float* row_ = nullptr;
  size_t most_ = 0;
  float bound_ = kNegativeInfinity;
};

struct Results {
  float* logprobs;
  int32_t *ranks, *top_ids;
  float* top_logprobs;
  int64_t k;
};

// Writes the results of tokens [first, last), which stand in one row. Each piece of the row comes
// into the cache once.
void read_row(const float* row, int64_t size, const int32_t* token_ids, int64_t first, int64_t last,
              const Results& results) {
  thread_local Best best;
  const int64_t k = results.k;
  const auto token = [&](int64_t i) { return static_cast<int64_t>(std::max(token_ids[i], 0)); };
  Total total;
  best.begin(row, k);
  std::fill(results.ranks + first, results.ranks + last, 1);
  for (int64_t start = 0; start < size; start += kPiece) {
    const int64_t end = std::min(start + kPiece, size);
    total.take(row, start, end);
    for (int64_t i = first; i < last; ++i) {
      results.ranks[i] += count_before(row, start, end, token(i));
    }
    if (k > 0) best.take(start, end);
  }
  if (k > 0) best.end();
  const double normalizer = total.log_sum_exp();
  const auto logprob = [&](int64_t id) { return static_cast<float>(row[id] - normalizer); };
  for (int64_t i = first; i < last; ++i) {
    results.logprobs[i] = logprob(token(i));
    for (int64_t j = 0; j < k; ++j) {
      const bool exists = j < static_cast<int64_t>(best.tokens.size());
      results.top_ids[i * k + j] = exists ? best.tokens[j] : -1;
      results.top_logprobs[i * k + j] = exists ? logprob(best.tokens[j]) : kNegativeInfinity;
    }
  }
}

}  // namespace
}  // namespace quire

// Returns 0, 1 for an unknown element type, or 2 without memory for the best tokens or a widened
// row; the results then mean nothing.
//
// logits: rows of `vocab_size` elements with a stride. Token i stands in row rows[i]; a negative
// one counts as 0. A row that several tokens share is read once where they follow each other.
// top_ids, top_logprobs: k for each token, best first; -1 and -inf after the last above -inf.
QUIRE_API int quire_token_logprobs(const void* logits, int64_t stride, int64_t vocab_size,
                                   int32_t dtype, const int64_t* rows, const int32_t* token_ids,
                                   int64_t num_tokens, int64_t k, float* logprobs, int32_t* ranks,
                                   int32_t* top_ids, float* top_logprobs, quire::Team* team) {
  using namespace quire;
  std::atomic<int> failed{0};
  const Results results{logprobs, ranks, top_ids, top_logprobs, k};
  const int64_t grain = std::max<int64_t>(1, kAtOnce / std::max<int64_t>(1, vocab_size));
  const int unknown = dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(num_tokens, grain, team, [&](int64_t i) {
      if (i > 0 && rows[i] == rows[i - 1]) return;  // the first of its row does all
      int64_t last = i + 1;
      while (last < num_tokens && rows[last] == rows[i]) ++last;
      try {  // no exception may leave a thread of the team
        const E* row = static_cast<const E*>(logits) + rows[i] * stride;
        if constexpr (std::is_same_v<E, float>) {
          read_row(row, vocab_size, token_ids, i, last, results);
        } else {
          thread_local std::vector<float> widened;
          widened.resize(vocab_size);
          each_vector(0, vocab_size,
                      [&](int64_t at, auto size) { put(&widened[at], get(row + at, size), size); });
          read_row(widened.data(), vocab_size, token_ids, i, last, results);
        }
      } catch (const std::bad_alloc&) {
        failed = 2;
      }
    });
  });
  return unknown != 0 ? unknown : failed.load();
}
QUIRE_REPLAYABLE(quire_token_logprobs)
