// What a core can do at most: products that touch registers only, and loads of whole cache lines.
#include <immintrin.h>

#include <cstdint>

#define DOT(op, n) op " %%zmm30, %%zmm31, %%zmm" #n "\n"
#define SIX(op, a, b, c, d, e, f) \
  DOT(op, a) DOT(op, b) DOT(op, c) DOT(op, d) DOT(op, e) DOT(op, f)

// 24 independent sums, as in the widest register tile of linear_int8.cpp.
#define ROUNDS(name, op)                                                                       \
  extern "C" void name(int64_t rounds) {                                                       \
    asm volatile("vpxord %%zmm30, %%zmm30, %%zmm30\nvpxord %%zmm31, %%zmm31, %%zmm31\n" ::     \
                     : "zmm30", "zmm31");                                                      \
    for (int64_t i = 0; i < rounds; ++i) {                                                     \
      asm volatile(SIX(op, 0, 1, 2, 3, 4, 5) SIX(op, 6, 7, 8, 9, 10, 11)                       \
                       SIX(op, 12, 13, 14, 15, 16, 17) SIX(op, 18, 19, 20, 21, 22, 23)::       \
                           : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7",   \
                             "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14",      \
                             "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21",    \
                             "zmm22", "zmm23");                                                \
    }                                                                                          \
  }

ROUNDS(fp32_rounds, "vfmadd231ps")  // 24 · 16 products a round
ROUNDS(bf16_rounds, "vdpbf16ps")    // 24 · 32
ROUNDS(int8_rounds, "vpdpbusd")     // 24 · 64

#if defined(__AMX_TILE__)
// Four sums of 16 x 16 from two registers of each side, as in csrc/linear/tiles.h. Tiles of zeros take as
// long as others.
struct alignas(64) Tiles {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
const Tiles kTiles;
#define TILE_ROUNDS(name, product)             \
  extern "C" void name(int64_t rounds) {       \
    _tile_loadconfig(&kTiles);                 \
    for (int64_t i = 0; i < rounds; ++i) {     \
      product(0, 4, 6);                        \
      product(1, 4, 7);                        \
      product(2, 5, 6);                        \
      product(3, 5, 7);                        \
    }                                          \
    _tile_release();                           \
  }

TILE_ROUNDS(bf16_tile_rounds, _tile_dpbf16ps)  // 4 · 16 · 16 · 32
TILE_ROUNDS(int8_tile_rounds, _tile_dpbsud)    // 4 · 16 · 16 · 64
#endif

constexpr int64_t kAhead = 2048;  // bytes; more and less are no faster

// Loads `bytes`, a multiple of 256, in order.
extern "C" int64_t load_lines(const char* data, int64_t bytes) {
  __m512i sums[4] = {};
  for (int64_t i = 0; i < bytes; i += 256) {
    for (int64_t s = 0; s < 4; ++s) {
      _mm_prefetch(data + i + 64 * s + kAhead, _MM_HINT_T0);
      sums[s] = _mm512_or_si512(sums[s], _mm512_loadu_si512(data + i + 64 * s));
    }
  }
  return _mm512_reduce_or_epi64(
      _mm512_or_si512(_mm512_or_si512(sums[0], sums[1]), _mm512_or_si512(sums[2], sums[3])));
}
