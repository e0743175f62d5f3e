// Gives the persistent rows their drawn tokens, so that a captured step leaves nothing of them to
// its caller.
#include <algorithm>

#include "native/replay.h"
#include "native/simd.h"
#include "native/team.h"

// Row slots[i] has its tokens at row_tokens + slots[i] · tokens_stride, and takes token_ids[i]. Of
// slot `spare` nothing changes. positions: null, or takes num_tokens of each row as it is then. 3,
// and nothing has changed, if one of them is full.
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
