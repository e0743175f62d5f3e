// Multiplication of rows, each by one factor of a table.
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"
#include "rows/ids.h"

// Replaces x[row] by x[row] · factors[index[row]]. x: rows of `width` > 0 elements with a stride.
// index: null for the first factor everywhere. id_bytes: bytes of an index, 4 or 8. Returns 3 for
// an index outside the factors.
QUIRE_API int quire_rescale_rows(void* x, int64_t stride, int64_t rows, int64_t width,
                                 const void* factors, int64_t num_factors, const void* index,
                                 int32_t id_bytes, int32_t dtype, quire::Team* team) {
  using namespace quire;
  constexpr int64_t kElementsPerTask = 16 * 1024;
  const Ids ids{index, id_bytes};
  if (index != nullptr && !ids.all_within(rows, num_factors)) return 3;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(rows, kElementsPerTask / (width + 1) + 1, team, [&](int64_t row) {
      E* const at = static_cast<E*>(x) + row * stride;
      float factor[kLanes];
      store(factor, load_part(static_cast<const E*>(factors) + (index == nullptr ? 0 : ids[row]), 1));
      const vf by = set1(factor[0]);
      each_two(0, width, [&](int64_t i, auto size) {
        put(at + i, mul(get(at + i, size), by), size);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_rescale_rows)
