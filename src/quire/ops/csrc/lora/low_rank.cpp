// Low-rank additions (LoRA) to the outputs of a projection, different for each row.
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "native/parallel.h"
#include "native/replay.h"
#include "native/scratch.h"
#include "native/simd.h"

namespace quire {
namespace {

constexpr int kTogether = 4;              // rows of A that share the loads of x
constexpr int kRows = kLanes == 16 ? 4 : 2;  // rows of one adapter that share its loads
constexpr int kVectors = 4;               // vectors of outputs that a row computes at once
constexpr int64_t kOutputsPerTask = 512;  // a piece of a row: one decode row may be wide
constexpr int64_t kTilesPerTask = 4;

// Rows of one adapter. They need not be adjacent.
struct Tile {
  int64_t adapter, count, rows[kRows];
};

// Tiles of the rows that have an adapter. first is null without memory.
struct Tiles {
  Tiles(const int64_t* slots, int64_t rows, int64_t adapters) {
    const size_t bytes = rows * sizeof(Tile) + adapters * sizeof(Tile*);
    first = static_cast<Tile*>(thread_scratch<Tiles>(bytes + 1));
    if (first == nullptr) return;
    Tile** const open = reinterpret_cast<Tile**>(first + rows);
    std::memset(open, 0, adapters * sizeof(Tile*));
    for (int64_t row = 0; row < rows; ++row) {
      if (slots[row] == 0) continue;
      Tile*& tile = open[slots[row] - 1];
      if (tile == nullptr || tile->count == kRows) {
        tile = first + count++;
        tile->adapter = slots[row] - 1;
        tile->count = 0;
      }
      tile->rows[tile->count++] = row;
    }
  }
  Tile* first;
  int64_t count = 0;
};

// Calls f(n), where the type of n holds the number of rows of the tile.
template <class F>
QUIRE_INLINE void with_count(const Tile& tile, F&& f) {
  switch (tile.count) {
    case 1: return f(std::integral_constant<int, 1>());
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, std::min(3, kRows)>());
    default: return f(std::integral_constant<int, kRows>());
  }
}

// Calls f(index of its first element, vector) over a row of `count` elements; the last vector may
// be padded with zeros.
template <class E, class F>
QUIRE_INLINE void each_vector(const E* row, int64_t count, F&& f) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, load(row + i));
  if (i == count) return;
  E rest[kLanes] = {};
  std::memcpy(rest, row + i, (count - i) * sizeof(E));
  f(i, load(rest));
}

template <class E>
QUIRE_INLINE vf load_part(const E* row, int64_t i, int64_t count) {
  if (i + kLanes <= count) return load(row + i);
  E rest[kLanes] = {};
  std::memcpy(rest, row + i, (count - i) * sizeof(E));
  return load(rest);
}

// out[n][r] = A[r] · x[n] for kCount rows of x and `count` <= kTogether rows of A. The sums of a
// row do not depend on the other rows.
template <int kCount, class E>
void products(const E* a, const E* const* x, int64_t inputs, int64_t count, float* const* out) {
  vf sums[kCount][kTogether];
  for (auto& of_row : sums) {
    for (vf& each : of_row) each = zero();
  }
  const E* rows[kTogether];
  for (int r = 0; r < kTogether; ++r) rows[r] = a + (r < count ? r : count - 1) * inputs;
  each_vector(x[0], inputs, [&](int64_t i, vf first) {
    vf of_a[kTogether];
    QUIRE_UNROLL
    for (int r = 0; r < kTogether; ++r) of_a[r] = load_part(rows[r], i, inputs);
    QUIRE_UNROLL
    for (int n = 0; n < kCount; ++n) {
      const vf values = n == 0 ? first : load_part(x[n], i, inputs);
      QUIRE_UNROLL
      for (int r = 0; r < kTogether; ++r) sums[n][r] = fma(of_a[r], values, sums[n][r]);
    }
  });
  for (int n = 0; n < kCount; ++n) {
    for (int64_t r = 0; r < count; ++r) out[n][r] = sum(sums[n][r]);
  }
}

// y[n] += scale · Σ t[n][r] B[r] for kWide vectors of outputs from `o` on, where `end` are left.
template <int kCount, int kWide, class E>
QUIRE_INLINE void expand_vectors(const E* b, int64_t outputs, const float* const* t, int64_t rank,
                                 float scale, E* const* y, int64_t o, int64_t end) {
  vf total[kCount][kWide];
  for (auto& of_row : total) {
    for (vf& each : of_row) each = zero();
  }
  for (int64_t r = 0; r < rank; ++r) {
    vf of_b[kWide];
    QUIRE_UNROLL
    for (int v = 0; v < kWide; ++v) of_b[v] = load_part(b + r * outputs + o, v * kLanes, end);
    QUIRE_UNROLL
    for (int n = 0; n < kCount; ++n) {
      const vf factor = set1(t[n][r]);
      QUIRE_UNROLL
      for (int v = 0; v < kWide; ++v) total[n][v] = fma(factor, of_b[v], total[n][v]);
    }
  }
  const vf factor = set1(scale);
  for (int n = 0; n < kCount; ++n) {
    for (int v = 0; v < kWide; ++v) {
      E* const to = y[n] + o + v * kLanes;
      const int64_t left = end - v * kLanes;
      const vf value = fma(factor, total[n][v], load_part(y[n] + o, v * kLanes, end));
      if (left >= kLanes) {
        store(to, value);
        continue;
      }
      E rest[kLanes];
      store(rest, value);
      std::memcpy(to, rest, left * sizeof(E));
    }
  }
}

