// Tile instructions (AMX) on a processor without them: a handler of SIGILL that does what they do, so
// that the tests run the library that a processor with them runs, to the byte.
//
// Source: Intel SDM volume 1 chapter 18 and the entries of the instructions in volume 2. Where the
// manual has an exception, the process ends with a line on stderr.
#include <immintrin.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#define API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kTiles = 8, kMaxRows = 16, kMaxBytes = 64;  // of palette 1
constexpr unsigned kFlushDenormals = 0x8040, kNoExceptions = 0x1f80;  // of MXCSR

struct Tile {
  int rows = 0, bytes = 0;  // zero: may not be used
  alignas(64) uint8_t data[kMaxRows][kMaxBytes] = {};
};
struct Registers {
  bool configured = false;
  uint8_t configuration[64] = {};
  Tile tiles[kTiles];
};
thread_local Registers registers;
std::atomic<int64_t> count{0};
struct sigaction previous;

void require(bool condition, const char* what) {
  if (condition) return;
  const char* parts[] = {"tile instruction: ", what, "\n"};
  for (const char* part : parts) (void)!write(STDERR_FILENO, part, strlen(part));
  abort();
}

bool all_zero(const uint8_t* from, const uint8_t* to) {
  for (; from < to; ++from) {
    if (*from != 0) return false;
  }
  return true;
}

void release() {
  registers.configured = false;
  memset(registers.configuration, 0, sizeof registers.configuration);
  for (Tile& tile : registers.tiles) tile = Tile();
}

void load_configuration(const uint8_t* given) {
  uint8_t config[64];
  memcpy(config, given, sizeof config);
  release();
  if (config[0] == 0) return;
  require(config[0] == 1, "a palette other than 1");
  require(all_zero(config + 2, config + 16) && all_zero(config + 32, config + 48) &&
              all_zero(config + 56, config + 64),
          "a reserved byte of the configuration is set");
  for (int t = 0; t < kTiles; ++t) {
    uint16_t bytes;
    memcpy(&bytes, config + 16 + 2 * t, sizeof bytes);
    const int rows = config[48 + t];
    require(bytes <= kMaxBytes, "a row of more than 64 bytes");
    require(rows <= kMaxRows, "more than 16 rows");
    require((rows == 0) == (bytes == 0), "rows without bytes, or bytes without rows");
    registers.tiles[t].rows = rows;
    registers.tiles[t].bytes = bytes;
  }
  memcpy(registers.configuration, config, sizeof config);
  registers.configured = true;
}

Tile& tile(int number) {
  require(registers.configured, "no configuration");
  require(number < kTiles && registers.tiles[number].rows > 0, "a tile that is not configured");
  return registers.tiles[number];
}

void load_tile(Tile& target, const uint8_t* memory, int64_t stride) {
  memset(target.data, 0, sizeof target.data);
  for (int r = 0; r < target.rows; ++r) memcpy(target.data[r], memory + r * stride, target.bytes);
}

void store_tile(const Tile& source, uint8_t* memory, int64_t stride) {
  for (int r = 0; r < source.rows; ++r) memcpy(memory + r * stride, source.data[r], source.bytes);
}

template <class T>
T element(const uint8_t* row, int index) {
  T value;
  memcpy(&value, row + index * sizeof(T), sizeof(T));
  return value;
}
template <class T>
void set_element(uint8_t* row, int index, T value) {
  memcpy(row + index * sizeof(T), &value, sizeof(T));
}

