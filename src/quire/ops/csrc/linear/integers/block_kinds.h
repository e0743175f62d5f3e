// Kinds of weights in blocks along the inputs: their packing, and the way from codes to bytes.
//
// Packed weights are panels of kWidth output columns; a panel is a sequence of blocks. A block
// begins with the float16 scales of its columns, then their float16 minima or their int8 zero
// points, if the kind has any. It consists of groups of 32 or 16 inputs. A group begins with int8
// factors of the scale and unsigned bytes that multiply the minimum, if the kind has factors;
// chunks of 16 inputs follow. A chunk holds the bits of its codes in planes of 8, 4, 2 or 1 bits,
// the lower ones first. A byte of a plane holds input k % 4 of a column, for both halves of the
// columns and for as many quads of inputs as fit, half by half.
#pragma once

#include "linear/integers/int.h"

namespace quire::linear_int {

enum class Offset { kNone, kMinimum, kZero };

// Levels of IQ4_NL and IQ4_XS.
constexpr int8_t kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};
// Values of e2m1, doubled.
constexpr int8_t kE2m1Levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Repeats a byte in all bytes of a number.
constexpr int32_t every_byte(int byte) {
  return static_cast<int32_t>(static_cast<uint32_t>(byte & 255) * 0x01010101u);
}

constexpr int64_t kPlane = 4 * kLanes;  // bytes per vector
constexpr int kChunkQuads = 4;

// One kind. A level is a code of kBits minus kZeroCode, or an entry of kLevels. A weight is scale ·
// factor · level + offset; kOffset names the offset of its block and group: a minimum, or minus the
// scale times a zero point. A group is kQuads quads of inputs.
template <int kBits, int kZeroCode, const int8_t* kLevels, Offset kOffset, bool kFactors,
          int kQuads>
struct BlockKind {
  static constexpr int kGroupQuads = kQuads, kZero = kZeroCode;
  static constexpr Offset kOffsets = kOffset;
  static constexpr bool kHasFactors = kFactors, kHasLevels = kLevels != nullptr;
  static constexpr int kBase = kBits == 8 ? 8 : kBits >= 4 ? 4 : 2, kExtra = kBits - kBase;
  static constexpr int64_t kHeadBytes =
      kOffset == Offset::kMinimum ? 4 * kWidth : kOffset == Offset::kZero ? 3 * kWidth : 2 * kWidth;
  static constexpr int64_t kFactorBytes =
      !kFactors ? 0 : kOffset == Offset::kMinimum ? 2 * kWidth : kWidth;
  static constexpr int64_t kChunkBytes = kBits * kPlane;
  static constexpr int64_t kGroupBytes = kFactorBytes + kQuads / kChunkQuads * kChunkBytes;
  // Largest level as an unsigned byte. It limits the quads whose sums fit in 16 bits
  // (native/simd_int.h).
  static constexpr int kMost = kLevels == kIq4Levels    ? 241
                               : kLevels == kE2m1Levels ? 24
                                                        : (1 << kBits) - 1;
  static constexpr bool kIsWide = kMost > 63;
  static constexpr int kSafeQuads = kMost <= 15 ? 8 : kMost <= 31 ? 4 : 2;