// Expands outputs [first, last) likewise.
template <int kCount, class E>
void expand(const E* b, int64_t outputs, const float* const* t, int64_t rank, float scale,
            E* const* y, int64_t first, int64_t last) {
  int64_t o = first;
  for (; o + kVectors * kLanes <= last; o += kVectors * kLanes) {
    expand_vectors<kCount, kVectors>(b, outputs, t, rank, scale, y, o, last - o);
  }
  for (; o < last; o += kLanes) {
    expand_vectors<kCount, 1>(b, outputs, t, rank, scale, y, o, last - o);
  }
}

}  // namespace
}  // namespace quire

// Computes t = A x for the adapter of each row. x: rows [rows, inputs], strided. slots: [rows], 0
// for none, else 1 + the adapter's index. a: [adapters, parts · rank, inputs]. ranks: [adapters,
// parts]. t: [rows, parts · rank], written as far as the ranks reach. Returns 3 for a slot beyond
// `adapters`, 2 without memory.
QUIRE_API int quire_low_rank_shrink(const void* x, int64_t x_stride, const int64_t* slots,
                                    const void* a, const int64_t* ranks, float* t, int64_t rows,
                                    int64_t inputs, int64_t adapters, int64_t parts, int64_t rank,
                                    int32_t dtype, quire::Team* team) {
  using namespace quire;
  for (int64_t i = 0; i < rows; ++i) {
    if (slots[i] < 0 || slots[i] > adapters) return 3;
  }
  const Tiles tiles(slots, rows, adapters);
  if (tiles.first == nullptr) return 2;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const int64_t groups = (rank + kTogether - 1) / kTogether, per_tile = parts * groups;
    const int64_t at_once = per_tile > 8 ? 4 : kTilesPerTask * per_tile;
    parallel_for(tiles.count * per_tile, at_once, team, [&](int64_t task) {
      const Tile& tile = tiles.first[task / per_tile];
      const int64_t part = task % per_tile / groups, first = task % groups * kTogether;
      const int64_t left = ranks[tile.adapter * parts + part] - first;
      if (left <= 0) return;
      const int64_t line = part * rank + first;
      const E* of_x[kRows];
      float* out[kRows];
      for (int64_t n = 0; n < tile.count; ++n) {
        of_x[n] = static_cast<const E*>(x) + tile.rows[n] * x_stride;
        out[n] = t + tile.rows[n] * parts * rank + line;
      }
      with_count(tile, [&](auto count) {
        products<count>(static_cast<const E*>(a) + (tile.adapter * parts * rank + line) * inputs,
                        of_x, inputs, left < kTogether ? left : kTogether, out);
      });
    });
  });
}
QUIRE_REPLAYABLE(quire_low_rank_shrink)

// Adds scale · t B to y, rows [rows, outputs]. t: result of quire_low_rank_shrink. b: [adapters,
// rank, outputs]. scales: [adapters, parts]. ends: [parts], the end of the outputs of each part.
// Other arguments as there.
QUIRE_API int quire_low_rank_expand(const float* t, const int64_t* slots, const void* b,
                                    const int64_t* ranks, const float* scales, const int64_t* ends,
                                    void* y, int64_t y_stride, int64_t rows, int64_t outputs,
                                    int64_t adapters, int64_t parts, int64_t rank, int32_t dtype,
                                    quire::Team* team) {
  using namespace quire;
  const Tiles tiles(slots, rows, adapters);
  if (tiles.first == nullptr) return 2;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    const int64_t pieces = (outputs + kOutputsPerTask - 1) / kOutputsPerTask;
    parallel_for(tiles.count * pieces, kTilesPerTask, team, [&](int64_t task) {
      const Tile& tile = tiles.first[task / pieces];
      const int64_t begin = task % pieces * kOutputsPerTask;
      const int64_t end = begin + kOutputsPerTask < outputs ? begin + kOutputsPerTask : outputs;
      for (int64_t part = 0, from = 0; part < parts; from = ends[part++]) {
        const int64_t its = ranks[tile.adapter * parts + part];
        const int64_t first = from > begin ? from : begin;
        const int64_t last = ends[part] < end ? ends[part] : end;
        if (its == 0 || first >= last) continue;
        const float* of_t[kRows];
        E* to[kRows];
        for (int64_t n = 0; n < tile.count; ++n) {
          of_t[n] = t + (tile.rows[n] * parts + part) * rank;
          to[n] = static_cast<E*>(y) + tile.rows[n] * y_stride;
        }
        with_count(tile, [&](auto count) {
          expand<count>(static_cast<const E*>(b) + tile.adapter * rank * outputs, outputs, of_t, its,
                        scales[tile.adapter * parts + part], to, first, last);
        });
      }
    });
  });
}
QUIRE_REPLAYABLE(quire_low_rank_expand)
