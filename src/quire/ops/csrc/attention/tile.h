// Attention of one tile: some queries of one row, all query heads of some adjacent kv heads.
//
// The result of a query depends on its own keys alone. Keys come in blocks of kKeyBlock at absolute
// positions, and blocks in spans of kSpan tokens. Within a span the softmax is online (Milakov &
// Gimelshein 2018, arXiv:1805.02867), over keys in order; spans are merged in order. Neither the
// number of queries in a tile, nor the number of threads, nor the thread that computes a span
// changes a single operation of a query. So batched = alone and chunked = whole, bit for bit.
#pragma once

#include "attention/int8_wide.h"
#include "attention/range.h"

namespace quire::attention {

// scores[i][j] = q[i] · k[j] for NQ rows of q and NK keys, NQ · NK <= kLanes. k: one address per
// key, `at` elements before the data.
template <int NQ, int NK, class E>
QUIRE_INLINE void dot_block(const float* q, int width, const E* const* k, int64_t at, int head_dim,
                            float* scores, Ahead<E>* ahead) {
  vf dots[kLanes];
  QUIRE_UNROLL
  for (int i = 0; i < kLanes; ++i) dots[i] = zero();
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) {
    if (ahead != nullptr) ahead->template fetch<NK * kLanes>();
    vf keys[NK];
    QUIRE_UNROLL
    for (int j = 0; j < NK; ++j) keys[j] = load(k[j] + at + d);
    QUIRE_UNROLL
    for (int i = 0; i < NQ; ++i) {
      const vf query = load(q + i * width + d);
      QUIRE_UNROLL
      for (int j = 0; j < NK; ++j) dots[i * NK + j] = fma(query, keys[j], dots[i * NK + j]);
    }
  }
  if (d < head_dim) {
    QUIRE_UNROLL
    for (int j = 0; j < NK; ++j) {
      const vf key = load_part(k[j] + at + d, head_dim - d);
      QUIRE_UNROLL
      for (int i = 0; i < NQ; ++i)
        dots[i * NK + j] = fma(load(q + i * width + d), key, dots[i * NK + j]);
    }
  }
  float all[kLanes];
  store(all, sums(dots));
  QUIRE_UNROLL
  for (int i = 0; i < NQ; ++i)
    std::memcpy(scores + i * kKeyBlock, all + i * NK, NK * sizeof(float));
}

// acc[i] += Σ_k weights[i][k] · v[k] over first <= k < last, dims d … d + ND · kLanes - 1.
template <int NQ, int ND, class E>
QUIRE_INLINE void weigh_block(float* acc, int width, const float* weights, const E* const* v,
                              int64_t at, int d, int first, int last, Ahead<E>* ahead) {
  vf sums[NQ][ND];
  QUIRE_UNROLL
  for (int i = 0; i < NQ; ++i)
    QUIRE_UNROLL
    for (int j = 0; j < ND; ++j) sums[i][j] = load(acc + i * width + d + j * kLanes);
  auto add_one = [&](int k) __attribute__((always_inline)) {
    if (ahead != nullptr) ahead->template fetch<ND * kLanes>();
    const E* row = v[k] + at + d;
    asm("" : "+r"(row));  // one address per key: GCC would keep one per vector
    vf value[ND];
    QUIRE_UNROLL
    for (int j = 0; j < ND; ++j) value[j] = load(row + j * kLanes);
    QUIRE_UNROLL
    for (int i = 0; i < NQ; ++i) {
      const vf weight = set1(weights[i * kKeyBlock + k]);
      QUIRE_UNROLL
      for (int j = 0; j < ND; ++j) sums[i][j] = fma(weight, value[j], sums[i][j]);
    }
  };
  int k = first;
  if constexpr (NQ <= 2) {  // more rows leave few registers
    for (; k + kUnrolledKeys <= last; k += kUnrolledKeys) {
      QUIRE_UNROLL
      for (int i = 0; i < kUnrolledKeys; ++i) add_one(k + i);
    }
  }
  for (; k < last; ++k) add_one(k);
  QUIRE_UNROLL
  for (int i = 0; i < NQ; ++i)
    QUIRE_UNROLL
    for (int j = 0; j < ND; ++j) store(acc + i * width + d + j * kLanes, sums[i][j]);
}

template <int NQ, int Most, class E>
QUIRE_INLINE void weigh_rows(float* acc, int width, int value_dim, const float* weights,
                             const E* const* v, int64_t at, int first, int last, Ahead<E>* ahead) {
  constexpr int ND = std::min(Most, kLanes / NQ);
  int d = 0;
  for (; d + ND * kLanes <= value_dim; d += ND * kLanes)
    weigh_block<NQ, ND>(acc, width, weights, v, at, d, first, last, ahead);
  for (; d + kLanes <= value_dim; d += kLanes)
    weigh_block<NQ, 1>(acc, width, weights, v, at, d, first, last, ahead);
  if (d < value_dim) {
    for (int i = 0; i < NQ; ++i) {
      vf total = load(acc + i * width + d);
      for (int k = first; k < last; ++k)
        total =
            fma(set1(weights[i * kKeyBlock + k]), load_part(v[k] + at + d, value_dim - d), total);
      store(acc + i * width + d, total);
    }
  }
}

