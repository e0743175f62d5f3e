// Choice of the experts of each token, and their weights.
#include <cmath>
#include <limits>

#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"
#include "native/scratch.h"
#include "pointwise/activations.h"

namespace quire {
namespace {

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLeastSum = 1e-20f;  // LEAST_SUM of ops/moe/route/contract.py
constexpr int64_t kRowsPerTask = 8;

struct Routing {
  int64_t experts, top_k, groups, top_groups, group_best;
  bool softmax, renormalise;
  float scale;
  bool mixes;
  float jitter;
};

// Writes the softmax scores of a row of logits; all are NaN if a logit is.
void softmax(const float* logits, int64_t count, float* scores) {
  float largest = kNone;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, logits[i]);
  each_vector(0, count, [&](int64_t i, auto size) {
    const vf below = sub(set1(largest), get(logits + i, size));
    put(scores + i, exp_of_minus(below), size);
  });
  const float total = sum_over(count, [&](auto total, int64_t i, auto size) {
    return add(total, kept(get(scores + i, size), size));
  });
  const vf divisor = set1(total);
  each_vector(0, count, [&](int64_t i, auto size) {
    put(scores + i, div(get(scores + i, size), divisor), size);
  });
}

void sigmoid(const float* logits, int64_t count, float* scores) {
  each_vector(0, count, [&](int64_t i, auto size) {
    put(scores + i, logistic(get(logits + i, size)), size);
  });
}

// Returns the index of the largest value, the first of equal ones; 0 if all are kNone or NaN.
int64_t largest_of(const float* values, int64_t count) {
  int64_t best = 0;
  float most = kNone;
  for (int64_t i = 0; i < count; ++i) {
    if (values[i] > most) {
      most = values[i];
      best = i;
    }
  }
  return best;
}

// Removes the experts outside the best groups from the choice. group: scratch for scores of groups.
void close_groups(const Routing& routing, float* choice, float* group) {
  const int64_t size = routing.experts / routing.groups;
  for (int64_t g = 0; g < routing.groups; ++g) {
    float first = kNone, second = kNone;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      second = std::max(second, std::min(first, choice[i]));
      first = std::max(first, choice[i]);
    }
    group[g] = routing.group_best == 1 ? first : first + second;
  }
  for (int64_t n = 0; n < routing.top_groups; ++n) {
    group[largest_of(group, routing.groups)] = std::numeric_limits<float>::quiet_NaN();
  }
  for (int64_t g = 0; g < routing.groups; ++g) {
    if (!std::isnan(group[g])) std::fill_n(choice + g * size, size, kNone);
  }
}

// Chooses two experts, each weighted among the logits near its own. The second weight leaves out
// the first expert.
void mix_row(const Routing& routing, const float* logits, float* left, int32_t* ids,
             float* weights) {
  bool broken = false;
  for (int64_t i = 0; i < routing.experts; ++i) {
    left[i] = logits[i];
    broken = broken || std::isnan(logits[i]);
  }
  for (int n = 0; n < 2; ++n) {
    const int64_t best = largest_of(left, routing.experts);
    const float most = left[best];
    float total = 0.0f;
    for (int64_t i = 0; i < routing.experts; ++i) {
      const float gap = (most - logits[i]) / std::max(std::fabs(logits[i]), most);
      if (left[i] != kNone && !(gap > 2 * routing.jitter)) total += std::exp(left[i] - most);
    }
    ids[n] = static_cast<int32_t>(best);
    weights[n] = broken ? std::numeric_limits<float>::quiet_NaN() : routing.scale / total;
    left[best] = kNone;
  }
}

// Chooses the experts of one row. scratch: 3 · experts floats.
void choose_row(const Routing& routing, const float* logits, const float* bias, float* scratch,
                int32_t* ids, float* weights) {
  if (routing.mixes) return mix_row(routing, logits, scratch, ids, weights);
  float* const scores = scratch;
  float* const choice = scratch + routing.experts;
  if (routing.softmax) {
    softmax(logits, routing.experts, scores);
  } else {
    sigmoid(logits, routing.experts, scores);
  }
  bool broken = false;
  for (int64_t i = 0; i < routing.experts; ++i) {
    choice[i] = bias == nullptr ? scores[i] : scores[i] + bias[i];
    broken = broken || std::isnan(logits[i]);
  }
  if (routing.groups > 1) close_groups(routing, choice, choice + routing.experts);
  float total = routing.softmax ? 0.0f : kLeastSum;
  for (int64_t n = 0; n < routing.top_k; ++n) {
    const int64_t best = largest_of(choice, routing.experts);
    ids[n] = static_cast<int32_t>(best);
    weights[n] = scores[best];
    total += scores[best];
    choice[best] = kNone;
  }
  const float divisor = routing.renormalise ? total : 1.0f;
  for (int64_t n = 0; n < routing.top_k; ++n) {
    weights[n] = broken ? std::numeric_limits<float>::quiet_NaN()
                        : weights[n] / divisor * routing.scale;
  }
}

}  // namespace
}  // namespace quire

// Chooses experts by logits, contiguous [rows, experts]. bias, factors: [experts] or null. ids,
// weights: [rows, top_k]. group_best: experts whose scores make that of their group, 1 or 2. score:
// 0 for softmax, 1 for sigmoid, 2 for the mixer with its jitter. Returns 0, or 2 without memory.
QUIRE_API int quire_route(const float* logits, const float* bias, const float* factors,
                          int32_t* ids, float* weights, int64_t rows, int64_t experts,
                          int64_t top_k, int64_t groups, int64_t top_groups,
                          int64_t group_best, int32_t score, int32_t renormalise, float scale,
                          float jitter, quire::Team* team) {
  using namespace quire;
  struct Scores;
  const Routing routing{experts,    top_k,            groups, top_groups, group_best,
                        score == 0, renormalise != 0, scale,  score == 2, jitter};
  std::atomic<bool> failed{false};
  parallel_for(rows, kRowsPerTask, team, [&](int64_t row) {
    auto* const scratch = static_cast<float*>(thread_scratch<Scores>(3 * experts * 4));
    if (scratch == nullptr) return failed.store(true, std::memory_order_relaxed);
    int32_t* const own_ids = ids + row * top_k;
    float* const own_weights = weights + row * top_k;
    choose_row(routing, logits + row * experts, bias, scratch, own_ids, own_weights);
    if (factors == nullptr) return;
    for (int64_t n = 0; n < top_k; ++n) own_weights[n] *= factors[own_ids[n]];
  });
  return failed.load(std::memory_order_relaxed) ? 2 : 0;
}
QUIRE_REPLAYABLE(quire_route)
