// Gathers the inputs of a decode step from the persistent rows, so that a captured step needs from
// its caller the rows' slots alone.
#include <cstring>

#include "native/replay.h"
#include "native/simd.h"
#include "native/team.h"

// Gathers the inputs of rows slots[i]. Their tokens start at row_tokens + slots[i] · tokens_stride,
// their blocks at row_blocks + slots[i] · blocks_stride; each computes the token at
// num_computed[slots[i]]. Of block_table, rows of table_stride, the entries up to this token's are
// written.
QUIRE_API int quire_decode_inputs(const int64_t* slots, int64_t num_rows,
                                  const int64_t* num_computed, const int32_t* row_tokens,
                                  int64_t tokens_stride, const int32_t* row_blocks,
                                  int64_t blocks_stride, int64_t block_size, int32_t* token_ids,
                                  int64_t* positions, int32_t* seq_lens, int64_t* slot_mapping,
                                  int32_t* block_table, int64_t table_stride, quire::Team*) {
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t slot = slots[i], position = num_computed[slot], block = position / block_size;
    const int32_t* blocks = row_blocks + slot * blocks_stride;
    token_ids[i] = row_tokens[slot * tokens_stride + position];
    positions[i] = position;
    seq_lens[i] = static_cast<int32_t>(position + 1);
    slot_mapping[i] = blocks[block] * block_size + position % block_size;
    std::memcpy(block_table + i * table_stride, blocks, (block + 1) * sizeof(int32_t));
  }
  return 0;
}
QUIRE_REPLAYABLE(quire_decode_inputs)
