// Draws a token from each row of logits: the token with the largest z + Gumbel noise among those that
// top-k, top-p and min-p leave, z = (logit - largest) / temperature.
//
// Nothing is sorted but one bucket: a pass over the row counts tokens and their mass in buckets of z,
// which tells the bucket where top-k or top-p ends; its tokens are ranked, and that gives the last
// token of the row that may be drawn. The noise of a token is computed only where it could win: with
// E exponential, the winner has the largest exp(z) / E, and E >= v (see gumbel) bounds that from
// above without a logarithm.
#include <algorithm>
#include <cmath>
#include <vector>

#include "parallel.h"
#include "simd.h"

namespace quire {
namespace {

// Philox4x32-10 (Salmon et al., SC 2011, section 3.3) for kLanesOfNoise counters at once, which give
// the words of four neighbouring tokens each.
constexpr int kLanesOfNoise = 16;
constexpr int kTokens = 4 * kLanesOfNoise;  // of a block
struct Stream {
  uint32_t key[2], position, sample;
};

void noise_bits(const Stream& stream, int64_t first_token, uint32_t* bits) {
  uint32_t c[4][kLanesOfNoise];
  for (int i = 0; i < kLanesOfNoise; ++i) {
    c[0][i] = static_cast<uint32_t>(first_token / 4 + i);
    c[1][i] = stream.position;
    c[2][i] = stream.sample;
    c[3][i] = 0;
  }
  uint32_t key_0 = stream.key[0], key_1 = stream.key[1];
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kLanesOfNoise; ++i) {
      const uint64_t a = uint64_t{0xD2511F53} * c[0][i], b = uint64_t{0xCD9E8D57} * c[2][i];
      c[0][i] = static_cast<uint32_t>(b >> 32) ^ c[1][i] ^ key_0;
      c[1][i] = static_cast<uint32_t>(b);
      c[2][i] = static_cast<uint32_t>(a >> 32) ^ c[3][i] ^ key_1;
      c[3][i] = static_cast<uint32_t>(a);
    }
    key_0 += 0x9E3779B9;
    key_1 += 0xBB67AE85;
  }
  for (int i = 0; i < kLanesOfNoise; ++i) {
    for (int word = 0; word < 4; ++word) bits[4 * i + word] = c[word][i];
  }
}

double gumbel(uint32_t bits) {
  const double v = (bits + 0.5) * 0x1p-32;
  return -std::log(-std::log1p(-v));
}

struct Row {
  const float* logits;
  int64_t size;
  double temperature, top_p, min_p;
  int64_t top_k;  // 0: off
  float largest, scale;  // scale: of logits to base-2 exponents

  double z(int64_t token) const {
    return (static_cast<double>(logits[token]) - largest) / temperature;
  }
  // exp(z) of kLanes tokens; rounded, as against exp(z(token)).
  vf weight(vf logit) const { return exp2_negative(mul(sub(logit, set1(largest)), set1(scale))); }
};

// Tokens are ranked by logit, and equal ones by id. The last in rank that may be drawn:
struct Last {
  float logit = kNegativeInfinity;
  int64_t token = INT64_MAX;
  bool allows(float other, int64_t id) const {
    return other > logit || (other == logit && id <= token);
  }
};

float largest_of(const float* logits, int64_t size) {
  vf most = set1(kNegativeInfinity);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) most = max(most, load(logits + i));
  float found = maximum(most);
  for (; i < size; ++i) found = std::max(found, logits[i]);
  return found;
}

// Calls f(first token, exp(z) of kLanes tokens, how many of them there are).
template <class F>
QUIRE_INLINE void each_weights(const Row& row, F&& f) {
  float weights[kLanes];
  int64_t i = 0;
  for (; i + kLanes <= row.size; i += kLanes) {
    store(weights, row.weight(load(row.logits + i)));
    f(i, weights, kLanes);
  }
  if (i < row.size) {
    const int rest = static_cast<int>(row.size - i);
    store(weights, row.weight(load_part(row.logits + i, rest)));
    f(i, weights, rest);
  }
}

// Buckets of z, best first: 16 to a unit, and the last one for all that is further down.
constexpr int kBuckets = 1024;
struct Buckets {
  int64_t count[kBuckets] = {};
  double mass[kBuckets] = {};
};

// Which bucket: a function of the logit that never falls as the logit falls.
QUIRE_INLINE int bucket_of(const Row& row, float logit) {
  const float depth = (row.largest - logit) * (row.scale * (16.0f / kLog2E));
  return depth < kBuckets - 1 ? static_cast<int>(depth) : kBuckets - 1;
}

