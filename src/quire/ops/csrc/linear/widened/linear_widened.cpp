// Widens some panels at a time and multiplies them like those of linear.cpp.
#include "linear/widened/widened.h"

#include <vector>

#include "linear/arithmetic.h"
#include "linear/integers/rotation.h"

namespace quire::linear {
namespace {

// Bytes of weights to widen at a time. With few rows the caches of a core hold them; with many,
// there are so many that rows are seldom gathered again.
constexpr int64_t kFewRows = 32;
constexpr int64_t kBytesFewRows = 512 << 10, kBytesManyRows = 8 << 20;

// Returns the biases of `width` columns from `column` on; for a gated layer those of both halves,
// in `both`.
const float* biases_of(const Problem& problem, int64_t column, int64_t width,
                       std::vector<float>& both) {
  if (problem.bias == nullptr || !problem.outputs.gated()) {
    return problem.bias == nullptr ? nullptr : problem.bias + column;
  }
  const float* up = problem.bias + problem.outputs.part();
  both.assign(problem.bias + column, problem.bias + column + width);
  both.insert(both.end(), up + column, up + column + width);
  return both.data();
}

// Returns 0, or 2 without memory for widened panels.
template <class W, class E, class Y>
int multiply_panels(const Problem& problem, const void* matrix, Widen<W> widen, const E* x, Y* y) {
  struct Widened;
  const Outputs& outputs = problem.outputs;
  const int64_t in_turn = outputs.panels_in_turn(), groups = outputs.panels() / in_turn;
  const int64_t elements = panel_elements(problem.depth);
  const int64_t group_bytes = in_turn * elements * static_cast<int64_t>(sizeof(W));
  const int64_t threads = team_size(problem.team);
  const int64_t wanted =
      problem.rows <= kFewRows ? threads * kBytesFewRows : std::max(kBytesManyRows, group_bytes);
  const int64_t most = std::clamp(wanted / group_bytes, std::min(threads, groups), groups);
  W* widened = static_cast<W*>(thread_scratch<Widened>(most * group_bytes));
  if (widened == nullptr) return 2;
  std::vector<float> both;
  std::vector<Y> halves;  // for some columns, where no gate joins them
  for (int64_t first = 0; first < groups; first += most) {
    const int64_t count = std::min(most, groups - first), column = first * kWidth;
    parallel_for(count * in_turn, kWorkPerTask / (elements + 1) + 1, problem.team, [&](int64_t i) {
      widen(matrix, first * in_turn + i, widened + i * elements);
    });
    Problem part = problem;
    const int64_t width = std::min(count * kWidth, outputs.part() - column);
    const bool apart = outputs.gate == kApart;
    part.outputs.count = in_turn * width;
    part.outputs.y_stride = apart ? 2 * width : outputs.stride();
    if (apart) halves.resize(problem.rows * 2 * width);
    Y* const to = apart ? halves.data() : y + column;
    part.bias = biases_of(problem, column, width, both);
    const int failed = multiply_any(part, x, static_cast<const W*>(widened), to);
    if (failed != 0) return failed;
    for (int64_t half = 0; apart && half < 2 * problem.rows; ++half) {
      Y* const row = y + half / 2 * outputs.stride() + half % 2 * outputs.part() + column;
      std::copy_n(to + half * width, width, row);
    }
  }
  return 0;
}

// Returns x rotated in blocks of `block`, contiguous; null without memory.
template <class E>
const E* rotated(const Problem& problem, const E* x, int64_t block) {
  struct Rotated;
  const int64_t depth = problem.depth;
  const int64_t bytes = problem.rows * depth * static_cast<int64_t>(sizeof(E));
  E* const all = static_cast<E*>(thread_scratch<Rotated>(bytes));
  if (all == nullptr) return nullptr;
  const vf factor = set1(1.0f / rotation_part(block));
  std::atomic<bool> failed{false};
  parallel_for(problem.rows, kWorkPerTask / 8 / depth + 1, problem.team, [&](int64_t row) {
    auto* const numbers = linear_int::rotated_rows(depth);
    if (numbers == nullptr) return failed.store(true, std::memory_order_relaxed);
    linear_int::rotate_row(x + row * problem.x_stride, numbers, depth, block);
    for (int64_t k = 0; k < depth; k += kLanes) {
      store(all + row * depth + k, mul(load(&numbers->number + k), factor));
    }
  });
  return failed.load(std::memory_order_relaxed) ? nullptr : all;
}

template <class E, class Y>
int multiply_rows(Problem problem, const Widening& widening, int64_t rotation,
                  int32_t weight_dtype, const E* x, Y* y) {
  if (rotation != 1) {
    x = rotated(problem, x, rotation);
    if (x == nullptr) return 2;
    problem.x_stride = problem.depth;
  }
  int failed = 0;
  const int unknown = dispatch(static_cast<DType>(weight_dtype), [&](auto* weight) {
    failed = multiply_panels(problem, widening.matrix, widening.to(weight), x, y);
  });
  return unknown != 0 ? unknown : failed;
}

}  // namespace

int multiply_widened(const Problem& problem, const Widening& widening, int64_t rotation,
                     int32_t weight_dtype, int32_t x_dtype, int32_t y_dtype, const void* x,
                     void* y) {
  if (problem.rows == 0) return 0;
  int failed = 0;
  const int unknown = dispatch_result(x_dtype, y_dtype, [&](auto* x_tag, auto* y_tag) {
    using E = std::remove_pointer_t<decltype(x_tag)>;
    failed = multiply_rows(problem, widening, rotation, weight_dtype, static_cast<const E*>(x),
                           static_cast<decltype(y_tag)>(y));
  });
  return unknown != 0 ? unknown : failed;
}

}  // namespace quire::linear
