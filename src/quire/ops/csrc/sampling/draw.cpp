// Draws tokens from rows of logits (draw_row.h).
#include <atomic>
#include <new>
#include <type_traits>
#include <vector>

#include "native/parallel.h"
#include "native/replay.h"
#include "sampling/draw_row.h"

// Draws num_draws tokens. Returns 0, 1 for an unknown element type, or 2 without memory for the
// tokens of a bucket or a widened row; the contents of token_ids then mean nothing.
//
// logits: rows of `vocab_size` elements with a stride. Draw i is from row rows[i] and goes to
// token_ids[i]; -1 where the largest logit is not finite. top_k 0, top_p 1 and min_p 0 are off;
// temperature 0 takes the largest. masks: ceil(vocab_size / 32) words each, a bit per token that
// may be drawn. Draw i has mask mask_rows[i]; a negative number, or null for mask_rows, means no
// mask. Where a mask leaves no token the result is -2.
QUIRE_API int quire_draw(const void* logits, int64_t stride, int64_t vocab_size, int32_t dtype,
                         const int64_t* rows, int64_t num_draws, const double* temperature,
                         const int64_t* top_k, const double* top_p, const double* min_p,
                         const uint64_t* seeds, const int64_t* sample_indices,
                         const int64_t* positions, const uint32_t* masks, const int64_t* mask_rows,
                         int32_t* token_ids, quire::Team* team) {
  using namespace quire;
  std::atomic<int> failed{0};
  const Columns columns{temperature, top_p, min_p, top_k, seeds, sample_indices, positions};
  const int64_t words = (vocab_size + 31) / 32;
  const auto draw = [&](int64_t i, const float* row) {
    const int64_t mask = mask_rows == nullptr ? -1 : mask_rows[i];
    token_ids[i] = mask < 0 ? draw_one<false>(row, nullptr, vocab_size, columns, i)
                            : draw_one<true>(row, masks + mask * words, vocab_size, columns, i);
  };
  const int unknown = dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    parallel_for(num_draws, 1, team, [&](int64_t i) {
      try {  // no exception may leave a thread of the team
        const E* row = static_cast<const E*>(logits) + rows[i] * stride;
        if constexpr (std::is_same_v<E, float>) {
          draw(i, row);
        } else {
          thread_local std::vector<float> widened;
          widened.resize(vocab_size);
          each_vector(0, vocab_size,
                      [&](int64_t at, auto size) { put(&widened[at], get(row + at, size), size); });
          draw(i, widened.data());
        }
      } catch (const std::bad_alloc&) {
        failed = 2;
      }
    });
  });
  return unknown != 0 ? unknown : failed.load();
}
QUIRE_REPLAYABLE(quire_draw)
