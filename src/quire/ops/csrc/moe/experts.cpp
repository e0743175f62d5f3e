// Networks of experts for the rows of the tokens that chose them, and the weighted sums of the
// results.
//
// The two layers of an expert are recorded calls of linear kernels (native/replay.h), so any packed
// format will do; they receive their rows here. A task is some rows of one expert through both of
// its layers by one thread. Where tasks would leave threads idle, they run one after the other and
// all threads share each. The result of a row does not depend on that, as linear kernels guarantee.
#include <cstring>

#include "linear/panels.h"
#include "moe/tasks.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"
#include "native/scratch.h"
#include "pointwise/activations.h"

namespace quire::moe {
namespace {

// A call as ops/moe/experts/calls.py records it: the last argument is the team.
constexpr int kMostArguments = 27;
struct LayerCall {
  int (*kernel)(const uint64_t*);
  uint64_t count, x, y, rows;  // number of arguments, and positions of x, y and rows among them
  uint64_t arguments[kMostArguments];

  int operator()(const void* input, void* output, int64_t num_rows, bool alone) const {
    uint64_t words[kMostArguments];
    std::memcpy(words, arguments, count * sizeof(uint64_t));
    words[x] = reinterpret_cast<uint64_t>(input);
    words[y] = reinterpret_cast<uint64_t>(output);
    words[rows] = static_cast<uint64_t>(num_rows);
    if (alone) words[count - 1] = 0;
    return kernel(words);
  }
};
static_assert(sizeof(LayerCall) == 32 * sizeof(uint64_t));

struct Expert {
  LayerCall gate_up, down;
};

struct Job {
  const char* x;  // rows of `width` bytes with a stride in bytes
  int64_t x_stride, width, inner;  // in bytes; inner: a row between the two layers
  const Expert* experts;
  const Picks& picks;
  char* outputs;  // rows of `width` bytes in the order of the picks

  // Returns 0, 2 without memory, or the code of a kernel that failed.
  int compute(const Task& task, bool alone) const {
    struct Gathered;
    struct Inner;
    auto* const inner_rows = static_cast<char*>(thread_scratch<Inner>(task.rows * inner));
    if (inner_rows == nullptr) return 2;
    const char* rows = x + picks.token(task.first) * x_stride;
    if (task.rows > 1) {
      auto* const gathered = static_cast<char*>(thread_scratch<Gathered>(task.rows * width));
      if (gathered == nullptr) return 2;
      for (int64_t r = 0; r < task.rows; ++r) {
        std::memcpy(gathered + r * width, x + picks.token(task.first + r) * x_stride, width);
      }
      rows = gathered;
    }
    const Expert& expert = experts[task.expert];
    const int failed = expert.gate_up(rows, inner_rows, task.rows, alone);
    if (failed != 0) return failed;
    return expert.down(inner_rows, outputs + task.first * width, task.rows, alone);
  }
};

int compute_all(const Job& job, const Tasks& tasks, Team* team) {
  std::atomic<int> failed{0};
  const auto compute = [&](int64_t index, bool alone) {
    const int code = job.compute(tasks[index], alone);
    if (code != 0) failed.store(code, std::memory_order_relaxed);
  };
  if (tasks.keep_busy(team_size(team))) {
    parallel_for(tasks.count(), 1, team, [&](int64_t index) { compute(index, true); });
  } else {
    for (int64_t index = 0; index < tasks.count(); ++index) compute(index, false);
  }
  return failed.load(std::memory_order_relaxed);
}

// Writes the weighted sum of a token's experts, in the order of its choice, plus the shared expert.
template <class E, class Y>
void add_token(const Picks& picks, int64_t token, const float* weights, const E* outputs,
               const E* shared, const float* shared_logit, int64_t width, Y* y) {
  const float gate = shared_logit == nullptr ? 1.0f : first_lane(logistic(set1(*shared_logit)));
  each_vector(0, width, [&](int64_t i, auto size) {
    vf total = zero();
    for (int64_t slot = 0; slot < picks.top_k(); ++slot) {
      const int64_t row = picks.row(token, slot);
      if (row < 0) continue;
      total = add(total, mul(set1(weights[slot]), get(outputs + row * width + i, size)));
    }
    if (shared != nullptr) total = add(total, mul(set1(gate), get(shared + i, size)));
    put(y + i, total, size);
  });
}

}  // namespace
}  // namespace quire::moe

// Computes the experts of all tokens. x: rows of `width` elements with a stride. ids, weights:
// contiguous [tokens, top_k]; ids outside [first, first + num_experts) add nothing. experts: two
// calls each. outputs: scratch, [tokens · top_k, width] of x's type. shared: null or [tokens,
// width] of x's type. shared_logits: null or [tokens]. y: contiguous, of x's type or float32.
// inner: elements between the two layers.
QUIRE_API int quire_experts(const void* x, int64_t x_stride, const int32_t* ids,
                            const float* weights, const void* experts, void* outputs,
                            const void* shared, const float* shared_logits, void* y,
                            int64_t tokens, int64_t top_k, int64_t first, int64_t num_experts,
                            int64_t width, int64_t inner, int32_t dtype, int32_t y_dtype,
                            quire::Team* team) {
  using namespace quire;
  using namespace quire::moe;
  if (tokens == 0) return 0;
  Picks picks;
  Tasks tasks;
  if (!picks.sort(ids, tokens, top_k, first, num_experts) || !tasks.make(picks)) return 2;
  int failed = 0;
  const int unknown = dispatch_result(dtype, y_dtype, [&](auto* x_tag, auto* y_tag) {
    using E = std::remove_pointer_t<decltype(x_tag)>;
    using Y = std::remove_pointer_t<decltype(y_tag)>;
    constexpr int64_t size = sizeof(E);
    const Job job{static_cast<const char*>(x), x_stride * size, width * size, inner * size,
                  static_cast<const Expert*>(experts), picks, static_cast<char*>(outputs)};
    failed = compute_all(job, tasks, team);
    if (failed != 0) return;
    const int64_t grain = kWorkPerTask / 8 / (width * (top_k + 1)) + 1;
    parallel_for(tokens, grain, team, [&](int64_t token) {
      const auto* own = static_cast<const E*>(shared);
      add_token(picks, token, weights + token * top_k, static_cast<const E*>(outputs),
                own == nullptr ? nullptr : own + token * width,
                shared_logits == nullptr ? nullptr : shared_logits + token, width,
                static_cast<Y*>(y) + token * width);
    });
  });
  return unknown != 0 ? unknown : failed;
}
QUIRE_REPLAYABLE(quire_experts)
