// Operations that all ranks of a host perform together, in shared memory.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "exchange/group.h"
#include "native/parallel.h"
#include "native/replay.h"
#include "native/rows.h"

namespace quire {
namespace {

enum Reduction : int32_t { kSum = 0, kMax = 1 };

// Reduces x into total, `count` elements each. NaN stays NaN.
template <class E>
void reduce_floats(E* total, const E* x, int64_t count, int32_t op) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = std::min<int64_t>(count - i, kLanes);
    E narrow[2][kLanes] = {};
    float wide[2][kLanes];
    std::memcpy(narrow[0], total + i, n * sizeof(E));
    std::memcpy(narrow[1], x + i, n * sizeof(E));
    for (int j = 0; j < 2; ++j) store(wide[j], load(narrow[j]));
    for (int j = 0; j < kLanes; ++j) {
      const float a = wide[0][j], b = wide[1][j];
      wide[0][j] = op == kSum ? a + b : b > a || b != b ? b : a;
    }
    store(narrow[0], load(wide[0]));
    std::memcpy(total + i, narrow[0], n * sizeof(E));
  }
}

void reduce_floats(float* total, const float* x, int64_t count, int32_t op) {
  if (op == kSum) {
    for (int64_t i = 0; i < count; ++i) total[i] = total[i] + x[i];
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (x[i] > total[i] || x[i] != x[i]) total[i] = x[i];
  }
}

void reduce_ints(int32_t* total, const int32_t* x, int64_t count, int32_t op) {
  for (int64_t i = 0; i < count; ++i) {
    total[i] = op == kSum ? static_cast<int32_t>(static_cast<uint32_t>(total[i]) +
                                                 static_cast<uint32_t>(x[i]))
                          : std::max(total[i], x[i]);
  }
}

constexpr int32_t kInt32 = 3;
constexpr int64_t kBlock = 1024;  // elements that are reduced before they are written
constexpr int kMostLevels = 12;
using Level = char[kBlock * sizeof(float)];

int64_t item_bytes(int32_t dtype) { return dtype == 0 || dtype == kInt32 ? 4 : 2; }

int reduce(void* total, const void* x, int64_t count, int32_t dtype, int32_t op) {
  if (dtype == kInt32) {
    reduce_ints(static_cast<int32_t*>(total), static_cast<const int32_t*>(x), count, op);
    return 0;
  }
  return dispatch(static_cast<DType>(dtype), [&](auto* tag) {
    using E = std::remove_pointer_t<decltype(tag)>;
    reduce_floats(static_cast<E*>(total), static_cast<const E*>(x), count, op);
  });
}

// Reduces `count` elements of all ranks, from byte `at` of exchange `number` on, into levels[0] as
// a binary tree: adjacent ranks first, then pairs of them. Every rank computes the same, and so
// gets the same bits.
int reduce_as_tree(const Group& group, uint32_t number, int64_t at, int64_t count, int32_t dtype,
                   int32_t op, Level* levels) {
  int top = 0;  // levels in use
  const auto join = [&] {
    --top;
    return reduce(levels[top - 1], levels[top], count, dtype, op);
  };
  for (int rank = 0; rank < group.size(); ++rank) {
    const char* given = group.slot(rank, number) + at;
    if (rank % 2 == 0) {
      if (top == kMostLevels) return 1;
      std::memcpy(levels[top++], given, count * item_bytes(dtype));
      continue;
    }
    int code = reduce(levels[top - 1], given, count, dtype, op);
    for (int pairs = (rank + 1) / 2; code == 0 && pairs % 2 == 0; pairs /= 2) code = join();
    if (code != 0) return code;
  }
  while (top > 1) {
    if (const int code = join(); code != 0) return code;
  }
  return 0;
}

// out[i] = total[i] + bias[(at + i) % width], rounded once.
template <class E>
void complete(float* total, const float* bias, int64_t width, int64_t at, E* out, int64_t count) {
  for (int64_t i = 0; bias != nullptr && i < count; ++i) total[i] += bias[(at + i) % width];
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t n = std::min<int64_t>(count - i, kLanes);
    float wide[kLanes] = {};
    E narrow[kLanes];
    std::memcpy(wide, total + i, n * sizeof(float));
    store(narrow, load(wide));
    std::memcpy(out + i, narrow, n * sizeof(E));
  }
}

}  // namespace
}  // namespace quire