// Computes the scores of all rows of one kv head with the keys of a range. q: queries of the head.
// k: one address per key, `at` elements before the head. The range lies in one chunk of MaxKeys.
template <int MaxKeys, class E>
inline void score_keys(const Tile& tile, const Range& range, const float* q, const E* const* k,
                       int64_t at, float* scores, Ahead<E>* ahead) {
  each_rows(tile.rows, [&](int row, auto count) {
    constexpr int NQ = count, NK = std::min(MaxKeys, kLanes / NQ);
    const int first = range.low(tile, row), last = range.high(tile, row + NQ - 1);
    for (int key = first / NK * NK; key < last; key += NK)
      dot_block<NQ, NK>(q + row * tile.width, tile.width, k + key, at, tile.head_dim,
                        scores + row * kKeyBlock + key, row == 0 ? ahead : nullptr);
  });
}

// acc += weights · values over the keys of a range, for all rows of one kv head. Rows share the
// keys that all of them see and take the others alone, since a weight of 0 does not hide a value
// that is not finite. Most: vectors of a key at a time. Not inlined: two instances in one function
// get fewer registers, and 7 rows took 4 to 9 % longer (measured).
template <int Most, class E>
[[gnu::noinline]] void weigh_keys(const Tile& tile, const Range& range, const float* weights,
                                  const E* const* v, int64_t at, float* acc, Ahead<E>* ahead) {
  auto weigh = [&](auto count, int row, int first, int last, Ahead<E>* next) {
    if (first >= last) return;
    weigh_rows<count, Most>(acc + row * tile.value_width, tile.value_width, tile.value_dim,
                            weights + row * kKeyBlock, v, at, first, last, next);
  };
  constexpr std::integral_constant<int, 1> alone;
  Ahead<E>* const none = nullptr;
  each_rows(tile.rows, [&](int row, auto count) {
    const int first = range.low(tile, row + count - 1);
    const int last = std::max(first, range.high(tile, row));
    for (int r = row; r < row + count; ++r)
      weigh(alone, r, range.low(tile, r), std::min(first, range.high(tile, r)), none);
    weigh(count, row, first, last, row == 0 ? ahead : nullptr);
    for (int r = row; r < row + count; ++r)
      weigh(alone, r, std::max(last, range.low(tile, r)), range.high(tile, r), none);
  });
}

// On AMD, a tile of up to kStreamingRows rows reads V two cache lines of a key at a time, so that
// few requests are outstanding. Against eight vectors at a time, a Zen 4 takes over a float32 cache
// from memory 8 to 19 % less time with 1 to 3 rows and up to 7 % less with 4, from its caches 2 to
// 14 % more; over a 16-bit cache up to 6 % less. AVX2 code changes for 1 row only.
constexpr int kStreamingRows = 4;
template <class E>
constexpr int kShortBurst = std::min<int>(8, 2 * kCacheLineBytes / (kLanes * sizeof(E)));

// Attends one key block of a tile of few rows: K, then V. It is bound by memory, so the first
// `following` keys of `after`, the next block, are prefetched meanwhile.
template <class E>
inline void attend_block(const Tile& tile, const Range& range, const KeyBlock<E>& block,
                         const E* const* after, int following, Scratch& scratch) {
  each_chunk(tile, range, block.k, block.v + range.from, range.first_chunk(kChunk<E>),
             [&](const Range& chunk, int head, Ahead<E>* ahead) {
               const int row = head * tile.rows;
               score_keys<kChunk<E>>(tile, chunk, scratch.q + row * tile.width, block.k,
                                     int64_t{head} * tile.head_dim,
                                     scratch.scores + row * kKeyBlock, ahead);
             });
  soften_keys(tile, range, block, scratch);
  const bool streams = is_amd() && tile.rows <= kStreamingRows;
  const auto weigh = streams ? weigh_keys<kShortBurst<E>, E> : weigh_keys<8, E>;
  each_chunk(tile, range, block.v, after, following,
             [&](const Range& chunk, int head, Ahead<E>* ahead) {
               const int row = head * tile.rows;
               weigh(tile, chunk, scratch.scores + row * kKeyBlock, block.v,
                     int64_t{head} * tile.value_dim, scratch.span.acc + row * tile.value_width,
                     ahead);
             });
}

// Calls widen(k, to) for each key of a range, and addresses rows of `width` floats; others repeat
// the first.
template <class F>
QUIRE_INLINE void widen_keys(const Range& range, int width, float* out, const float** out_rows,
                             F&& widen) {
  for (int k = 0; k < kKeyBlock; ++k) {
    const bool some = k >= range.from && k < range.to;
    out_rows[k] = out + (some ? k : range.from) * width;
    if (some) widen(k, out + k * width);
  }
}

