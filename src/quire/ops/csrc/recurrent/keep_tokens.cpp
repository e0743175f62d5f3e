// Copies the tokens of some rows to where the next steps do not overwrite them. Few rows have any,
// so one thread does it.
#include <cstring>

#include "native/replay.h"
#include "native/simd.h"
#include "native/team.h"

// x: tokens of `width` bytes, `x_stride` bytes apart. kept: room for `num_kept` of them,
// `kept_stride` bytes apart. Row i, of slot slots[i], has tokens starts[i] … starts[i + 1] - 1.
// keep: for each slot, place of the row's first token, or -1 for none. Returns 3 if a row has no
// room.
QUIRE_API int quire_keep_tokens(const void* x, int64_t x_stride, int64_t width, void* kept,
                                int64_t kept_stride, int64_t num_kept, const int64_t* slots,
                                int64_t num_rows, const int32_t* starts, const int64_t* keep,
                                quire::Team*) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t first = keep[slots[i]], start = starts[i], count = starts[i + 1] - start;
    if (first < 0) continue;
    if (first + count > num_kept) return 3;
    for (int64_t t = 0; t < count; ++t) {
      std::memcpy(static_cast<char*>(kept) + (first + t) * kept_stride,
                  static_cast<const char*>(x) + (start + t) * x_stride, width);
    }
  }
  return 0;
}
QUIRE_REPLAYABLE(quire_keep_tokens)
