// Attention over an int8 cache as in attention/int8.h, for tiles of many rows of one kv head.
//
// Rows share one prepared key block: K transposed, so that keys are lanes and scores need no sums
// over lanes, and V in pairs. All integer sums are exact, and the float32 operations after them are
// those of few rows, chunk by chunk, so that the bits are the same.
#pragma once

#include "attention/int8.h"

namespace quire::attention {

#if defined(__AVX512F__)

constexpr int kPairWords = 2 * kKeyBlock;  // one pair of words for every key

// Transposes keys first <= key < last of one head, in whole vectors of keys, into ints.keys.
inline void turn_keys(const int8_t* const* k, int head_dim, int first, int last,
                      const IntegerScratch& ints) {
  // Shuffles that move the first two, and the last two, of every four bytes to the upper halves of
  // words.
  const raw low = _mm512_broadcast_i32x4(
      _mm_setr_epi8(-1, 0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13));
  const raw high = _mm512_broadcast_i32x4(
      _mm_setr_epi8(-1, 2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15));
  for (int key = first / kLanes * kLanes; key < last; key += kLanes) {
    for (int d = 0; d < head_dim; d += kTurnedDims) {
      const __mmask64 there = ~__mmask64{0} >> std::max(0, d + kTurnedDims - head_dim);
      raw rows[kLanes], quads[kLanes];
      QUIRE_UNROLL
      for (int i = 0; i < kLanes; ++i) rows[i] = _mm512_maskz_loadu_epi8(there, k[key + i] + d);
      transpose(rows, quads);
      int16_t* to = ints.keys + d / 2 * kPairWords + 2 * key;
      QUIRE_UNROLL
      for (int i = 0; i < kLanes; ++i, to += 2 * kPairWords) {
        const auto words_of = [&](raw places) __attribute__((always_inline)) {
          return _mm512_srai_epi16(_mm512_shuffle_epi8(quads[i], places), 8);
        };
        store_words(to, words_of(low));
        store_words(to + kPairWords, words_of(high));
      }
    }
  }
}

// scores[r][j] = q[r] · k[j] for NR adjacent rows and NV vectors of keys that start at `keys`, as
// floats without steps.
template <int NR, int NV>
QUIRE_INLINE void score_turned(const int16_t* q, int depth, const int16_t* keys, float* scores) {
  vi sums[NR][NV];
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r)
    QUIRE_UNROLL
    for (int j = 0; j < NV; ++j) sums[r][j] = set1_int(0);
  for (int d = 0; d < depth; d += 2, keys += kPairWords) {
    raw key[NV];
    QUIRE_UNROLL
    for (int j = 0; j < NV; ++j) key[j] = load_words(keys + j * kWords);
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r) {
      const raw pair = two_words(q + r * depth + d);
      QUIRE_UNROLL
      for (int j = 0; j < NV; ++j) sums[r][j] = add_pairs(sums[r][j], key[j], pair);
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r)
    QUIRE_UNROLL
    for (int j = 0; j < NV; ++j) store(scores + r * kKeyBlock + j * kLanes, to_float(sums[r][j]));
}

inline void score_wide(const Tile& tile, const Range& range, const Scratch& scratch) {
  each_rows<8>(tile.rows, [&](int row, auto count) {
    const int first = range.low(tile, row), last = range.high(tile, row + count - 1);
    const int16_t* q = scratch.integers.q + int64_t{row} * tile.depth();
    const auto score = [&](int key, auto vectors) {
      score_turned<count, vectors>(q, tile.depth(), scratch.integers.keys + 2 * key,
                                   scratch.scores + row * kKeyBlock + key);
    };
    int key = first / kLanes * kLanes;
    for (; key + kLanes < last; key += 2 * kLanes) score(key, std::integral_constant<int, 2>());
    if (key < last) score(key, std::integral_constant<int, 1>());
  });
}