float widen(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// TDPBF16PS, under kFlushDenormals.
__attribute__((noinline)) void add_bf16(Tile& sums, const Tile& a, const Tile& b) {
  const int columns = sums.bytes / 4;
  for (int m = 0; m < sums.rows; ++m) {
    float chains[2][kMaxBytes / 4] = {};
    for (int k = 0; k < a.bytes / 4; ++k) {
      for (int odd = 0; odd < 2; ++odd) {
        const float x = widen(element<uint16_t>(a.data[m], 2 * k + odd));
        for (int n = 0; n < columns; ++n) {
          const float w = widen(element<uint16_t>(b.data[k], 2 * n + odd));
          chains[odd][n] = std::fma(x, w, chains[odd][n]);
        }
      }
    }
    for (int n = 0; n < columns; ++n) {
      const float products = chains[0][n] + chains[1][n];
      set_element(sums.data[m], n, element<float>(sums.data[m], n) + products);
    }
  }
}

// TDPBSSD, TDPBSUD, TDPBUSD, TDPBUUD: sums wrap around.
template <class A, class B>
void add_bytes(Tile& sums, const Tile& a, const Tile& b) {
  for (int m = 0; m < sums.rows; ++m) {
    for (int k = 0; k < a.bytes / 4; ++k) {
      for (int n = 0; n < sums.bytes / 4; ++n) {
        auto sum = element<uint32_t>(sums.data[m], n);
        for (int i = 0; i < 4; ++i) {
          sum += static_cast<uint32_t>(element<A>(a.data[m], 4 * k + i) *
                                       element<B>(b.data[k], 4 * n + i));
        }
        set_element(sums.data[m], n, sum);
      }
    }
  }
}

enum Prefix { kNone, k66, kF3, kF2 };

struct Instruction {
  int prefix, opcode, reg, rm, third, length;
  bool in_memory;
  uint8_t* address;
  int64_t stride;
};

int64_t general_register(const ucontext_t* context, int number) {
  constexpr int kNames[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                            REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                            REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[kNames[number]];
}

// The address of a memory operand; `code` stands behind ModRM and ends behind the displacement.
void decode_address(const ucontext_t* context, const uint8_t* vex, const uint8_t*& code, int mod,
                    Instruction& found) {
  const int high_base = vex[1] & 0x20 ? 0 : 8, high_index = vex[1] & 0x40 ? 0 : 8;
  int base = found.rm, index = 4, scale = 0;
  if (found.rm == 4) {
    scale = *code >> 6;
    index = (*code >> 3 & 7) + high_index;
    base = *code & 7;
    ++code;
  }
  const bool no_base = mod == 0 && base == 5;
  int64_t address = no_base ? 0 : general_register(context, base + high_base);
  if (mod == 1) {
    address += static_cast<int8_t>(*code);
    code += 1;
  } else if (mod == 2 || no_base) {
    address += element<int32_t>(code, 0);
    code += 4;
  }
  if (no_base && found.rm == 5) address += reinterpret_cast<int64_t>(code);  // after the instruction
  found.stride = index == 4 ? 0 : general_register(context, index) * (1 << scale);
  found.address = reinterpret_cast<uint8_t*>(address);
}

// False for anything but VEX.128.0F38.W0 with one of the opcodes.
bool decode(const ucontext_t* context, const uint8_t* vex, Instruction& found) {
  if (vex[0] != 0xc4 || (vex[1] & 0x1f) != 2 || (vex[2] & 0x84) != 0) return false;
  found.prefix = vex[2] & 3;
  found.third = ~vex[2] >> 3 & 15;
  found.opcode = vex[3];
  if (found.opcode != 0x49 && found.opcode != 0x4b && found.opcode != 0x5c &&
      found.opcode != 0x5e) {
    return false;
  }
  const int mod = vex[4] >> 6;
  found.reg = (vex[4] >> 3 & 7) + (vex[1] & 0x80 ? 0 : 8);
  found.rm = vex[4] & 7;
  found.in_memory = mod != 3;
  const uint8_t* code = vex + 5;
  if (found.in_memory) {
    decode_address(context, vex, code, mod, found);
  } else {
    found.rm += vex[1] & 0x20 ? 0 : 8;
  }
  found.length = static_cast<int>(code - vex);
  return true;
}

void multiply(const Instruction& given) {
  Tile &sums = tile(given.reg), &a = tile(given.rm), &b = tile(given.third);
  require(&sums != &a && &sums != &b && &a != &b, "the same tile twice");
  require(sums.rows == a.rows && sums.bytes == b.bytes && a.bytes == 4 * b.rows &&
              sums.bytes % 4 == 0,
          "sizes of tiles that do not fit");
  if (given.opcode == 0x5c) {
    require(given.prefix == kF3, "an unknown product");
    const unsigned before = _mm_getcsr();
    _mm_setcsr(kNoExceptions | kFlushDenormals);
    add_bf16(sums, a, b);
    _mm_setcsr(before);
  } else if (given.prefix == kF2) {
    add_bytes<int8_t, int8_t>(sums, a, b);
  } else if (given.prefix == kF3) {
    add_bytes<int8_t, uint8_t>(sums, a, b);
  } else if (given.prefix == k66) {
    add_bytes<uint8_t, int8_t>(sums, a, b);
  } else {
    add_bytes<uint8_t, uint8_t>(sums, a, b);
  }
}

void execute(const Instruction& given) {
  count.fetch_add(1, std::memory_order_relaxed);
  if (given.opcode == 0x5c || given.opcode == 0x5e) {
    require(!given.in_memory, "a product with memory");
    multiply(given);
  } else if (given.opcode == 0x4b) {
    require(given.in_memory && given.rm == 4, "a load or store without a stride");
    if (given.prefix == kF3) {
      store_tile(tile(given.reg), given.address, given.stride);
    } else {
      load_tile(tile(given.reg), given.address, given.stride);
    }
  } else if (given.in_memory) {
    require(given.reg == 0 && (given.prefix == kNone || given.prefix == k66), "not a configuration");
    if (given.prefix == kNone) {
      load_configuration(given.address);
    } else {
      memcpy(given.address, registers.configuration, sizeof registers.configuration);
    }
  } else if (given.prefix == kF2) {
    Tile& target = tile(given.reg);
    memset(target.data, 0, sizeof target.data);
  } else {
    release();
  }
}

void handle(int, siginfo_t*, void* given) {
  auto* context = static_cast<ucontext_t*>(given);
  auto& place = context->uc_mcontext.gregs[REG_RIP];
  Instruction found;
  bool any = false;
  while (decode(context, reinterpret_cast<const uint8_t*>(place), found)) {
    execute(found);
    place += found.length;
    any = true;
  }
  if (!any) sigaction(SIGILL, &previous, nullptr);  // not ours: it comes again
}

}  // namespace

API void emulator_install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, &previous);
}
API void emulator_remove() { sigaction(SIGILL, &previous, nullptr); }
// Instructions that were emulated, in all threads.
API int64_t emulator_count() { return count.load(); }