template <class E>
inline void widen_rows(const E* const* rows, const Range& range, int dims, int width, float* out,
                       const float** out_rows) {
  widen_keys(range, width, out, out_rows, [&](int k, float* to) {
    int d = 0;
    for (; d + kLanes <= dims; d += kLanes) store(to + d, load(rows[k] + d));
    if (d < dims) store(to + d, load_part(rows[k] + d, dims - d));
  });
}

// Widens K of a range.
template <class E>
inline void widen_block(const Tile& tile, const Range& range, const KeyBlock<E>& block, float* out,
                        const float** out_rows) {
  widen_rows(block.k, range, tile.head_dim, tile.width, out, out_rows);
}
inline void widen_block(const Tile& tile, const Range& range, const KeyBlock<int8_t>& block,
                        float* out, const float** out_rows) {
  if (!tile.two_scales)
    return widen_rows(block.k, range, tile.head_dim, tile.width, out, out_rows);
  widen_keys(range, tile.width, out, out_rows, [&](int k, float* to) {
    widen_plane(block.k[k], block.k_scale[k], tile.value_dim, tile.head_dim, to);
  });
}

// Attends one key block of a tile of many rows and one kv head, which is bound by arithmetic.
template <class E>
inline void attend_wide_block(const Tile& tile, const Range& range, const KeyBlock<E>& block,
                              Scratch& scratch) {
  const float* rows[kKeyBlock];
  Ahead<float>* none = nullptr;
  widen_block(tile, range, block, scratch.wide, rows);
  score_keys<kKeyBlock>(tile, range, scratch.q, rows, 0, scratch.scores, none);
  soften_keys(tile, range, block, scratch);
  if (!tile.one_plane)
    widen_rows(block.v, range, tile.value_dim, tile.value_width, scratch.wide, rows);
  weigh_keys<8, float>(tile, range, scratch.scores, rows, 0, scratch.span.acc, none);
}

// Keys of a tile in one key block.
template <class E>
struct LocatedBlock {
  KeyBlock<E> keys;
  Range range;

  // block: position of its first key. The tile sees keys low <= key < end.
  void locate(const Keys<E>& from, int64_t block, int64_t low, int64_t end) {
    const int64_t first = std::max(low, block), last = std::min(end, block + kKeyBlock);
    from.locate(block, first, last, keys);
    range = Range{block, static_cast<int>(first - block), static_cast<int>(last - block)};
  }
};

// Prefetches the first keys of a tile at once: no earlier computation did.
template <class E>
inline void await_keys(const Tile& tile, const LocatedBlock<E>& block) {
  const Range& range = block.range;
  Ahead<E>(block.keys.k + range.from, range.first_chunk(kChunk<E>), tile.kv_heads * tile.head_dim)
      .fetch_all();
}

// Attends one key block of any tile.
template <class E>
inline void attend_keys(const Tile& tile, const Range& range, const KeyBlock<E>& keys,
                        const E* const* after, int keys_after, Scratch& scratch) {
  if (tile.integers) {
    if constexpr (std::is_same_v<E, int8_t>)
      attend_integers(tile, range, keys, after, keys_after, scratch);
  } else if (!tile.copies()) {
    attend_block(tile, range, keys, after, keys_after, scratch);
  } else {
    attend_wide_block(tile, range, keys, scratch);
  }
}

// Computes a tile over one span of tokens into `state`, by attend(range, keys, after, keys_after)
// for each key block. fetched: the previous span has prefetched the first keys. continues: the
// caller takes the next span afterwards, so its first block is prefetched; otherwise that of
// `then`, if there is one.
template <class E, class F>
inline void attend_span(const Tile& tile, const Keys<E>& keys, int64_t span, bool fetched,
                        bool continues, const LocatedBlock<E>* then, const State& state,
                        F&& attend) {
  const int64_t low = std::max(tile.low(0), span * kSpan);
  const int64_t end = tile.end();
  const int64_t high = std::min(end, (span + 1) * kSpan);
  LocatedBlock<E> blocks[2];
  int at = 0;
  blocks[at].locate(keys, low / kKeyBlock * kKeyBlock, low, end);
  if (!fetched) await_keys(tile, blocks[at]);
  const int num_states = tile.num_states();
  if (!takes_wide_integers(tile))
    std::memset(state.acc, 0, sizeof(float) * num_states * tile.value_width);
  std::memset(state.sum, 0, sizeof(float) * num_states);
  for (int row = 0; row < num_states; ++row) state.max[row] = kNegativeInfinity;
  for (;; at ^= 1) {
    const Range& range = blocks[at].range;
    const int64_t following = range.block + kKeyBlock;
    const LocatedBlock<E>* next = continues ? nullptr : then;
    if (following < (continues ? end : high)) {
      blocks[at ^ 1].locate(keys, following, low, end);
      next = &blocks[at ^ 1];
    }
    const E* const* after = next == nullptr ? nullptr : next->keys.k + next->range.from;
    const int keys_after = next == nullptr ? 0 : next->range.first_chunk(kChunk<E>);
    attend(range, blocks[at].keys, after, keys_after);
    if (following >= high) return;
  }
}

}  // namespace quire::attention