// Where top-k and top-p end.
Last last_of(const Row& row, std::vector<int64_t>& tokens) {
  Buckets buckets;
  double total = 0.0;
  each_weights(row, [&](int64_t first, const float* weights, int n) {
    for (int i = 0; i < n; ++i) {
      const int bucket = bucket_of(row, row.logits[first + i]);
      ++buckets.count[bucket];
      buckets.mass[bucket] += weights[i];
    }
  });
  Last last;
  for (int pass = 0; pass < 2; ++pass) {  // top-k, then top-p of what it left
    const bool by_count = pass == 0;
    if (by_count ? row.top_k == 0 : row.top_p >= 1.0) continue;
    if (!by_count && row.top_k == 0) {
      for (const double mass : buckets.mass) total += mass;
    }
    const double goal = by_count ? static_cast<double>(row.top_k) : row.top_p * total;
    double before = 0.0, mass_before = 0.0;  // of the buckets above
    int bucket = 0;
    for (; bucket < kBuckets - 1; ++bucket) {
      const double held = by_count ? buckets.count[bucket] : buckets.mass[bucket];
      if (before + held >= goal) break;
      before += held;
      mass_before += buckets.mass[bucket];
    }
    tokens.clear();
    for (int64_t token = 0; token < row.size; ++token) {
      if (bucket_of(row, row.logits[token]) == bucket && last.allows(row.logits[token], token)) {
        tokens.push_back(token);
      }
    }
    std::sort(tokens.begin(), tokens.end(), [&](int64_t a, int64_t b) {
      return row.logits[a] != row.logits[b] ? row.logits[a] > row.logits[b] : a < b;
    });
    // Ranked one by one until the goal is reached; the token that reaches it is in.
    for (const int64_t token : tokens) {
      const double weight = std::exp(row.z(token));
      last = Last{row.logits[token], token};
      before += by_count ? 1.0 : weight;
      mass_before += weight;
      if (before >= goal) break;
    }
    total = mass_before;
    if (by_count) {  // what top-p sees of the last bucket is what top-k left
      buckets.mass[bucket] = 0.0;
      for (const int64_t token : tokens) {
        if (last.allows(row.logits[token], token)) buckets.mass[bucket] += std::exp(row.z(token));
      }
    }
  }
  return last;
}

// The token that wins among those that `last` and min-p allow.
int64_t winner(const Row& row, const Stream& stream, const Last& last) {
  alignas(64) float weights[kTokens];
  alignas(64) uint32_t bits[kTokens];
  // Below a winner's exp(z) / E nobody wins. The slack is far above the rounding of float.
  float bound = 0.0f;
  double best = -std::numeric_limits<double>::infinity();
  int64_t found = -1;
  for (int64_t first = 0; first < row.size; first += kTokens) {
    const int n = static_cast<int>(std::min<int64_t>(kTokens, row.size - first));
    const float* logits = row.logits + first;
    vf most = zero();
    for (int i = 0; i < n; i += kLanes) {
      const int part = std::min(kLanes, n - i);
      const vf logit = part == kLanes ? load(logits + i) : load_part(logits + i, part);
      const vf weight = select(less(logit, set1(last.logit)), zero(), row.weight(logit));
      store(weights + i, weight);
      most = max(most, weight);
    }
    if (maximum(most) < bound * 0.5f) continue;  // not even with the smallest word
    noise_bits(stream, first, bits);
    for (int i = 0; i < n; ++i) {
      if (weights[i] < bound * (static_cast<float>(bits[i]) + 0.5f)) continue;
      const int64_t token = first + i;
      const double z = row.z(token);
      if (!last.allows(logits[i], token) || logits[i] == kNegativeInfinity) continue;
      if (row.min_p > 0.0 && std::exp(z) < row.min_p) continue;
      const double score = z + gumbel(bits[i]);
      if (score <= best) continue;
      best = score;
      found = token;
      bound = static_cast<float>(std::exp(score) * 0.999 * 0x1p-32);
    }
  }
  return found;
}

}  // namespace
}  // namespace quire

// logits: rows of `vocab_size` floats with a stride, none NaN, the largest of a row finite. Draw i is
// from row rows[i] and goes to token_ids[i]. top_k 0, top_p 1 and min_p 0 are off; temperature > 0.
QUIRE_API int quire_draw(const float* logits, int64_t stride, int64_t vocab_size,
                         const int64_t* rows, int64_t num_draws, const double* temperature,
                         const int64_t* top_k, const double* top_p, const double* min_p,
                         const uint64_t* seeds, const int64_t* sample_indices,
                         const int64_t* positions, int64_t* token_ids, quire::Team* team) {
  using namespace quire;
  parallel_for(num_draws, 1, team, [&](int64_t i) {
    thread_local std::vector<int64_t> tokens;
    const float* row_logits = logits + rows[i] * stride;
    const Row row{row_logits, vocab_size, temperature[i], top_p[i], min_p[i],
                  top_k[i] < vocab_size ? top_k[i] : 0, largest_of(row_logits, vocab_size),
                  static_cast<float>(std::min(kLog2E / temperature[i], 1e30))};
    const Stream stream{{static_cast<uint32_t>(seeds[i]), static_cast<uint32_t>(seeds[i] >> 32)},
                        static_cast<uint32_t>(positions[i]),
                        static_cast<uint32_t>(sample_indices[i])};
    const bool filtered = row.top_k > 0 || row.top_p < 1.0;
    token_ids[i] = winner(row, stream, filtered ? last_of(row, tokens) : Last{});
  });
  return 0;
}