// Reduces x of all ranks to out: the sums as a binary tree, or the largest of each. memory: the
// group's. out: may be x. dtype: 0 to 2 as in native/simd.h, 3 for int32. bias: null, or float32
// [width], added to each row of float32 sums. out_dtype: type of out; differs from dtype only if
// that is float32. Returns 4 if the group is over, 5 if another rank failed in its step.
QUIRE_API int quire_all_reduce(void* memory, int32_t rank, const void* x, void* out, int64_t count,
                               int32_t dtype, int32_t op, const float* bias, int64_t width,
                               int32_t out_dtype, quire::Team*) {
  using namespace quire;
  const Group group(memory, rank);
  const bool completes = bias != nullptr || out_dtype != dtype;
  if (dtype < 0 || dtype > kInt32 || out_dtype < 0 || (completes && dtype != 0)) return 1;
  const int64_t size = item_bytes(dtype), most = group.slot_bytes() / size;
  for (int64_t first = 0; first < count; first += most) {
    const int64_t n = std::min(count - first, most);
    const uint32_t number = group.next();
    std::memcpy(group.slot(rank, number), static_cast<const char*>(x) + first * size, n * size);
    if (const int code = group.meet(number); code != 0) return code;
    for (int64_t at = 0; at < n; at += kBlock) {
      alignas(64) Level levels[kMostLevels];
      char* const total = levels[0];
      const int64_t few = std::min(n - at, kBlock);
      const int failed = reduce_as_tree(group, number, at * size, few, dtype, op, levels);
      if (failed != 0) return failed;
      if (!completes) {
        std::memcpy(static_cast<char*>(out) + (first + at) * size, total, few * size);
        continue;
      }
      const int code = dispatch(static_cast<DType>(out_dtype), [&](auto* tag) {
        using E = std::remove_pointer_t<decltype(tag)>;
        complete(reinterpret_cast<float*>(total), bias, width, first + at,
                 static_cast<E*>(out) + first + at, few);
      });
      if (code != 0) return code;
    }
  }
  return 0;
}
QUIRE_REPLAYABLE(quire_all_reduce)

// Gathers x, rows of row_bytes, to out: rows of all ranks side by side. Codes as above.
QUIRE_API int quire_all_gather(void* memory, int32_t rank, const void* x, void* out, int64_t rows,
                               int64_t row_bytes, quire::Team*) {
  using namespace quire;
  return gather_rows(Group(memory, rank), rows, row_bytes, out, [&](int64_t row) {
    return static_cast<const char*>(x) + row * row_bytes;
  });
}
QUIRE_REPLAYABLE(quire_all_gather)

// RMSNorm, in place, of rows of which each rank has a part of `width` elements. x: the parts of this
// rank, with a stride in elements; weight: [width]. Only the sums of squares cross between ranks.
// Codes as above.
QUIRE_API int quire_norm_shared_rows(void* memory, int32_t rank, void* x, int64_t stride,
                                     const void* weight, int64_t rows, int64_t width, float eps,
                                     int32_t dtype, quire::Team* team) {
  using namespace quire;
  constexpr int64_t kElementsPerTask = 16 * 1024;
  const Group group(memory, rank);
  const float whole_width = static_cast<float>(width * group.size());
  const int64_t grain = kElementsPerTask / (width + 1) + 1;
  const int64_t most = std::min<int64_t>(group.slot_bytes() / sizeof(float), kBlock);
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t n = std::min(rows - first, most);
    const uint32_t number = group.next();
    float* const own = reinterpret_cast<float*>(group.slot(rank, number));
    alignas(64) Level levels[kMostLevels];
    const float* const squares = reinterpret_cast<const float*>(levels[0]);
    int code = dispatch(static_cast<DType>(dtype), [&](auto* tag) {
      using E = std::remove_pointer_t<decltype(tag)>;
      parallel_ranges(n, grain, team, [&](int64_t i) {
        own[i] = sum(squares_of(static_cast<const E*>(x) + (first + i) * stride, width));
      });
    });
    if (code == 0) code = group.meet(number);
    if (code == 0) code = reduce_as_tree(group, number, 0, n, 0, kSum, levels);
    if (code != 0) return code;
    dispatch(static_cast<DType>(dtype), [&](auto* tag) {
      using E = std::remove_pointer_t<decltype(tag)>;
      const E* const factors = static_cast<const E*>(weight);
      parallel_ranges(n, grain, team, [&](int64_t i) {
        E* const y = static_cast<E*>(x) + (first + i) * stride;
        const vf scale = set1(1.0f / std::sqrt(squares[i] / whole_width + eps));
        each_two(0, width, [&](int64_t at, auto size) {
          put(y + at, mul(mul(get(y + at, size), scale), get(factors + at, size)), size);
        });
      });
    });
  }
  return 0;
}
QUIRE_REPLAYABLE(quire_norm_shared_rows)

