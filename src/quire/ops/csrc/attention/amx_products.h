// Products of attention with tile registers, and what they use: the layout of rows in lanes, the
// shapes of the registers, prefetching, and V packed in pairs of tokens. See attention/amx.h.
#pragma once

#if defined(__AMX_BF16__)

#include "attention/batch.h"
#include "linear/tiles.h"

namespace quire::attention {

constexpr int kBlockLanes = kTileRows;
constexpr int kTileTokens = kTileRows;  // per register of keys
constexpr int kKeyTiles = kKeyBlock / kTileTokens;
constexpr int kPairTokens = 2 * kTileTokens;  // per register of V
constexpr int kPairTiles = kKeyBlock / kPairTokens;
constexpr int kTileDims = kTileBytes / sizeof(bf16);  // per register of keys or queries
constexpr int kTileElements = kTileRows * kTileDims;  // bf16 per register
static_assert(kLanes == kBlockLanes);

// Layout of the query rows of some heads in lanes. A unit is the input of one product: rows of one
// head.
struct LaneLayout {
  int rows;      // lanes per unit
  int parts;     // units per head
  int in_block;  // units per block of lanes
  int heads;

  int units() const { return heads * parts; }
  int blocks() const { return (units() + in_block - 1) / in_block; }
  int lane(int unit) const { return unit / in_block * kBlockLanes + unit % in_block * rows; }
  int state(int head, int row) const { return lane(head * parts + row / rows) + row % rows; }
  // Returns whether all rows belong to one head and fill whole registers.
  bool wide() const { return heads == 1 && rows == kBlockLanes; }
};

inline LaneLayout lane_layout(int rows, int heads) {
  if (2 * rows <= kBlockLanes) return {rows, 1, kBlockLanes / rows, heads};
  return {kBlockLanes, (rows + kBlockLanes - 1) / kBlockLanes, 1, heads};
}

// Shapes of the tile registers. Scores: 0 to 3 are sums [tokens, lanes], 4 and 5 keys, 6 and 7
// queries. Outputs: 0 to 3 are sums [lanes, dims], 4 and 5 weights, 6 and 7 values.
class LaneTiles {
 public:
  explicit LaneTiles(int rows) : rows_(rows) {}
  ~LaneTiles() { _tile_release(); }
  LaneTiles(const LaneTiles&) = delete;
  LaneTiles& operator=(const LaneTiles&) = delete;

  void for_scores() { configure(kTileRows, rows_ * 4, kTileRows, kTileBytes, rows_ * 4); }
  void for_outputs() { configure(rows_, kTileBytes, rows_, kTileBytes, kTileBytes); }

 private:
  void configure(int sum_rows, int sum_bytes, int left_rows, int left_bytes, int right_bytes) {
    TileShapes shapes;
    for (const int tile : {0, 1, 2, 3}) shapes.set(tile, sum_rows, sum_bytes);
    for (const int tile : {4, 5}) shapes.set(tile, left_rows, left_bytes);
    for (const int tile : {6, 7}) shapes.set(tile, kTileRows, right_bytes);
    shapes.load();
  }

