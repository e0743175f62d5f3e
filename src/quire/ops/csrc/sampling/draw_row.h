// Draws a token from a row of logits, or from the part of it that a rank has.
//
// The token is the one with the largest z + Gumbel noise among those that top-k, top-p and min-p
// leave, where z = (logit - largest) / temperature; at temperature 0 it is the largest.
//
// Only one bucket is sorted. A pass over the row counts tokens and their mass in buckets of z, and
// so finds the bucket where top-k or top-p ends. Its tokens are ranked, which gives the last token
// of the row that may be drawn. The noise of a token is computed only where it could win: with E
// exponential, the winner has the largest exp(z) / E, and E >= v (see gumbel) bounds that from
// above without a logarithm.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "native/rows.h"
#include "native/simd.h"
#include "sampling/philox.h"

namespace quire {

inline double gumbel(uint32_t bits) {
  const double v = (bits + 0.5) * 0x1p-32;
  return -std::log(-std::log1p(-v));
}

// Row to draw from. kMasked: a bit of `allowed` per token, 32 in a word, tells which may be drawn;
// the others count as -inf. Without it `allowed` is not read.
template <bool kMasked>
struct Row {
  const float* logits;
  const uint32_t* allowed;
  int64_t size;
  double temperature, top_p, min_p;
  int64_t top_k;  // 0: off
  float largest, scale;  // scale: factor from logits to base-2 exponents
  int64_t first_token = 0;  // start of a part, a multiple of 4; token indices count from it

  float at(int64_t token) const {
    return kMasked && (allowed[token / 32] >> token % 32 & 1) == 0 ? kNegativeInfinity
                                                                   : logits[token];
  }
  // Loads n <= kLanes tokens from `first` on, a multiple of kLanes.
  QUIRE_INLINE vf from(int64_t first, int n) const {
    return masked(n == kLanes ? load(logits + first) : load_part(logits + first, n), first);
  }
  QUIRE_INLINE vf masked(vf x, int64_t first) const {
    if constexpr (!kMasked) return x;
    return select(lanes_of(allowed[first / 32] >> first % 32), x, set1(kNegativeInfinity));
  }
  double z(int64_t token) const {
    return (static_cast<double>(logits[token]) - largest) / temperature;
  }
  // Returns exp(z) of kLanes tokens, less precise than exp(z(token)).
  QUIRE_INLINE vf weight(vf logit) const {
    return exp2_negative(mul(sub(logit, set1(largest)), set1(scale)));
  }
};

// Last token in rank that may be drawn. Tokens are ranked by logit, and equal ones by id.
struct Last {
  float logit = kNegativeInfinity;
  int64_t token = INT64_MAX;
  bool allows(float other, int64_t id) const {
    return other > logit || (other == logit && id <= token);
  }
};

constexpr int32_t kBroken = -1, kBanned = -2;

// Largest logit of a row, and where to look for it: no token before `first` is as large. fault: 0;
// kBroken where none is finite, or NaN or infinity is among them; kBanned where a mask leaves none.
struct Largest {
  float logit = kNegativeInfinity;
  int64_t first = 0;
  int32_t fault = 0;
  bool broken = false;  // NaN or infinity is among them
};

template <bool kMasked>
Largest largest_of(const Row<kMasked>& row) {
  constexpr int kSums = 4;  // in alternation, to hide their latency
  constexpr int64_t kPiece = 1024;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const vf infinity = set1(kInfinity);
  vf broken = zero(), any = set1(kNegativeInfinity);
  Largest found;
  for (int64_t first = 0; first < row.size; first += kPiece) {
    const int64_t end = std::min(first + kPiece, row.size);
    vf most[kSums] = {set1(kNegativeInfinity), set1(kNegativeInfinity), set1(kNegativeInfinity),
                      set1(kNegativeInfinity)};
    int64_t i = first;
    for (; i + kSums * kLanes <= end; i += kSums * kLanes) {
      for (int k = 0; k < kSums; ++k) {
        const vf x = load(row.logits + i + k * kLanes);
        most[k] = max(most[k], row.masked(x, i + k * kLanes));
        if constexpr (kMasked) any = max(any, x);
        broken = select(less(x, infinity), broken, set1(1.0f));
      }
    }
    float largest = maximum(max(max(most[0], most[1]), max(most[2], most[3])));
    float rest = 0.0f;
    for (; i < end; ++i) {
      largest = std::max(largest, row.at(i));
      if constexpr (kMasked) any = max(any, set1(row.logits[i]));
      if (!(row.logits[i] < kInfinity)) rest = 1.0f;
    }
    if (largest > found.logit) {
      found.logit = largest;
      found.first = first;
    }
    broken = max(broken, set1(rest));
  }
  const float finite = kMasked ? maximum(any) : found.logit;
  found.broken = maximum(broken) != 0.0f;
  if (found.broken || !(finite > kNegativeInfinity)) {
    found.fault = kBroken;
  } else if (!(found.logit > kNegativeInfinity)) {
    found.fault = kBanned;
  }
  return found;
}

template <bool kMasked>
int64_t first_equal(const Row<kMasked>& row, const Largest& largest) {
  int64_t token = largest.first;
  while (row.at(token) != largest.logit) ++token;
  return token;
}

// Buckets of z, best first: 8 to a unit, and a last one for everything further down. Noise lies
// between -3.2 and 22.9 (see gumbel), so that no token of the last one wins against the largest.
constexpr int kBuckets = 512;
constexpr int kCopies = 4;  // adjacent tokens count in different copies, so additions need not wait
struct Buckets {
  int64_t count[kBuckets] = {};
  double mass[kBuckets] = {};
};

// Returns the bucket of a logit before rounding down: never less for a lower logit.
template <class R>
QUIRE_INLINE vf depth_of(const R& row, vf logit) {
  const vf depth = mul(sub(set1(row.largest), logit), set1(row.scale * (8.0f / kLog2E)));
  return min(depth, set1(kBuckets - 1));
}

// Calls f(first token, kLanes logits, number of them that exist) over the row.
template <class R, class F>
QUIRE_INLINE void each_logits(const R& row, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= row.size; i += kLanes) f(i, row.from(i, kLanes), kLanes);
  if (i == row.size) return;
  const int rest = static_cast<int>(row.size - i);
  f(i, row.from(i, rest), rest);
}

