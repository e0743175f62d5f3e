// What packed weights of every format have in common: panels of output columns.
#pragma once

#include "simd.h"

namespace quire {

constexpr int kWidth = 2 * kLanes;  // output columns of a panel; the last one is filled up
constexpr int64_t kWorkPerTask = 1 << 17;  // multiplications, about 5 µs

inline int64_t panels_of(int64_t outputs) { return (outputs + kWidth - 1) / kWidth; }

}  // namespace quire