// Agrees on a step. fine: this rank's step went well. mark: stands for all that the rank has
// decided so far. all_fine: the step of every rank went well; if not, all go on from the same
// exchange. Returns 4 if the group is over, 6 if ranks have different marks.
QUIRE_API int quire_agree(void* memory, int32_t rank, int32_t fine, int32_t mark,
                          int32_t* all_fine, quire::Team*) {
  bool result = false;
  const quire::Group group(memory, rank);
  const int code = group.agree(fine != 0, static_cast<uint32_t>(mark), &result);
  *all_fine = result;
  return code;
}

// Finds ids in a table that is split among ranks: out[i] is the index of ids[i] among the `own` ids
// from `first` on, or 0 if it is none of them. ids: [count]. id_bytes: 4 or 8.
QUIRE_API int quire_own_ids(const void* ids, int32_t id_bytes, int64_t first, int64_t own,
                            int32_t* out, int64_t count, quire::Team*) {
  for (int64_t i = 0; i < count; ++i) {
    const int64_t id =
        id_bytes == 4 ? static_cast<const int32_t*>(ids)[i] : static_cast<const int64_t*>(ids)[i];
    const int64_t local = id - first;
    out[i] = local >= 0 && local < own ? static_cast<int32_t>(local) : 0;
  }
  return 0;
}
QUIRE_REPLAYABLE(quire_own_ids)

// Exchanges rows of a table that is split among ranks. x: rows of row_bytes, of which each rank has
// looked up those of its own ids, `most` from rank · most on. out: row i comes from the rank that
// owns ids[i]. Returns 3 for an id of no rank. Other codes as above.
QUIRE_API int quire_owned_rows(void* memory, int32_t rank, const void* x, const void* ids,
                               int32_t id_bytes, int64_t most, void* out, int64_t rows,
                               int64_t row_bytes, quire::Team*) {
  using namespace quire;
  const Group group(memory, rank);
  const auto owner = [&](int64_t row) {
    const int64_t id = id_bytes == 4 ? static_cast<const int32_t*>(ids)[row]
                                     : static_cast<const int64_t*>(ids)[row];
    return id < 0 ? -1 : id / most;
  };
  for (int64_t row = 0; row < rows; ++row) {
    if (owner(row) < 0 || owner(row) >= group.size()) return 3;
  }
  const int64_t count = rows * row_bytes;
  for (int64_t first = 0; first < count; first += group.slot_bytes()) {
    const int64_t n = std::min(count - first, group.slot_bytes());
    const uint32_t number = group.next();
    std::memcpy(group.slot(rank, number), static_cast<const char*>(x) + first, n);
    if (const int code = group.meet(number); code != 0) return code;
    for (int64_t at = first; at < first + n;) {
      const int64_t row = at / row_bytes;
      const int64_t piece = std::min((row + 1) * row_bytes, first + n) - at;
      std::memcpy(static_cast<char*>(out) + at,
                  group.slot(static_cast<int>(owner(row)), number) + (at - first), piece);
      at += piece;
    }
  }
  return 0;
}
QUIRE_REPLAYABLE(quire_owned_rows)
