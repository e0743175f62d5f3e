// Embedding: copies rows of a table.
#include <cstring>

#include "rows/ids.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "native/simd.h"

namespace quire {
namespace {

constexpr int64_t kBytesPerTask = 32 * 1024;

}  // namespace
}  // namespace quire

// Copies row ids[i] + offset of the table to row i of out, for each id. table: contiguous rows of
// row_bytes. id_bytes: 4 or 8. Returns 0, or 3 for an id outside the table.
QUIRE_API int quire_embedding(const void* ids, int32_t id_bytes, int64_t offset, const void* table,
                              void* out, int64_t num_ids, int64_t num_rows, int64_t row_bytes,
                              quire::Team* team) {
  using namespace quire;
  const Ids rows{ids, id_bytes, offset};
  if (!rows.all_within(num_ids, num_rows)) return 3;
  parallel_for(num_ids, kBytesPerTask / (row_bytes + 1) + 1, team, [&](int64_t i) {
    std::memcpy(static_cast<char*>(out) + i * row_bytes,
                static_cast<const char*>(table) + rows[i] * row_bytes, row_bytes);
  });
  return 0;
}
QUIRE_REPLAYABLE(quire_embedding)