  int rows_;
};

// Prefetches queued rows in order, as many lines per call as requested. They go into the
// second-level cache: they exceed the first.
class Lines {
 public:
  Lines() = default;
  // Queues `count` rows of `bytes` each, `stride` elements apart.
  template <class E>
  void add(const E* first, int64_t stride, int count, int64_t bytes) {
    const int64_t step = stride * int64_t{sizeof(E)};
    const bool one = step == bytes;  // rows are adjacent in memory
    pieces_[last_++] = {reinterpret_cast<const char*>(first), step, one ? 1 : count,
                        one ? count * bytes : bytes};
  }
  QUIRE_INLINE void fetch(int lines) {
    if (at_ == last_) return;
    const int64_t wanted = int64_t{lines} * kLine;
    if (done_ + wanted < pieces_[at_].bytes) {
      const char* from = pieces_[at_].row + done_;
      done_ += wanted;
      for (const char* end = from + wanted; from < end; from += kLine) ask(from);
    } else {
      fetch_over_rows(lines);
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  struct Piece {
    const char* row;
    int64_t stride;
    int count;
    int64_t bytes;
  };

  QUIRE_INLINE static void ask(const char* line) { _mm_prefetch(line, _MM_HINT_T1); }

  [[gnu::noinline]] void fetch_over_rows(int lines) {
    for (; lines > 0 && at_ < last_; --lines) {
      Piece& piece = pieces_[at_];
      ask(piece.row + done_);
      done_ += kLine;
      if (done_ < piece.bytes) continue;
      done_ = 0;
      piece.row += piece.stride;
      if (--piece.count == 0) ++at_;
    }
  }

  Piece pieces_[2 * kKeyTiles];
  int at_ = 0, last_ = 0;
  int64_t done_ = 0;
};

// Operands of one product of scores; the result is [tokens, lanes of the unit].
struct ScoreTile {
  const bf16* k;
  const bf16* q;
  float* scores;
};

// Computes kCount tiles, each over all dims. kShared: all take the queries of the first.
template <int kCount, bool kShared>
QUIRE_INLINE void score_tiles(const ScoreTile* tiles, int64_t stride, int rows, int steps,
                              Lines* ahead, int lines) {
  const int64_t k_bytes = stride * sizeof(bf16), q_bytes = rows * 4;
  order_memory();
  _tile_zero(0);
  if constexpr (kCount > 1) _tile_zero(1);
  if constexpr (kCount > 2) _tile_zero(2);
  if constexpr (kCount > 3) _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    auto keys = [&](int i) { return tiles[i].k + step * kTileDims; };
    auto queries = [&](int i) { return tiles[i].q + int64_t{step} * kTileDims * rows; };
    ahead->fetch(lines);
    _tile_loadd(6, queries(0), q_bytes);
    _tile_loadd(4, keys(0), k_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kCount > 1) {
      ahead->fetch(lines);
      _tile_loadd(5, keys(1), k_bytes);
      if constexpr (kShared) {
        _tile_dpbf16ps(1, 5, 6);
      } else {
        _tile_loadd(7, queries(1), q_bytes);
        _tile_dpbf16ps(1, 5, 7);
      }
    }
    if constexpr (kCount > 2) {
      ahead->fetch(lines);
      _tile_loadd(4, keys(2), k_bytes);
      if constexpr (!kShared) _tile_loadd(6, queries(2), q_bytes);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (kCount > 3) {
      ahead->fetch(lines);
      _tile_loadd(5, keys(3), k_bytes);
      if constexpr (kShared) {
        _tile_dpbf16ps(3, 5, 6);
      } else {
        _tile_loadd(7, queries(3), q_bytes);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  constexpr int64_t kRowBytes = kBlockLanes * sizeof(float);
  _tile_stored(0, tiles[0].scores, kRowBytes);
  if constexpr (kCount > 1) _tile_stored(1, tiles[1].scores, kRowBytes);
  if constexpr (kCount > 2) _tile_stored(2, tiles[2].scores, kRowBytes);
  if constexpr (kCount > 3) _tile_stored(3, tiles[3].scores, kRowBytes);
  order_memory();
}

template <bool kShared>
inline void score_some(const ScoreTile* tiles, int count, int64_t stride, int rows, int steps,
                       Lines* ahead, int lines) {
  switch (count) {
    case 1: return score_tiles<1, kShared>(tiles, stride, rows, steps, ahead, lines);
    case 2: return score_tiles<2, kShared>(tiles, stride, rows, steps, ahead, lines);
    case 3: return score_tiles<3, kShared>(tiles, stride, rows, steps, ahead, lines);
    case 4: return score_tiles<4, kShared>(tiles, stride, rows, steps, ahead, lines);
  }
}

// acc [lanes of a unit, width] += weights · values over kSteps · kPairTokens tokens, for 32 ·
// kPairs dims. fresh: acc counts as zero and is not read. lines: to prefetch per kLanes dims.
template <int kSteps, int kPairs>
QUIRE_INLINE void weigh_dims(const bf16* values, int64_t step_elements, float* acc, int64_t width,
                             bool fresh, Lines* ahead, int lines) {
  const int64_t row_bytes = width * sizeof(float);
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kPairs > 1) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, acc, row_bytes);
    _tile_loadd(1, acc + kLanes, row_bytes);
    if constexpr (kPairs > 1) {
      _tile_loadd(2, acc + 2 * kLanes, row_bytes);
      _tile_loadd(3, acc + 3 * kLanes, row_bytes);
    }
  }
  _tile_loadd(6, values, kTileBytes);
  _tile_dpbf16ps(0, 4, 6);
  ahead->fetch(lines);
  _tile_loadd(7, values + kTileElements, kTileBytes);
  _tile_dpbf16ps(1, 4, 7);
  ahead->fetch(lines);
  if constexpr (kPairs > 1) {
    _tile_loadd(6, values + 2 * kTileElements, kTileBytes);
    _tile_dpbf16ps(2, 4, 6);
    ahead->fetch(lines);
    _tile_loadd(7, values + 3 * kTileElements, kTileBytes);
    _tile_dpbf16ps(3, 4, 7);
    ahead->fetch(lines);
  }
  if constexpr (kSteps > 1) {
    values += step_elements;
    _tile_loadd(6, values, kTileBytes);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, values + kTileElements, kTileBytes);
    _tile_dpbf16ps(1, 5, 7);
    if constexpr (kPairs > 1) {
      _tile_loadd(6, values + 2 * kTileElements, kTileBytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, values + 3 * kTileElements, kTileBytes);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, acc, row_bytes);
  _tile_stored(1, acc + kLanes, row_bytes);
  if constexpr (kPairs > 1) {
    _tile_stored(2, acc + 2 * kLanes, row_bytes);
    _tile_stored(3, acc + 3 * kLanes, row_bytes);
  }
}

// `dims` of acc and of values, which have no others; rows of acc are `width` apart.
template <int kSteps>
inline void weigh_tiles(const bf16* weights, const bf16* values, int dims, float* acc,
                        int64_t width, bool fresh, Lines* ahead, int lines) {
  order_memory();
  _tile_loadd(4, weights, kTileBytes);
  if constexpr (kSteps > 1) _tile_loadd(5, weights + kTileElements, kTileBytes);
  const int64_t step_elements = int64_t{kPairTokens} * dims;
  int d = 0;
  for (; d + 4 * kLanes <= dims; d += 4 * kLanes)
    weigh_dims<kSteps, 2>(values + d * kPairTokens, step_elements, acc + d, width, fresh, ahead,
                          lines);
  if (d < dims)
    weigh_dims<kSteps, 1>(values + d * kPairTokens, step_elements, acc + d, width, fresh, ahead,
                          lines);
  order_memory();
}

// Transposes 16 by 16 words: out[j][i] = in[i][j]. row_of(i): address of row i of the input. Only
// `lanes` of each row of the output are written.
template <class RowOf>
QUIRE_INLINE void turn_words(RowOf&& row_of, void* out, int64_t out_bytes, __mmask16 lanes) {
  auto quarter = [&](int row, int column) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row_of(row)) + column);
  };
  QUIRE_UNROLL
  for (int column = 0; column < 4; ++column) {
    __m512i x[4];
    QUIRE_UNROLL
    for (int k = 0; k < 4; ++k) {
      x[k] = _mm512_castsi128_si512(quarter(k, column));
      x[k] = _mm512_inserti32x4(x[k], quarter(k + 4, column), 1);
      x[k] = _mm512_inserti32x4(x[k], quarter(k + 8, column), 2);
      x[k] = _mm512_inserti32x4(x[k], quarter(k + 12, column), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    auto put = [&](int k, __m512i row) {
      char* to = static_cast<char*>(out) + (4 * column + k) * out_bytes;
      _mm512_mask_storeu_epi32(to, lanes, row);
    };
    put(0, _mm512_unpacklo_epi64(a, c));
    put(1, _mm512_unpackhi_epi64(a, c));
    put(2, _mm512_unpacklo_epi64(b, d));
    put(3, _mm512_unpackhi_epi64(b, d));
  }
}

// Packs V of kPairTokens tokens of one head into tiles of kLanes columns; row i holds tokens i and
// i + kTileTokens. Two tiles hold 32 dims: columns 4 j to 4 j + 3 are dims 8 j to 8 j + 3 in the
// even tile and dims 8 j + 4 to 8 j + 7 in the odd one; LanePiece::store restores the order.
// usable: one bit per token; other tokens are not read and become 0.
inline void pair_tokens(const bf16* low, const bf16* high, int64_t stride, uint32_t usable,
                        int value_dim, bf16* out, Lines* ahead, int lines) {
  auto put = [&](int i, int d, __m512i a, __m512i b) {
    bf16* to = out + int64_t{d} * kPairTokens + i * kTileDims;
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(to + kTileElements, _mm512_unpackhi_epi16(a, b));
  };
  if (usable == ~uint32_t{0}) {
    for (int i = 0; i < kTileTokens; ++i, low += stride, high += stride) {
      ahead->fetch(lines);
      for (int d = 0; d < value_dim; d += kTileDims)
        put(i, d, _mm512_loadu_si512(low + d), _mm512_loadu_si512(high + d));
    }
    return;
  }
  for (int i = 0; i < kTileTokens; ++i) {
    ahead->fetch(lines);
    const bool first = usable >> i & 1, second = usable >> (i + kTileTokens) & 1;
    for (int d = 0; d < value_dim; d += kTileDims)
      put(i, d, first ? _mm512_loadu_si512(low + i * stride + d) : _mm512_setzero_si512(),
          second ? _mm512_loadu_si512(high + i * stride + d) : _mm512_setzero_si512());
  }
}

}  // namespace quire::attention

#endif
