// 4-bit weights in tile registers (linear/tiles.h), for many rows.
//
// A chunk of a panel is widened once into the first-level cache, and all tiles of rows use it. A
// group is one product for each half of the panel (two where it is deeper than a register). Its
// 32-bit sums go through memory to the totals, which stay in vector registers for a whole chunk.
// The integers are those of Int4Format, and so are the operations after them.
#pragma once

#if defined(__AMX_INT8__)

#include "linear/integers/int4.h"
#include "linear/tiles.h"

namespace quire::linear_int {

// Configures the registers of this thread: 0 and 1, or 2 and 3, hold the sums of a group for the
// halves of a panel, 4 the rows of x, 6 and 7 the halves, `quads` deep.
class GroupTiles {
 public:
  GroupTiles(int64_t rows, int64_t quads) {
    TileShapes shapes;
    for (const int tile : {0, 1, 2, 3}) shapes.set(tile, rows, kTileBytes);
    shapes.set(4, rows, 4 * quads);
    for (const int tile : {6, 7}) shapes.set(tile, quads, kTileBytes);
    shapes.load();
  }
  ~GroupTiles() { _tile_release(); }
  GroupTiles(const GroupTiles&) = delete;
  GroupTiles& operator=(const GroupTiles&) = delete;
};

// Prefetches `lines` cache lines into the second-level cache, evenly over `steps` steps.
struct EvenFetch {
  const uint8_t* next;
  int64_t lines, steps, done = 0;

  QUIRE_INLINE void step() {
    for (done += lines; done >= steps; done -= steps, next += kCacheLine) {
      _mm_prefetch(next, _MM_HINT_T1);
    }
  }
};

template <bool kZeros>
struct Int4Tiles : Int4Weights<kZeros> {
  static constexpr bool kSums = false, kWholePanels = true;
  static constexpr int kQuadInputs = 1;
  static constexpr bool kGroupScales = false;
  static constexpr int kMaxRows = 14;  // totals and two scales fit in the vector registers
  static constexpr int64_t kBlockRows = 19 * kMaxRows;
  static constexpr int64_t kLeastRows = 11;  // with fewer, Int4Format is as fast (measured)
  // A tile with fewer rows than the registers are configured for also reads the missing rows, past
  // its own.
  static constexpr int64_t kBeyond = kMaxRows * kTileBytes;
  static constexpr int64_t kTileTotals = kMaxRows * kWidth;

  Int4Tiles(const uint8_t* weight, const uint8_t* zeros, int64_t group_size, int64_t groups)
      : Int4Weights<kZeros>{weight, zeros, group_size, groups, groups * group_size / 4} {}

  GroupTiles enter(int64_t rows) const { return GroupTiles(rows, step_quads()); }
  int64_t position(int64_t quad, int64_t r, int64_t rows) const {
    const int64_t quads = step_quads(), step = this->group_size == 32 ? quad / 8 : quad / 16;
    return (step * rows + r) * quads + (quad & (quads - 1));
  }

  // Returns the totals of all tiles for panel `index`, kTileTotals apart, or null without memory
  // for them. rows(t): rows of tile t.
  template <class Rows>
  const float* multiply_panel(int64_t index, int64_t num_tiles, const Rows& rows) const {
    struct Panel;
    const int64_t chunk = kChunkDepth / this->group_size;
    const int64_t wide_bytes = chunk * wide_group_bytes();
    auto* const wide = static_cast<uint8_t*>(
        thread_scratch<Panel>(wide_bytes + num_tiles * kTileTotals * 4));
    if (wide == nullptr) return nullptr;
    float* const totals = reinterpret_cast<float*>(wide + wide_bytes);
    const uint8_t* packed = this->panel(index);
    for (int64_t first = 0; first < this->groups; first += chunk) {
      const int64_t count = std::min(chunk, this->groups - first);
      const int64_t bytes = count * this->group_bytes();
      EvenFetch fetch{packed + bytes, bytes / kCacheLine, (num_tiles + 1) * count};
      for (int64_t g = 0; g < count; ++g) {
        fetch.step();
        widen_group(packed + g * this->group_bytes(), index, first + g,
                    wide + g * wide_group_bytes());
      }
      packed += bytes;
      for (int64_t t = 0; t < num_tiles; ++t) {
        const QuantizedRows x = rows(t);
        const Chunk part{x.inputs + first * x.rows * this->group_quads(), wide, count,
                         step_quads(), this->group_quads() / step_quads()};
        kKernels[x.rows - 1](part, first == 0, fetch, totals + t * kTileTotals);
      }
    }
    return totals;
  }

 private:
  static constexpr int64_t kChunkDepth = 512;  // 1,024 measured worse
  static constexpr int64_t kHalf = kTileRows * kLanes;  // sums of a group per half panel

  // Groups of the rows of a tile and of a widened panel. A widened group is its quads in bytes,
  // minus zero points, then float32 [kWidth] scales. It takes `steps` steps of `quads`.
  struct Chunk {
    const int32_t* inputs;
    const uint8_t* wide;
    int64_t groups, quads, steps;

    int64_t wide_quads() const { return steps * quads * kLineBytes; }
  };
  int64_t step_quads() const { return std::min<int64_t>(kStepLines, this->group_quads()); }
  int64_t wide_group_bytes() const { return this->group_quads() * kLineBytes + 4 * kWidth; }

