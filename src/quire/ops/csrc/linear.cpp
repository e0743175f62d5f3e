// y = x Wᵀ + b over weights packed once.
//
// Packed: panels of kWidth output columns, the last one filled up with zeros; in a panel all columns
// of k = 0, then of k = 1, … so that one pass over K reads memory in order. Every output is one
// chain of fma over k from 0 to K - 1 that starts at zero, and the bias is added last: the bits do
// not depend on how many rows, panels or threads share the call.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <type_traits>
#include <utility>

#include "parallel.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int kWidth = 2 * kLanes;
// Rows of a register tile: 24 (12) sums, two weights and one x in 32 (16) registers.
constexpr int kMaxRows = kLanes == 16 ? 12 : 6;
// Rows whose x stays in the caches while all weights pass: about 3 MB for K = 3072.
constexpr int64_t kBlockRows = 20 * kMaxRows;
constexpr int64_t kWorkPerTask = 1 << 17;  // multiplications, about 5 µs

// Panels that a tile of `rows` rows computes side by side, so that the sums hide the latency of fma.
constexpr int panels_of(int rows) {
  return 4 * rows <= kMaxRows ? 4 : 2 * rows <= kMaxRows ? 2 : 1;
}

// Where column c of a panel stands among the kWidth elements of one k (see load_columns).
template <class W>
QUIRE_INLINE int position(int c) {
  return std::is_same_v<W, bf16> ? c % kLanes * 2 + c / kLanes : c;
}

// What to fetch into the second-level cache meanwhile: `step` bytes, at most a line, per k.
struct Ahead {
  const char* start;
  int64_t step;
};

