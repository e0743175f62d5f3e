// y = x Wᵀ + b with float32 or 16-bit weights, packed once.
#include "rows/ids.h"
#include "linear/arithmetic.h"
#include "linear/layout.h"
#include "native/replay.h"

// Packs weight, contiguous [outputs, depth], into panels (linear/layout.h). gate: see
// pointwise/gate.h.
QUIRE_API int quire_linear_pack(const void* weight, void* packed, int64_t outputs, int64_t depth,
                                int32_t dtype, int32_t gate, quire::Team* team) {
  using namespace quire;
  using namespace quire::linear;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using W = std::remove_pointer_t<decltype(tag)>;
    const Outputs all{outputs, gate};
    const int64_t grain = kWorkPerTask / (depth * kWidth + 1) + 1;
    parallel_for(all.panels(), grain, team, [&](int64_t panel) {
      pack_panel(static_cast<const W*>(weight), all, depth, panel, static_cast<W*>(packed));
    });
  });
}

// Copies rows of the packed matrix to out, [num_ids, depth]. Reads one panel per id, in order.
// id_bytes: 4 or 8. Returns 3 for an id outside the table.
QUIRE_API int quire_linear_rows(const void* packed, const void* ids, int32_t id_bytes, void* out,
                                int64_t num_ids, int64_t outputs, int64_t depth, int32_t dtype,
                                quire::Team* team) {
  using namespace quire;
  using namespace quire::linear;
  const Ids rows{ids, id_bytes};
  if (!rows.all_within(num_ids, outputs)) return 3;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using W = std::remove_pointer_t<decltype(tag)>;
    parallel_for(num_ids, kWorkPerTask / 8 / (depth + 1) + 1, team, [&](int64_t i) {
      unpack_row(static_cast<const W*>(packed), depth, rows[i], static_cast<W*>(out) + i * depth);
    });
  });
}
QUIRE_REPLAYABLE(quire_linear_rows)

// Computes y = x Wᵀ + b. x: rows of `depth` elements with a stride. y: [rows, outputs] of x's type
// or float32; for a gated layer half as wide. bias: float32 or null. gate: the packing's. y_stride:
// stride of the rows of y, 0 if they are contiguous.
QUIRE_API int quire_linear(const void* x, int64_t x_stride, const void* packed, const float* bias,
                           void* y, int64_t y_stride, int64_t rows, int64_t outputs, int64_t depth,
                           int32_t x_dtype, int32_t y_dtype, int32_t weight_dtype, int32_t gate,
                           quire::Team* team) {
  using namespace quire;
  using namespace quire::linear;
  const Problem problem{rows, {outputs, gate, y_stride}, depth, x_stride, bias, team};
  int failed = 0, unknown = 0;
  const int unknown_weight = dispatch(static_cast<DType>(weight_dtype), [&](auto* weight_tag) {
    using W = std::remove_pointer_t<decltype(weight_tag)>;
    unknown = dispatch_result(x_dtype, y_dtype, [&](auto* x_tag, auto* y_tag) {
      using E = std::remove_pointer_t<decltype(x_tag)>;
      using Y = std::remove_pointer_t<decltype(y_tag)>;
      failed = multiply_any(problem, static_cast<const E*>(x), static_cast<const W*>(packed),
                            static_cast<Y*>(y));
    });
  });
  return unknown_weight != 0 ? unknown_weight : unknown != 0 ? unknown : failed;
}
QUIRE_REPLAYABLE(quire_linear)