template <class R>
void fill(const R& row, Buckets& buckets) {
  int32_t count[kBuckets][kCopies] = {};
  double mass[kBuckets][kCopies] = {};
  each_logits(row, [&](int64_t, vf logits, int n) {
    float depths[kLanes], weights[kLanes];
    store(depths, depth_of(row, logits));
    store(weights, row.weight(logits));
    for (int i = 0; i < n; ++i) {
      const int bucket = static_cast<int>(depths[i]);
      ++count[bucket][i % kCopies];
      mass[bucket][i % kCopies] += weights[i];
    }
  });
  for (int bucket = 0; bucket < kBuckets; ++bucket) {
    for (int copy = 0; copy < kCopies; ++copy) {
      buckets.count[bucket] += count[bucket][copy];
      buckets.mass[bucket] += mass[bucket][copy];
    }
  }
}

// Collects the tokens of a bucket that `last` allows, in the order of ranks.
template <class R>
void rank(const R& row, int bucket, const Last& last, std::vector<int64_t>& tokens) {
  tokens.clear();
  const vf above = set1(static_cast<float>(bucket)), below = set1(static_cast<float>(bucket + 1));
  each_logits(row, [&](int64_t first, vf logits, int n) {
    const vf depth = depth_of(row, logits);
    const vf not_below = select(less(depth, below), set1(1.0f), zero());
    const vf inside = select(less(depth, above), zero(), not_below);
    if (maximum(inside) == 0.0f) return;
    float found[kLanes];
    store(found, inside);
    for (int i = 0; i < n; ++i) {
      if (found[i] != 0.0f && last.allows(row.at(first + i), first + i)) {
        tokens.push_back(first + i);
      }
    }
  });
  std::sort(tokens.begin(), tokens.end(), [&](int64_t a, int64_t b) {
    return row.logits[a] != row.logits[b] ? row.logits[a] > row.logits[b] : a < b;
  });
}

// Returns the last token that top-k and top-p leave.
template <class R>
Last last_of(const R& row, std::vector<int64_t>& tokens) {
  Buckets buckets;
  fill(row, buckets);
  Last last;
  // Goes down the ranks to the token with which `amounts` reach the goal. Returns the mass of all
  // tokens down to it; in_bucket receives the part in its own bucket.
  auto descend = [&](const auto& amounts, double goal, bool by_count, int& bucket,
                     double& in_bucket) {
    double reached = 0.0, mass = 0.0;
    for (bucket = 0; bucket < kBuckets - 1 && reached + amounts[bucket] < goal; ++bucket) {
      reached += amounts[bucket];
      mass += buckets.mass[bucket];
    }
    in_bucket = 0.0;
    if (bucket == kBuckets - 1) return mass;  // no choice among its tokens changes a draw
    rank(row, bucket, last, tokens);
    for (const int64_t token : tokens) {
      const double weight = std::exp(row.z(token));
      last = Last{row.logits[token], token};
      in_bucket += weight;
      reached += by_count ? 1.0 : weight;
      if (reached >= goal) break;
    }
    return mass + in_bucket;
  };
  int bucket = kBuckets - 1;
  double total = 0.0, in_bucket = 0.0;
  if (row.top_k > 0) {
    total = descend(buckets.count, static_cast<double>(row.top_k), true, bucket, in_bucket);
    buckets.mass[bucket] = in_bucket;  // top-p applies to the tokens that top-k leaves
  } else {
    for (const double mass : buckets.mass) total += mass;
  }
  if (row.top_p < 1.0) descend(buckets.mass, row.top_p * total, false, bucket, in_bucket);
  return last;
}