// acc[r][d …] += step · Σ_k weights[r][k] · v[k][d …] for NR adjacent rows and kWords dims, chunk
// by chunk over the keys first <= k < last. fresh: acc counts as 0 and is not read. put(r, half,
// sums) receives the new acc.
template <int NR, class F>
QUIRE_INLINE void weigh_wide(const Tile& tile, const IntegerScratch& ints, int row, int first,
                             int last, int d, const float* acc, bool fresh, F&& put) {
  constexpr int kSize = kChunk<int8_t>;
  const int halves = d + kLanes < tile.value_width ? 2 : 1, depth = tile.depth();
  const int16_t* weights = ints.weights + int64_t{row} * kKeyBlock;
  const int16_t* values = ints.values + 2 * d;
  vf total[NR][2];
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r) {
    total[r][0] = fresh ? zero() : load(acc + r * tile.value_width);
    total[r][1] = halves == 2 && !fresh ? load(acc + r * tile.value_width + kLanes) : zero();
  }
  for (int key = first / 2 * 2; key < last;) {
    const int end = std::min(last, key / kSize * kSize + kSize);
    vi sums[NR][2];
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r) sums[r][0] = sums[r][1] = set1_int(0);
    for (; key < end; key += 2) {
      const int16_t* two = values + int64_t{key} * depth;
      const raw low = load_words(two), high = load_words(two + kWords);
      QUIRE_UNROLL
      for (int r = 0; r < NR; ++r) {
        const raw pair = two_words(weights + r * kKeyBlock + key);
        sums[r][0] = add_pairs(sums[r][0], low, pair);
        sums[r][1] = add_pairs(sums[r][1], high, pair);
      }
    }
    QUIRE_UNROLL
    for (int r = 0; r < NR; ++r) {
      const vf step = set1(ints.weight_step[row + r]);
      QUIRE_UNROLL
      for (int half = 0; half < 2; ++half)
        total[r][half] = fma(step, to_float(sums[r][half]), total[r][half]);
    }
  }
  QUIRE_UNROLL
  for (int r = 0; r < NR; ++r) {
    put(r, 0, total[r][0]);
    if (halves == 2) put(r, 1, total[r][1]);
  }
}

// Weighs V for all rows. If scratch.out is set, the last key block writes the outputs directly,
// which hides the latency of the stores.
inline void weigh_wide(const Tile& tile, const Range& range, const Scratch& scratch) {
  const bool fresh = range.block <= tile.low(0) || range.block % kSpan == 0;
  const bool finish = scratch.out.first != nullptr && tile.end() <= range.block + kKeyBlock;
  each_rows<4>(tile.rows, [&](int row, auto count) {
    const int first = range.low(tile, row), last = range.high(tile, row + count - 1);
    bf16* out[count];
    vf inverse[count];
    for (int r = 0; finish && r < count; ++r) {
      const int token = (row + r) / tile.group, head = (row + r) % tile.group;
      out[r] = scratch.out.first + token * scratch.out.stride + int64_t{head} * tile.head_dim;
      inverse[r] = set1(1.0f / scratch.span.sum[row + r]);
    }
    for (int d = 0; d < tile.head_dim; d += kWords) {
      float* acc = scratch.span.acc + row * tile.value_width + d;
      weigh_wide<count>(tile, scratch.integers, row, first, last, d, acc, fresh,
                        [&](int r, int half, vf total) __attribute__((always_inline)) {
                          const int at = half * kLanes, dims = tile.head_dim - d - at;
                          if (!finish) return store(acc + r * tile.value_width + at, total);
                          store_result(total, inverse[r], scratch.out.bias, d + at, dims,
                                       out[r]);
                        });
    }
  });
}

// Attends one key block of a tile of one kv head. Each step prefetches what the next one reads.
inline void attend_wide_integers(const Tile& tile, const Range& range,
                                 const KeyBlock<int8_t>& block, const int8_t* const* after,
                                 int following, Scratch& scratch) {
  const IntegerScratch& ints = scratch.integers;
  turn_keys(block.k, tile.head_dim, range.from, range.to, ints);
  Ahead<int8_t>(block.v + range.from, range.to - range.from, tile.head_dim).fetch_all();
  score_wide(tile, range, scratch);
  block.load_scales(1, scratch.scales);
  soften_rows(tile, range, scratch);
  pair_values(block.v, 0, tile.head_dim, tile.depth(), range.from / 2 * 2, range.to, ints);
  Ahead<int8_t>(after, following, tile.head_dim).fetch_all();
  weigh_wide(tile, range, scratch);
}

#endif

// Returns whether a tile of integers has many rows. The state of such a tile need not be cleared.
inline bool takes_wide_integers([[maybe_unused]] const Tile& tile) {
#if defined(__AVX512F__)
  return tile.integers && tile.rows >= kCopyRows;
#else
  return false;
#endif
}

// Attends one key block of a tile in the faster way.
inline void attend_integers(const Tile& tile, const Range& range, const KeyBlock<int8_t>& block,
                            const int8_t* const* after, int following, Scratch& scratch) {
#if defined(__AVX512F__)
  if (takes_wide_integers(tile)) {
    return attend_wide_integers(tile, range, block, after, following, scratch);
  }
#endif
  attend_integer_block(tile, range, block, after, following, scratch);
}

}  // namespace quire::attention
