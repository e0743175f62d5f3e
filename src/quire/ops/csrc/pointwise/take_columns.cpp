// Copies of columns in another order.
#include "native/parallel.h"
#include "native/replay.h"
#include "native/simd.h"
#include "rows/ids.h"

namespace quire {
namespace {

constexpr int64_t kColumnsPerTask = 16 * 1024;

template <class Item>
void take(const Item* x, int64_t stride, const Ids& order, Item* out, int64_t rows, int64_t width,
          Team* team) {
  parallel_for(rows, kColumnsPerTask / (width + 1) + 1, team, [&](int64_t row) {
    const Item* from = x + row * stride;
    Item* to = out + row * width;
    for (int64_t i = 0; i < width; ++i) to[i] = from[order[i]];
  });
}

}  // namespace
}  // namespace quire

// Copies the columns that `order` names. x: rows of `columns` elements with a stride. out:
// contiguous rows of `width`, one column per index of `order`. id_bytes: bytes of an index, 4 or 8.
// Returns 3 for an index outside the columns.
QUIRE_API int quire_take_columns(const void* x, int64_t stride, const void* order, int32_t id_bytes,
                                 void* out, int64_t rows, int64_t columns, int64_t width,
                                 int32_t dtype, quire::Team* team) {
  using namespace quire;
  const Ids ids{order, id_bytes};
  if (!ids.all_within(width, columns)) return 3;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    take(static_cast<const E*>(x), stride, ids, static_cast<E*>(out), rows, width, team);
  });
}
QUIRE_REPLAYABLE(quire_take_columns)
