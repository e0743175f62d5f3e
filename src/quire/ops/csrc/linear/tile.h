// Products of a few rows and a panel in registers, with the instructions available.
//
// An arithmetic names its types, the layout of rows, and the way to add a pair of k to the sums.
// Every output is one chain over K that starts at zero, in the order of k, whatever the tile.
//
// A tile takes one panel at a time, although few rows of several would hide more of the
// instructions' latency: memory streams one panel faster (2 to 9 % less time for 3 to 8 rows, with
// AVX2 for 1 and 2). If all weights are in caches it takes longer: AVX2 up to 1.8 times for 1 or 2
// rows, AVX-512 10 to 15 % more for 3 or 4 rows of 16 bits (measured).
//
// Rows are gathered line by line: K elements 0 … kLine - 1 of every row, then the next kLine of
// every row, and so on, padded with zeros. So a tile reads them in order, at constant distances.
#pragma once

#include <cstring>

#include "linear/layout.h"

namespace quire::linear {

// Rows of a register tile: 24 (10) sums, two weights and one x in 32 (16) registers. With 12 sums
// in 16 registers gcc would have none left to widen 16-bit weights.
constexpr int kVectorRows = kLanes == 16 ? 12 : 5;

// Common part of arithmetics in vector registers; one in tile registers defines these itself.
template <int StreamedRows>
struct Vectors {
  static constexpr int kRows = kVectorRows;  // rows of a tile, at most
  static constexpr int64_t kBeyond = 0;      // bytes that a tile may read past its rows
  // Bytes of gathered rows that stay in the caches while all weights are read.
  static constexpr int64_t kBlockBytes = 3 << 20;
  // Distance at which a tile prefetches weights from memory. Measured best of 4 to 14 KB.
  static constexpr int64_t kAheadBytes = 6144;
  // Tiles of at most this many rows use a line of weights in so little time that they prefetch none
  // where hardware_keeps_up().
  static constexpr int kStreamedRows = StreamedRows;
};

// x and weights as float32, multiplied by fma: even k, then odd k.
template <class Weight>
struct Fma : Vectors<kLanes == 16 ? 2 : 0> {
  using W = Weight;
  using X = float;
  static constexpr int kLine = kLanes;

  template <class E>
  static void put_line(const E* x, int n, float* line) {
    store(line, n == kLine ? load(x) : load_part(x, n));
  }

  template <int R>
  QUIRE_INLINE static void add_pair(const float* x, const W* panel, vf (&sums)[R][2]) {
    add<false>(x, panel, sums);
    add<true>(x + 1, panel, sums);
  }

  template <bool Odd, int R>
  QUIRE_INLINE static void add(const float* x, const W* panel, vf (&sums)[R][2]) {
    vf w[2];
    load_columns<Odd>(panel, w[0], w[1]);
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      const vf value = set1(x[r * kLine]);
      sums[r][0] = fma(value, w[0], sums[r][0]);
      sums[r][1] = fma(value, w[1], sums[r][1]);
    }
  }
};

#if defined(__AVX512BF16__)
// bf16 by bf16: VDPBF16PS adds both products of a pair to a float32, that of the odd k first (Intel
// SDM: round to nearest even, denormals are zeros).
struct Bf16Dot : Vectors<4> {
  using W = bf16;
  using X = bf16;
  static constexpr int kLine = 32;

  static void put_line(const bf16* x, int n, bf16* line) {
    if (n == kLine) {
      std::memcpy(line, x, kLine * sizeof(bf16));
    } else {
      std::memcpy(line, x, n * sizeof(bf16));
      std::memset(line + n, 0, (kLine - n) * sizeof(bf16));
    }
  }

  template <int R>
  QUIRE_INLINE static void add_pair(const bf16* x, const bf16* panel, vf (&sums)[R][2]) {
    const __m512bh w[2] = {(__m512bh)_mm512_loadu_si512(panel),
                           (__m512bh)_mm512_loadu_si512(panel + kWidth)};
    QUIRE_UNROLL
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * kLine, sizeof pair);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
      sums[r][0] = _mm512_dpbf16_ps(sums[r][0], value, w[0]);
      sums[r][1] = _mm512_dpbf16_ps(sums[r][1], value, w[1]);
    }
  }
};
#endif

// Memory to prefetch into the second-level cache: `step` elements per pair of k. The first level is
// left alone: its few miss buffers serve the current loads.
template <class W>
struct Ahead {
  const W* start;
  int64_t step;
};
template <class W>
constexpr int kCacheLine = 64 / sizeof(W);

// Multiplies R gathered rows by a panel: out [R, kWidth]. Row counts that only a single tile has
// fetch whole lines, a step that the compiler can know. The last of several tiles may have as few
// rows; it then fetches more than its piece.
template <class A, int R, bool kFetches>
void multiply_tile(const typename A::X* x, const typename A::W* panel, int64_t pairs,
                   Ahead<typename A::W> ahead, float* out) {
  constexpr int64_t kLinePairs = A::kLine / 2;
  const int64_t step = !kFetches ? 0 : 2 * R < A::kRows ? kPairElements : ahead.step;
  vf sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  for (int64_t left = pairs; left > 0; left -= kLinePairs, x += R * A::kLine) {
    const int count = static_cast<int>(std::min(left, kLinePairs));
    for (int i = 0; i < count; ++i, panel += kPairElements, ahead.start += step) {
      for (int64_t e = 0; e < step; e += kCacheLine<typename A::W>) {
        _mm_prefetch(reinterpret_cast<const char*>(ahead.start + e), _MM_HINT_T1);
      }
      A::add_pair(x + 2 * i, panel, sums);
    }
  }
  for (int r = 0; r < R; ++r) {
    store(out + r * kWidth, sums[r][0]);
    store(out + r * kWidth + kLanes, sums[r][1]);
  }
}

}  // namespace quire::linear