// out: [R, P, kWidth]. x: [depth, R].
template <class W, int R, int P>
void tile(const float* x, const W* panel, int64_t depth, float* out, Ahead ahead) {
  const int64_t stride = depth * kWidth;
  vf sums[R][P][2];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sums[r][p][0] = sums[r][p][1] = zero();
  }
  for (int64_t k = 0; k < depth; ++k) {
    vf w[P][2];
    for (int p = 0; p < P; ++p) {
      load_columns(panel + p * stride + k * kWidth, w[p][0], w[p][1]);
    }
    if (P == 1) _mm_prefetch(ahead.start + k * ahead.step, _MM_HINT_T1);
    for (int r = 0; r < R; ++r) {
      const vf value = set1(x[k * R + r]);
      for (int p = 0; p < P; ++p) {
        sums[r][p][0] = fma(value, w[p][0], sums[r][p][0]);
        sums[r][p][1] = fma(value, w[p][1], sums[r][p][1]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      store(out + (r * P + p) * kWidth, sums[r][p][0]);
      store(out + (r * P + p) * kWidth + kLanes, sums[r][p][1]);
    }
  }
}

template <class W>
using Tile = void (*)(const float*, const W*, int64_t, float*, Ahead);
template <class W>
struct Tiles {
  std::array<Tile<W>, kMaxRows> one;   // one panel, by rows - 1
  std::array<Tile<W>, kMaxRows> many;  // panels_of(rows) panels
};
template <class W, std::size_t... I>
constexpr Tiles<W> tiles_of(std::index_sequence<I...>) {
  return {{tile<W, I + 1, 1>...}, {tile<W, I + 1, panels_of(I + 1)>...}};
}
template <class W>
constexpr Tiles<W> kTiles = tiles_of<W>(std::make_index_sequence<kMaxRows>());

struct Problem {
  int64_t rows, outputs, depth, x_stride, y_stride;
  const float* bias;
  Team* team;
};

// Rows [first, first + rows) of x as float32, [depth, rows].
template <class E>
void gather_rows(const E* x, int64_t stride, int64_t depth, int rows, float* out) {
  float part[kMaxRows][kLanes];
  for (int64_t k = 0; k < depth; k += kLanes) {
    const int n = static_cast<int>(std::min<int64_t>(kLanes, depth - k));
    for (int r = 0; r < rows; ++r) {
      const E* source = x + r * stride + k;
      store(part[r], n == kLanes ? load(source) : load_part(source, n));
    }
    for (int i = 0; i < n; ++i) {
      for (int r = 0; r < rows; ++r) out[(k + i) * rows + r] = part[r][i];
    }
  }
}

// Columns [column, column + kWidth) of one row: bias, rounding, and no more than there are.
template <class E>
QUIRE_INLINE void put_columns(const Problem& problem, const float* sums, int64_t column, E* y) {
  for (int half = 0; half < 2; ++half, column += kLanes, sums += kLanes) {
    const int64_t left = problem.outputs - column;
    if (left <= 0) return;
    const int n = static_cast<int>(std::min<int64_t>(kLanes, left));
    vf value = load(sums);
    if (problem.bias != nullptr) {
      const float* bias = problem.bias + column;
      value = add(value, n == kLanes ? load(bias) : load_part(bias, n));
    }
    if (n == kLanes) {
      store(y + column, value);
    } else {
      store_part(y + column, value, n);
    }
  }
}

// Up to kBlockRows rows, gathered in tiles of `height` rows and one with what is left.
template <class W, class E>
struct Block {
  const Problem& problem;
  const W* weight;
  E* y;
  const float* x;
  int64_t height, num_tiles, num_panels;

  const W* panel(int64_t index) const { return weight + index * problem.depth * kWidth; }
  int rows_of(int64_t t) const {
    return static_cast<int>(std::min(height, problem.rows - t * height));
  }

  // Tile t by `count` panels from `first`.
  void multiply(int64_t t, int64_t first, int64_t count, Ahead ahead) const {
    alignas(64) float sums[2 * kMaxRows * kWidth];
    const int rows = rows_of(t);
    const auto& kernels = count == 1 ? kTiles<W>.one : kTiles<W>.many;
    kernels[rows - 1](x + t * height * problem.depth, panel(first), problem.depth, sums, ahead);
    for (int64_t i = 0; i < rows * count; ++i) {
      put_columns(problem, sums + i * kWidth, (first + i % count) * kWidth,
                  y + (t * height + i / count) * problem.y_stride);
    }
  }

  // All tiles by one panel. If there are several, the last one is computed from the caches alone,
  // so the next panel comes from memory meanwhile.
  void multiply_panel(int64_t index) const {
    const Ahead none{reinterpret_cast<const char*>(panel(index)), 0};
    const int64_t following = index + 1 < num_panels ? index + 1 : 0;
    const Ahead next{reinterpret_cast<const char*>(panel(following)),
                     std::min<int64_t>(64, kWidth * sizeof(W))};
    for (int64_t t = 0; t < num_tiles; ++t) {
      multiply(t, index, 1, t > 0 && t == num_tiles - 1 ? next : none);
    }
  }
};

// At most kBlockRows rows. scratch: room for them, [rows · depth].
template <class W, class E>
void multiply_block(const Problem& problem, const E* x, const W* weight, E* y, float* scratch) {
  const int64_t depth = problem.depth, rows = problem.rows;
  const int64_t least_tiles = (rows + kMaxRows - 1) / kMaxRows;
  const int64_t height = (rows + least_tiles - 1) / least_tiles;
  const Block<W, E> block{problem, weight, y, scratch, height, (rows + height - 1) / height,
                          (problem.outputs + kWidth - 1) / kWidth};
  const int64_t tile_work = height * depth * 8;  // slow: columns are written into rows
  parallel_for(block.num_tiles, kWorkPerTask / (tile_work + 1) + 1, problem.team,
               [&](int64_t t) {
                 gather_rows(x + t * height * problem.x_stride, problem.x_stride, depth,
                             block.rows_of(t), scratch + t * height * depth);
               });
  const int64_t together = block.num_tiles == 1 ? panels_of(static_cast<int>(height)) : 1;
  // Side by side only if there is enough for all threads then.
  const int64_t group = block.num_panels >= 2 * together * team_size(problem.team) ? together : 1;
  const int64_t num_groups = (block.num_panels + group - 1) / group;
  const int64_t grain = kWorkPerTask / (group * kWidth * rows * depth + 1) + 1;
  parallel_for(num_groups, grain, problem.team, [&](int64_t task) {
    const int64_t first = task * group, last = std::min(block.num_panels, first + group);
    if (group > 1 && last - first == group) {
      block.multiply(0, first, group, Ahead{});
      return;
    }
    for (int64_t panel = first; panel < last; ++panel) block.multiply_panel(panel);
  });
}

template <class W, class E>
int multiply(Problem problem, const E* x, const W* weight, E* y) {
  const int64_t rows = problem.rows;
  const std::size_t floats = std::min(rows, kBlockRows) * problem.depth;
  const std::size_t bytes = (floats * sizeof(float) / 64 + 1) * 64;
  const std::unique_ptr<float, decltype(&std::free)> scratch(
      static_cast<float*>(std::aligned_alloc(64, bytes)), std::free);
  if (scratch == nullptr) return 2;
  for (int64_t first = 0; first < rows; first += kBlockRows) {
    problem.rows = std::min(kBlockRows, rows - first);
    multiply_block(problem, x + first * problem.x_stride, weight, y + first * problem.y_stride,
                   scratch.get());
  }
  return 0;
}

}  // namespace
}  // namespace quire

