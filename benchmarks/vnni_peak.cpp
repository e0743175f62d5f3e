// What a core can do at most: products of 8-bit integers that touch registers only.
#include <cstdint>

#define DOT(n) "vpdpbusd %%zmm30, %%zmm31, %%zmm" #n "\n"
#define SIX(a, b, c, d, e, f) DOT(a) DOT(b) DOT(c) DOT(d) DOT(e) DOT(f)

// 24 independent sums, as in the widest register tile of linear_int8.cpp; 24 · 64 products a round.
extern "C" void vnni_rounds(int64_t rounds) {
  asm volatile("vpxord %%zmm30, %%zmm30, %%zmm30\nvpxord %%zmm31, %%zmm31, %%zmm31\n" ::
                   : "zmm30", "zmm31");
  for (int64_t i = 0; i < rounds; ++i) {
    asm volatile(SIX(0, 1, 2, 3, 4, 5) SIX(6, 7, 8, 9, 10, 11) SIX(12, 13, 14, 15, 16, 17)
                     SIX(18, 19, 20, 21, 22, 23)::
                         : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8",
                           "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16",
                           "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23");
  }
}