  // Returns the table for look-ups.
  static vi levels() {
    if constexpr (kHasLevels) {
      return sub_bytes(load_table(kLevels), set1_int(every_byte(-kZeroCode)));
    } else {
      return set1_int(0);
    }
  }
  // Unpacks quad q of a chunk to unsigned bytes: levels + kZero.
  template <int q>
  QUIRE_INLINE static void load_quad(const uint8_t* chunk, vi levels, vi& low, vi& high) {
    constexpr int base_shift = kBase == 2 ? q % 2 * 4 : 0;
    if constexpr (kBase == 8) {
      low = load_int(chunk + 2 * q * kPlane);
      high = load_int(chunk + (2 * q + 1) * kPlane);
    } else {
      const vi base = load_int(chunk + (kBase == 4 ? q : q / 2) * kPlane);
      low = field<kBase, base_shift, 0>(base);
      high = field<kBase, base_shift + kBase, 0>(base);
    }
    if constexpr (kExtra > 0) {
      constexpr int shift = kExtra == 2 ? q % 2 * 4 : q * 2;
      const vi extra = load_int(chunk + (kBase + (kExtra == 2 ? q / 2 : 0)) * kPlane);
      low = or_int(low, field<kExtra, shift, kBase>(extra));
      high = or_int(high, field<kExtra, shift + kExtra, kBase>(extra));
    }
    if constexpr (kHasLevels) {
      low = look_up(levels, low);
      high = look_up(levels, high);
    }
  }
  // Puts the code of column c for input j of quad q into a chunk of zeros.
  static void put_code(uint8_t* chunk, int64_t q, int64_t j, int64_t c, int code) {
    const int64_t half = c / kLanes, byte = c % kLanes * 4 + j;
    if constexpr (kBase == 8) {
      chunk[(2 * q + half) * kPlane + byte] = static_cast<uint8_t>(code);
    } else {
      const int64_t in_byte = 8 / kBase / 2, extra_in_byte = kExtra == 2 ? 2 : 4;
      put_bits(chunk[q / in_byte * kPlane + byte], code & ((1 << kBase) - 1),
               q % in_byte * 2 * kBase + half * kBase);
      if constexpr (kExtra > 0) {
        put_bits(chunk[(kBase + q / extra_in_byte) * kPlane + byte], code >> kBase,
                 q % extra_in_byte * 2 * kExtra + half * kExtra);
      }
    }
  }

 private:
  // Moves `bits` bits of every byte from bit `from` to bit `to`, and clears the others.
  template <int bits, int from, int to>
  QUIRE_INLINE static vi field(vi x) {
    if constexpr (from > to) {
      x = shift_right_16bit(x, from - to);
    } else if constexpr (from < to) {
      x = shift_left(x, to - from);
    }
    return and_int(x, set1_int(every_byte(((1 << bits) - 1) << to)));
  }
  static void put_bits(uint8_t& byte, int64_t bits, int64_t at) {
    byte = static_cast<uint8_t>(byte | bits << at);
  }
};

// Calls f(kind) for the kind of this number, in the order of BLOCK_KINDS in
// config/packed/block_kinds.py. Returns false if there is none.
template <class F>
bool with_kind(int32_t number, F&& f) {
  constexpr Offset none = Offset::kNone, minimum = Offset::kMinimum, zero = Offset::kZero;
  constexpr const int8_t* plain = nullptr;
  switch (number) {
    case 0: f(BlockKind<8, 128, plain, none, false, 8>()); return true;
    case 1: f(BlockKind<8, 128, plain, zero, false, 8>()); return true;
    case 2: f(BlockKind<4, 0, plain, minimum, false, 8>()); return true;
    case 3: f(BlockKind<5, 16, plain, none, false, 8>()); return true;
    case 4: f(BlockKind<5, 0, plain, minimum, false, 8>()); return true;
    case 5: f(BlockKind<4, 128, kIq4Levels, none, false, 8>()); return true;
    case 6: f(BlockKind<4, 12, kE2m1Levels, none, false, 8>()); return true;
    case 7: f(BlockKind<4, 128, kIq4Levels, none, true, 8>()); return true;
    case 8: f(BlockKind<2, 0, plain, minimum, true, 4>()); return true;
    case 9: f(BlockKind<3, 4, plain, none, true, 4>()); return true;
    case 10: f(BlockKind<4, 0, plain, minimum, true, 8>()); return true;
    case 11: f(BlockKind<5, 0, plain, minimum, true, 8>()); return true;
    case 12: f(BlockKind<6, 32, plain, none, true, 4>()); return true;
    case 13: f(BlockKind<2, 0, plain, zero, false, 8>()); return true;
    case 14: f(BlockKind<3, 0, plain, zero, false, 8>()); return true;
    case 15: f(BlockKind<4, 8, plain, none, false, 8>()); return true;
    case 16: f(BlockKind<4, 0, plain, zero, false, 8>()); return true;
    default: return false;
  }
}

}  // namespace quire::linear_int