// weight: contiguous [outputs, depth]. packed: [panels, depth, kWidth].
QUIRE_API int quire_linear_pack(const void* weight, void* packed, int64_t outputs, int64_t depth,
                                int32_t dtype, quire::Team* team) {
  using namespace quire;
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using W = std::remove_pointer_t<decltype(tag)>;
    const int64_t panels = (outputs + kWidth - 1) / kWidth;
    parallel_for(panels, kWorkPerTask / (depth * kWidth + 1) + 1, team, [&](int64_t panel) {
      const W* source = static_cast<const W*>(weight) + panel * kWidth * depth;
      W* target = static_cast<W*>(packed) + panel * kWidth * depth;
      const int64_t columns = std::min<int64_t>(kWidth, outputs - panel * kWidth);
      for (int64_t k = 0; k < depth; ++k, target += kWidth) {
        for (int c = 0; c < kWidth; ++c) {
          target[position<W>(c)] = c < columns ? source[c * depth + k] : W{};
        }
      }
    });
  });
}

// Rows of the matrix that was packed: out [num_ids, depth]. Reads one panel per id, in order.
QUIRE_API int quire_linear_rows(const void* packed, const int64_t* ids, void* out, int64_t num_ids,
                                int64_t outputs, int64_t depth, int32_t dtype,
                                quire::Team* team) {
  using namespace quire;
  for (int64_t i = 0; i < num_ids; ++i) {
    if (ids[i] < 0 || ids[i] >= outputs) return 3;
  }
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using W = std::remove_pointer_t<decltype(tag)>;
    parallel_for(num_ids, kWorkPerTask / 8 / (depth + 1) + 1, team, [&](int64_t i) {
      const W* source = static_cast<const W*>(packed) + ids[i] / kWidth * kWidth * depth +
                        position<W>(static_cast<int>(ids[i] % kWidth));
      W* target = static_cast<W*>(out) + i * depth;
      for (int64_t k = 0; k < depth; ++k) target[k] = source[k * kWidth];
    });
  });
}

// x: rows of `depth` elements with a stride; y: contiguous [rows, outputs] of x's type. bias:
// float32 or null.
QUIRE_API int quire_linear(const void* x, int64_t x_stride, const void* packed, const float* bias,
                           void* y, int64_t rows, int64_t outputs, int64_t depth, int32_t x_dtype,
                           int32_t weight_dtype, quire::Team* team) {
  using namespace quire;
  const Problem problem{rows, outputs, depth, x_stride, outputs, bias, team};
  int failed = 0, unknown_x = 0;
  const int unknown_weight = dispatch(static_cast<DType>(weight_dtype), [&](auto* weight_tag) {
    using W = std::remove_pointer_t<decltype(weight_tag)>;
    unknown_x = dispatch(static_cast<DType>(x_dtype), [&](auto* x_tag) {
      using E = std::remove_pointer_t<decltype(x_tag)>;
      failed = multiply(problem, static_cast<const E*>(x), static_cast<const W*>(packed),
                        static_cast<E*>(y));
    });
  });
  return unknown_weight != 0 ? unknown_weight : unknown_x != 0 ? unknown_x : failed;
}