  void widen_group(const uint8_t* packed, int64_t index, int64_t g, uint8_t* to) const {
    const vi mask = set1_int(0x0f0f0f0f);
    vi zero[2] = {set1_int(kSymmetricZero), set1_int(kSymmetricZero)};
    if (kZeros) {
      const uint8_t* of_group = this->zeros + (index * this->groups + g) * kLanes;
      load_halves(of_group, zero[0], zero[1]);
      _mm_prefetch(of_group + kZerosAhead, _MM_HINT_T1);
    }
    for (vi& z : zero) z = repeat_byte(z);
    for (int64_t q = 0; q < this->group_quads(); ++q, packed += kQuadBytes, to += kLineBytes) {
      const vi both = load_int(packed);
      store_int(to, sub_bytes(and_int(both, mask), zero[0]));
      store_int(to + kTileBytes, sub_bytes(and_int(shift_right_16bit(both, 4), mask), zero[1]));
    }
    const fp16* columns = reinterpret_cast<const fp16*>(packed);
    for (int half = 0; half < 2; ++half) {
      store(reinterpret_cast<float*>(to) + half * kLanes, load(columns + half * kLanes));
    }
  }

  // Multiplies the next group into registers 2 kSet and 2 kSet + 1.
  template <int kSet>
  QUIRE_INLINE static void multiply_group(Chunk& next, int rows) {
    if constexpr (kSet == 0) {
      _tile_zero(0);
      _tile_zero(1);
    } else {
      _tile_zero(2);
      _tile_zero(3);
    }
    int64_t left = next.steps;
    do {
      _tile_loadd(4, next.inputs, 4 * next.quads);
      _tile_loadd(6, next.wide, kLineBytes);
      _tile_loadd(7, next.wide + kTileBytes, kLineBytes);
      if constexpr (kSet == 0) {
        _tile_dpbssd(0, 4, 6);
        _tile_dpbssd(1, 4, 7);
      } else {
        _tile_dpbssd(2, 4, 6);
        _tile_dpbssd(3, 4, 7);
      }
      next.inputs += rows * next.quads;
      next.wide += next.quads * kLineBytes;
    } while (--left > 0);
    next.wide += 4 * kWidth;
  }
  template <int kSet>
  QUIRE_INLINE static void store_sums(int32_t* sums) {
    order_memory();
    if constexpr (kSet == 0) {
      _tile_stored(0, sums, kTileBytes);
      _tile_stored(1, sums + kHalf, kTileBytes);
    } else {
      _tile_stored(2, sums, kTileBytes);
      _tile_stored(3, sums + kHalf, kTileBytes);
    }
    order_memory();
  }
  template <int R>
  QUIRE_INLINE static void add_sums(vf (&totals)[R][2], const int32_t* sums,
                                    const uint8_t* scales) {
    const float* columns = reinterpret_cast<const float*>(scales);
    const vf factors[2] = {load(columns), load(columns + kLanes)};
    each_sum<R>([&](int r, int half) {
      const vf sum = to_float(load_int(sums + half * kHalf + r * kLanes));
      totals[r][half] = fma(sum, factors[half], totals[r][half]);
    });
  }

  // Adds a chunk for R rows to totals [R, kWidth], or starts these. While a group is multiplied,
  // the sums of the previous one are stored and those of the one before are added: the sums of a
  // product are ready only some 50 cycles after it began.
  template <int R>
  static void multiply_chunk(Chunk next, bool opens, EvenFetch& fetch, float* out) {
    alignas(64) int32_t sums[2][2 * kHalf];
    vf totals[R][2];
    each_sum<R>([&](int r, int half) {
      totals[r][half] = opens ? zero() : load(out + place(r, half));
    });
    const uint8_t* scales = next.wide + next.wide_quads();
    const int64_t wide_step = next.wide_quads() + 4 * kWidth;
    const auto multiply = [&](auto set) __attribute__((always_inline)) {
      fetch.step();
      multiply_group<decltype(set)::value>(next, R);
    };
    const auto add = [&](const int32_t* from) __attribute__((always_inline)) {
      add_sums<R>(totals, from, scales);
      scales += wide_step;
    };
    constexpr std::integral_constant<int, 0> kEven;
    constexpr std::integral_constant<int, 1> kOdd;
    multiply(kEven);
    if (next.groups == 1) {
      store_sums<0>(sums[0]);
      add(sums[0]);
    } else {
      multiply(kOdd);
      store_sums<0>(sums[0]);
      int64_t left = next.groups - 2;
      for (; left > 1; left -= 2) {
        multiply(kEven);
        store_sums<1>(sums[1]);
        add(sums[0]);
        multiply(kOdd);
        store_sums<0>(sums[0]);
        add(sums[1]);
      }
      if (left > 0) {
        multiply(kEven);
        add(sums[0]);
        store_sums<1>(sums[1]);
        add(sums[1]);
        store_sums<0>(sums[0]);
        add(sums[0]);
      } else {
        store_sums<1>(sums[1]);
        add(sums[0]);
        add(sums[1]);
      }
    }
    each_sum<R>([&](int r, int half) { store(out + place(r, half), totals[r][half]); });
  }

  using Kernel = void (*)(Chunk, bool, EvenFetch&, float*);
  template <std::size_t... I>
  static constexpr std::array<Kernel, kMaxRows> kernels_of(std::index_sequence<I...>) {
    return {multiply_chunk<I + 1>...};
  }
  static const std::array<Kernel, kMaxRows> kKernels;  // indexed by rows - 1
};

template <bool kZeros>
const std::array<typename Int4Tiles<kZeros>::Kernel, Int4Tiles<kZeros>::kMaxRows>
    Int4Tiles<kZeros>::kKernels = kernels_of(std::make_index_sequence<kMaxRows>());

}  // namespace quire::linear_int

#endif