// One instruction at a time, by the processor if it has them. Tiles lie in memory with 64 bytes to a
// row, [16, 64]; the configuration is for the sums in tile 0, a in 1, b in 2.

namespace {
void order_memory() { asm volatile("" ::: "memory"); }
}  // namespace

API void probe_product(int kind, const void* config, void* sums, const void* a, const void* b) {
  order_memory();
  _tile_loadconfig(config);
  _tile_loadd(0, sums, kMaxBytes);
  _tile_loadd(1, a, kMaxBytes);
  _tile_loadd(2, b, kMaxBytes);
  switch (kind) {
    case 0: _tile_dpbf16ps(0, 1, 2); break;
    case 1: _tile_dpbssd(0, 1, 2); break;
    case 2: _tile_dpbsud(0, 1, 2); break;
    case 3: _tile_dpbusd(0, 1, 2); break;
    default: _tile_dpbuud(0, 1, 2);
  }
  _tile_stored(0, sums, kMaxBytes);
  _tile_release();
}
// Configures, and leaves it so.
API void probe_configure(const void* config) {
  order_memory();
  _tile_loadconfig(config);
}
// The configuration of this thread; all zero after a release.
API void probe_configuration(void* config) {
  _tile_storeconfig(config);
  order_memory();
}
API void probe_zero_tile_7() { _tile_zero(7); }
