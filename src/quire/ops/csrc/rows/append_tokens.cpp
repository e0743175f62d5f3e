// Appends drawn tokens to the persistent rows, so that a captured step leaves no work on them to
// its caller.
#include <algorithm>

#include "native/replay.h"
#include "native/simd.h"
#include "native/team.h"

// Appends token_ids[i] to row slots[i], whose tokens start at row_tokens + slots[i] ·
// tokens_stride. Slot `spare` does not change. positions: null, or receives the new num_tokens of
// each row. Returns 3, with nothing changed, if a row is full.
QUIRE_API int quire_append_tokens(const int64_t* slots, int64_t num_rows, const int32_t* token_ids,
                                  int64_t* num_computed, int64_t* num_tokens, int32_t* row_tokens,
                                  int64_t tokens_stride, int64_t spare, int64_t* positions,
                                  quire::Team*) {
  const auto is_full = [&](int64_t slot) {
    return slot != spare && num_tokens[slot] >= tokens_stride;
  };
  if (std::any_of(slots, slots + num_rows, is_full)) return 3;
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t slot = slots[i];
    if (slot == spare) continue;
    const int64_t at = num_tokens[slot];
    row_tokens[slot * tokens_stride + at] = std::max(token_ids[i], 0);
    num_computed[slot] = at;
    num_tokens[slot] = at + 1;
  }
  for (int64_t i = 0; positions != nullptr && i < num_rows; ++i)
    positions[i] = num_tokens[slots[i]];
  return 0;
}
QUIRE_REPLAYABLE(quire_append_tokens)