// Token and its z + noise.
struct Scored {
  double score = -std::numeric_limits<double>::infinity();
  int64_t token = -1;
};

// Returns the winner among the tokens that `last` and min-p allow.
template <class R>
Scored winner(const R& row, const Stream& stream, const Last& last) {
  alignas(64) float weights[kNoiseTokens];
  alignas(64) uint32_t bits[kNoiseTokens];
  // A token whose exp(z) is below bound · (word + 0.5) cannot win. The slack of 0.001 is far above
  // the rounding of float.
  float bound = 0.0f;
  Scored best;
  for (int64_t first = 0; first < row.size; first += kNoiseTokens) {
    const int n = static_cast<int>(std::min<int64_t>(kNoiseTokens, row.size - first));
    vf most = zero();
    for (int i = 0; i < n; i += kLanes) {
      const vf logit = row.from(first + i, std::min(kLanes, n - i));
      const vf weight = select(less(logit, set1(last.logit)), zero(), row.weight(logit));
      store(weights + i, weight);
      most = max(most, weight);
    }
    const float heaviest = maximum(most);
    // None wins even with the smallest word, or all are so far below the largest that no noise
    // helps.
    if (heaviest < bound * 0.5f || heaviest == 0.0f) continue;
    noise_bits(stream, row.first_token + first, bits);
    for (int i = 0; i < n; ++i) {
      if (weights[i] < bound * (static_cast<float>(bits[i]) + 0.5f)) continue;
      const int64_t token = first + i;
      const double z = row.z(token);
      const float logit = row.at(token);
      if (!last.allows(logit, token) || logit == kNegativeInfinity) continue;
      if (row.min_p > 0.0 && std::exp(z) < row.min_p) continue;
      const double score = z + gumbel(bits[i]);
      if (score <= best.score) continue;
      best = {score, token};
      bound = static_cast<float>(std::exp(score) * 0.999 * 0x1p-32);
    }
  }
  return best;
}

struct Columns {
  const double *temperature, *top_p, *min_p;
  const int64_t* top_k;
  const uint64_t* seeds;
  const int64_t *sample_indices, *positions;

  Stream stream(int64_t i) const {
    return {{static_cast<uint32_t>(seeds[i]), static_cast<uint32_t>(seeds[i] >> 32)},
            static_cast<uint32_t>(positions[i]),
            static_cast<uint32_t>(sample_indices[i])};
  }
};

// Returns the row of draw i without a mask, from `size` logits of a row of `total`.
inline Row<false> row_of(const Columns& columns, int64_t i, const float* logits, int64_t size,
                         int64_t total) {
  const double temperature = columns.temperature[i];
  const int64_t top_k = columns.top_k[i];
  return {logits, nullptr, size, temperature, columns.top_p[i], columns.min_p[i],
          top_k < total ? top_k : 0, 0.0f,
          static_cast<float>(std::min(kLog2E / temperature, 1e30))};
}

// Performs draw i on a row of logits. allowed: its mask if kMasked.
template <bool kMasked>
int32_t draw_one(const float* logits, const uint32_t* allowed, int64_t size, const Columns& columns,
                 int64_t i) {
  thread_local std::vector<int64_t> tokens;
  const Row<false> plain = row_of(columns, i, logits, size, size);
  Row<kMasked> row{logits, allowed, size, plain.temperature, plain.top_p, plain.min_p,
                   plain.top_k, 0.0f, plain.scale};
  const Largest largest = largest_of(row);
  if (largest.fault != 0) return largest.fault;
  if (!(row.temperature > 0.0)) return static_cast<int32_t>(first_equal(row, largest));
  row.largest = largest.logit;
  const bool filtered = row.top_k > 0 || row.top_p < 1.0;
  const Last last = filtered ? last_of(row, tokens) : Last{};
  return static_cast<int32_t>(winner(row, columns.stream(i), last).token);
}

}  // namespace quire
