// Tiles of attention: their shape, their scratch memory, and the keys that their rows see.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention/ahead.h"
#include "attention/bend.h"
#include "attention/bias.h"
#include "attention/keys.h"
#include "attention/softmax.h"

namespace quire::attention {

// Keys per chunk, which the heads of a tile take in turn (each_chunk). A chunk of 8 heads of 128
// dims is 16 KiB, which leaves room for the queries in L1.
template <class E>
constexpr int kChunk = 16 / sizeof(E);
// Twice that for int8: sums of integers become floats once per chunk. 16 and 64 measured worse.
template <>
constexpr int kChunk<int8_t> = 32;
// Keys of V whose loads are separate instructions. A single load that steps from key to key seems
// to make the hardware prefetcher go on at that distance, past the end of the block.
constexpr int kUnrolledKeys = 8;
constexpr int kSpan = 512;
constexpr int kMaxTileRows = 64;  // query rows (tokens times heads) that share the loads of K and V
constexpr int kLargeTileRows = 128;  // same, where that leaves enough tiles
constexpr int kCopyRows = 17;  // with this many rows, K and V are widened once into scratch
constexpr int kLatentCopyRows = 8;  // same, of K and V of two widths: many heads share them
static_assert(kSpan % kKeyBlock == 0);

// Queries and weights as 16-bit integers (attention/int8.h). depth: head_dim rounded up to whole
// vectors of words.
struct IntegerScratch {
  int16_t* q;          // [kv_heads, rows, depth]
  float* q_step;       // [kv_heads, rows]
  int16_t* weights;    // [kv_heads, rows, kKeyBlock]
  float* weight_step;  // [kv_heads, rows]
  // Shared by the rows of one head. Both use the same memory: values are needed after the scores.
  int16_t* keys;    // [turned_depth / 2, kKeyBlock, 2]: two dims of a token side by side
  int16_t* values;  // [kKeyBlock / 2, depth, 2]: one dim of two tokens side by side
};

constexpr int kTurnedDims = 4 * kLanes;  // dims of a key transposed at once
constexpr int integer_depth(int head_dim) {
  return (head_dim + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
}
constexpr int turned_depth(int head_dim) {
  return (head_dim + kTurnedDims - 1) / kTurnedDims * kTurnedDims;
}

// Destination of the outputs of a tile of one kv head.
struct Outputs {
  bf16* first;        // null: none yet
  int64_t stride;     // elements per token
  const float* bias;  // [head_dim], bias of V, or null
};

struct Scratch {
  float* q;       // [kv_heads, rows, width], scaled by scale · log2(e), unless queries are integers
  float* scores;  // [kv_heads, rows, kKeyBlock]
  float* wide;    // [kKeyBlock, width]
  State span;
  HeadScales* scales;       // [kv_heads], int8 cache only
  IntegerScratch integers;  // for tiles of integers
  KeyBias key_bias;
  float* query;         // [width], one query row
  float* bias_factors;  // [kv_heads, rows, 2 · key_bias.count]
  float* bias_scores;   // [kv_heads, rows, kKeyBlock]
  Outputs out = {};     // for many rows of integers, with the last key block

  // Returns what the scores of a state with a key block lack (score_biases), or null.
  const float* lacking(int state) const {
    return key_bias.count == 0 ? nullptr : bias_scores + state * kKeyBlock;
  }
};

constexpr int copy_rows(int head_dim, int value_dim) {
  return head_dim == value_dim ? kCopyRows : kLatentCopyRows;
}

struct Tile {
  int64_t first_position;  // position of the first query
  const int32_t* last;     // last key that each query sees; null: the one at its own position
  int kv_heads;            // adjacent; they take every key block in turn
  int rows;                // num_tokens · group: query rows of one kv head
  int group;
  int head_dim, value_dim;  // widths of K and V
  int width, value_width;   // both rounded up to whole vectors
  int64_t window;           // 0: none
  bool integers;            // scores and outputs by exact integer products
  bool one_plane;           // V is the first part of K
  bool two_scales;          // see Batch
  Bend bend;       // starts at the first query head of the tile

  int depth() const { return integer_depth(head_dim); }
  int num_states() const { return kv_heads * rows; }
  int64_t position(int row) const { return first_position + row / group; }
  int64_t last_key(int row) const { return last == nullptr ? position(row) : last[row / group]; }
  int64_t end() const { return last_key(rows - 1) + 1; }
  // Returns whether K and V are widened once into scratch, multiplied by two scales if there are.
  bool copies() const {
    return two_scales || rows >= copy_rows(head_dim, value_dim);
  }
  // Returns cap and slope of a row of one kv head for the key block at `block`.
  RowBend bend_of(int head, int row, int64_t block) const {
    return bend.row(int64_t{head} * group + row % group, block - position(row));
  }
  int64_t low(int row) const {
    const int64_t from = position(row) - window + 1;
    return window > 0 && from > 0 ? from : 0;
  }
};

// Stores one vector of an output at out[d …], where `dims` elements are left: total · inverse, plus
// the bias of V that the cache lacks.
template <class E>
QUIRE_INLINE void store_result(vf total, vf inverse, const float* bias, int d, int dims, E* out) {
  const bool whole = dims >= kLanes;
  const vf x = bias == nullptr
                   ? mul(total, inverse)
                   : fma(total, inverse, whole ? load(bias + d) : load_part(bias + d, dims));
  whole ? store(out + d, x) : store_part(out + d, x, dims);
}

// Part of one key block, in positions relative to its first key.
struct Range {
  int64_t block;  // position of the block's first key
  int from, to;

  int low(const Tile& tile, int row) const {
    return static_cast<int>(std::max<int64_t>(tile.low(row) - block, from));
  }
  int high(const Tile& tile, int row) const {
    return static_cast<int>(std::min<int64_t>(tile.last_key(row) + 1 - block, to));
  }
  // Returns the number of keys before the second chunk of `size`.
  int first_chunk(int size) const { return std::min(size - from % size, to - from); }
  // Returns the keys of the chunk at `first`; empty when there are none.
  Range chunk(int first, int size) const {
    return Range{block, std::max(from, first), std::min(to, first + size)};
  }
};

// Calls body(k) for the first key of every vector of keys that overlaps the range.
template <class F>
QUIRE_INLINE void each_vector(const Range& range, F&& body) {
  for (int k = range.from / kLanes * kLanes; k < range.to; k += kLanes) body(k);
}

// Calls body(row, count) for all rows from `row` on: Most at a time, then half as many, and so on.
template <int Most = 4, class F>
QUIRE_INLINE void each_rows(int rows, F&& body, int row = 0) {
  for (; row + Most <= rows; row += Most) body(row, std::integral_constant<int, Most>());
  if constexpr (Most > 1) each_rows<Most / 2>(rows, body, row);
}

// Calls body(chunk, head, ahead) for every head of every chunk of a range. The heads take a chunk
// of keys in turn while the next chunk is prefetched. source: K or V of the block. follow:
// `following` rows to prefetch after the last chunk.
template <class E, class F>
QUIRE_INLINE void each_chunk(const Tile& tile, const Range& range, const E* const* source,
                             const E* const* follow, int following, F&& body) {
  constexpr int kSize = kChunk<E>;
  static_assert(kKeyBlock % kSize == 0);
  for (int first = range.from / kSize * kSize; first < range.to; first += kSize) {
    const Range chunk = range.chunk(first, kSize);
    const bool more = first + kSize < range.to;
    Ahead<E> ahead(more ? source + first + kSize : follow,
                   more ? std::min(kSize, range.to - first - kSize) : following,
                   tile.kv_heads * tile.head_dim);
    for (int head = 0; head < tile.kv_heads; ++head) {
      ahead.give_turn(head, tile.kv_heads, tile.head_dim);
      body(chunk, head, &ahead);
    }
    ahead.fetch_all();
  }
}

// Computes what the bias of the keys of a range adds to the scores of all rows.
inline void score_biases(const Tile& tile, const Range& range, const Scratch& scratch) {
  const KeyBias& bias = scratch.key_bias;
  if (bias.count == 0) return;
  constexpr int kRows = kLanes == 16 ? 4 : 2;  // rows whose sums fit in registers
  for (int head = 0; head < tile.kv_heads; ++head)
    each_rows<kRows>(tile.rows, [&](int row, auto rows) {
      const int state = head * tile.rows + row;
      bias.score<rows>(scratch.bias_factors + 2 * state * bias.count, range.block,
                       range.low(tile, row), range.high(tile, row + rows - 1),
                       scratch.bias_scores + state * kKeyBlock);
    });
}

template <class E>
inline void soften_keys(const Tile& tile, const Range& range, const KeyBlock<E>& block,
                        Scratch& scratch) {
  // With two scales, K and V were multiplied as they were widened.
  const bool scaled = !tile.two_scales && block.load_scales(tile.kv_heads, scratch.scales);
  score_biases(tile, range, scratch);
  for (int head = 0; head < tile.kv_heads; ++head)
    for (int row = 0; row < tile.rows; ++row) {
      const int state = head * tile.rows + row;
      soften(tile.value_width, scratch.scores, state, range.low(tile, row), range.high(tile, row),
             scaled ? scratch.scales + head : nullptr, scratch.lacking(state),
             tile.bend_of(head, row, range.block), scratch.span);
    }
}

}  // namespace quire::attention
