// y = W x for each head, each with a matrix of its own, packed as for quire_linear.
#include "linear/arithmetic.h"
#include "linear/layout.h"
#include "native/replay.h"

namespace quire::linear {
namespace {

constexpr int64_t kRowsOfTask = 128;

}  // namespace
}  // namespace quire::linear

// Computes y[t, h] = W[h] x[t, h]. x, y: rows and heads with strides in elements. packed: matrices
// of quire_linear_pack, one after the other. A task is some rows of one head; a row has the bits of
// quire_linear, whatever rows are beside it.
QUIRE_API int quire_linear_by_head(const void* x, int64_t x_stride, int64_t x_head,
                                   const void* packed, void* y, int64_t y_stride, int64_t y_head,
                                   int64_t rows, int64_t heads, int64_t outputs, int64_t depth,
                                   int32_t x_dtype, int32_t weight_dtype, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear;
  const Outputs layout{outputs, kUngated, y_stride};
  const int64_t blocks = (rows + kRowsOfTask - 1) / kRowsOfTask;
  const int64_t size = layout.panels() * panel_elements(depth);
  std::atomic<int> failed{0};
  int unknown = 0;
  const int unknown_weight = dispatch(static_cast<DType>(weight_dtype), [&](auto* weight_tag) {
    using W = std::remove_pointer_t<decltype(weight_tag)>;
    unknown = dispatch(static_cast<DType>(x_dtype), [&](auto* x_tag) {
      using E = std::remove_pointer_t<decltype(x_tag)>;
      parallel_for(heads * blocks, 1, team, [&](int64_t task) {
        const int64_t head = task / blocks, first = task % blocks * kRowsOfTask;
        const Problem problem{std::min(kRowsOfTask, rows - first), layout,  depth,
                              x_stride,                            nullptr, nullptr};
        const int code = multiply_any(
            problem, static_cast<const E*>(x) + first * x_stride + head * x_head,
            static_cast<const W*>(packed) + head * size,
            static_cast<E*>(y) + first * y_stride + head * y_head);
        if (code != 0) failed.store(code, std::memory_order_relaxed);
      });
    });
  });
  return unknown_weight != 0 ? unknown_weight : unknown != 0 ? unknown : failed.load();
}
QUIRE_REPLAYABLE(quire_linear_by_head)
