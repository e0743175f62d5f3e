// Walk over rows, heads and blocks of operators with a matrix of each head for a state.
//
// Columns of a state do not know each other. So a block of 16 columns, which stays in the first
// cache, takes a piece of the row's tokens before the next block does.
#pragma once

#include "native/parallel.h"
#include "native/rows.h"

namespace quire {

constexpr int64_t kColumns = 16;
constexpr int kVectors = kColumns / kLanes;
constexpr int kSums = 4 / kVectors;  // partial sums of a column: they hide latency
constexpr int64_t kPiece = 16;       // tokens

// Stores without reading what was there, and past the caches. p: aligned to the vector.
#if defined(__AVX512F__)
QUIRE_INLINE void stream(float* p, vf x) { _mm512_stream_ps(p, x); }
#else
QUIRE_INLINE void stream(float* p, vf x) { _mm256_stream_ps(p, x); }
#endif

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// Returns the element at p as a float.
template <class E>
QUIRE_INLINE float number(const E* p) {
  return first_lane(load_part(p, 1));
}

// States of rows: places `stride` floats apart. read, write, num_computed: one number per slot. Row
// i, of slot slots[i], has tokens starts[i] … starts[i + 1] - 1.
struct RowStates {
  float* places;
  int64_t stride;
  const int64_t *read, *write, *slots;
  int64_t num_rows;
  const int32_t* starts;
  const int64_t* num_computed;
};

// Sizes of one state: heads of `blocks` blocks of `block` floats.
struct HeadBlocks {
  int64_t num_heads, blocks, block;
};

// Takes each block of each head of each row through the row's tokens. For each piece of them, calls
// prepare(t, head, tokens, piece), with t the first token, then advance(from, to, piece, t, tokens,
// head, block, streams) for its blocks: from the state `from` to the one `to`, which may be the
// same. streams: nobody needs the new state soon, and `to` is aligned to vectors.
template <class Piece, class Prepare, class Advance>
void each_block(const RowStates& rows, const HeadBlocks& sizes, Team* team, Prepare&& prepare,
                Advance&& advance) {
  // Few heads are cut into groups of blocks, so that each thread has one.
  const int64_t num_heads = sizes.num_heads;
  const int64_t wanted = 2 * team_size(team) / std::max<int64_t>(rows.num_rows * num_heads, 1);
  const int64_t groups = std::clamp<int64_t>(wanted, 1, sizes.blocks);
  parallel_ranges(rows.num_rows * num_heads * groups, 1, team, [&](int64_t task) {
    const int64_t row = task / (num_heads * groups), head = task / groups % num_heads;
    const int64_t first = task % groups * sizes.blocks / groups;
    const int64_t last = (task % groups + 1) * sizes.blocks / groups;
    const int64_t slot = rows.slots[row], of_head = head * sizes.blocks * sizes.block;
    const float* from = rows.places + rows.read[slot] * rows.stride + of_head;
    float* const to = rows.places + rows.write[slot] * rows.stride + of_head;
    if (rows.num_computed[slot] == 0) {
      std::memset(to + first * sizes.block, 0, (last - first) * sizes.block * sizeof(float));
      from = to;
    }
    // A row with one token comes back in the next step, after all weights of the model.
    const int64_t start = rows.starts[row], end = rows.starts[row + 1];
    const bool is_aligned = reinterpret_cast<uintptr_t>(to) % (kLanes * sizeof(float)) == 0;
    const bool streams = is_aligned && end - start == 1;
    Piece piece;
    for (int64_t t = start; t < end; t += kPiece, from = to) {
      const int64_t tokens = std::min<int64_t>(kPiece, end - t);
      prepare(t, head, tokens, piece);
      for (int64_t block = first; block < last; ++block) {
        advance(from + block * sizes.block, to + block * sizes.block, piece, t, tokens, head, block,
                streams);
      }
    }
    if (streams) _mm_sfence();
  });
}

}  // namespace quire
