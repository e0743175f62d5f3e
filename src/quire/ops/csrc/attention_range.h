// What a tile of attention is, what it keeps, and which keys its rows see.
#pragma once

#include <algorithm>
#include <type_traits>

#include "attention_keys.h"
#include "attention_softmax.h"

namespace quire::attention {

constexpr int kChunk = 16;  // keys that all heads of a tile take in turn, see attend_block
constexpr int kSpan = 512;
constexpr int kMaxTileRows = 64;  // query rows (tokens times heads) that share the loads of K and V
constexpr int kCopyRows = 8;      // from here on K and V are widened once into scratch
constexpr int kBytes = 64;        // of the vectors of IntegerScratch
static_assert(kSpan % kKeyBlock == 0 && kKeyBlock % kChunk == 0 && kChunk % kLanes == 0);

// Queries and weights as 16-bit integers (attention_int8.h): the upper bytes and, behind them, the
// lower ones; value = 256 · high + low. depth: head_dim rounded up to whole vectors of bytes.
struct IntegerScratch {
  int8_t* q;          // [kv_heads, rows, 2, depth], both signed
  float* q_step;      // [kv_heads, rows]
  int32_t* q_offset;  // [kv_heads, rows], 128 · Σ q
  uint8_t* weights;   // [kv_heads, rows, 2, kKeyBlock]
  float* weight_step;  // [kv_heads, rows]
  int32_t* sums;       // [kv_heads, rows, depth]: Σ w v over the chunks of a key block so far
  int8_t* values;      // [kKeyBlock / 4, depth, 4], of one head: four tokens side by side
};

struct Scratch {
  float* q;       // [kv_heads, rows, width], scaled by scale · log2(e)
  float* scores;  // [kv_heads, rows, kKeyBlock]
  float* wide;    // [kKeyBlock, width]
  State span;
  IntegerScratch integers;  // for tiles that compute with them
};

struct Tile {
  int64_t first_position;  // of the first query
  int kv_heads;            // adjacent ones, computed block by block in turn
  int rows;                // num_tokens · group: query rows of one kv head
  int group;
  int head_dim;
  int width;       // head_dim rounded up to whole vectors
  int64_t window;  // 0: none
  bool integers;   // scores and outputs by exact products of integers

  int depth() const { return (head_dim + kBytes - 1) / kBytes * kBytes; }
  int num_states() const { return kv_heads * rows; }
  int64_t position(int row) const { return first_position + row / group; }
  int64_t low(int row) const {
    const int64_t from = position(row) - window + 1;
    return window > 0 && from > 0 ? from : 0;
  }
};

// Part of one key block, in positions relative to its first key.
struct Range {
  int64_t block;  // position of the block's first key
  int from, to;

  int low(const Tile& tile, int row) const {
    return static_cast<int>(std::max<int64_t>(tile.low(row) - block, from));
  }
  int high(const Tile& tile, int row) const {
    return static_cast<int>(std::min<int64_t>(tile.position(row) + 1 - block, to));
  }
  // The keys of one chunk; empty when there are none.
  Range chunk(int first) const {
    return Range{block, std::max(from, first), std::min(to, first + kChunk)};
  }
};

// Calls body(row, count) over all rows, 4, 2 or 1 at a time.
template <class F>
QUIRE_INLINE void each_rows(int rows, F&& body) {
  int row = 0;
  for (; row + 4 <= rows; row += 4) body(row, std::integral_constant<int, 4>());
  if (row + 2 <= rows) {
    body(row, std::integral_constant<int, 2>());
    row += 2;
  }
  if (row < rows) body(row, std::integral_constant<int, 1>());
}

// Calls body(chunk, head, ahead) for every head of every chunk of a range: the heads take a chunk of
// keys in turn, and meanwhile the next chunk is prefetched in the order of its addresses. source: K
// or V of the block; follow: what is prefetched after it, or null.
template <class E, class F>
QUIRE_INLINE void each_chunk(const Tile& tile, const Range& range, const E* const* source,
                             const E* const* follow, F&& body) {
  for (int first = 0; first < kKeyBlock; first += kChunk) {
    const Range chunk = range.chunk(first);
    if (chunk.from >= chunk.to) continue;
    const E* const* next = first + kChunk < range.to ? source + first + kChunk : follow;
    Ahead<E> ahead(next, kChunk, tile.kv_heads * tile.head_dim);
    for (int head = 0; head < tile.kv_heads; ++head)
      body(chunk, head, next != nullptr ? &ahead : nullptr);
  }
}

template <class E>
inline void soften_keys(const Tile& tile, const Range& range, const KeyBlock<E>& block, int head,
                        Scratch& scratch) {
  HeadScales scales;
  const HeadScales* given = block.scales_of(head, scales) ? &scales : nullptr;
  for (int row = 0; row < tile.rows; ++row)
    soften(tile.width, scratch.scores, head * tile.rows + row, range.low(tile, row),
           range.high(tile, row), given, scratch.span);
}

}  // namespace quire::attention
