// Row numbers of a table, in the form in which they come.
#pragma once

#include <cstdint>

namespace quire {

// int32 or int64 numbers, by `bytes`; `offset` is added to each.
struct Ids {
  const void* values;
  int32_t bytes;
  int64_t offset = 0;

  int64_t given(int64_t i) const {
    return bytes == 8 ? static_cast<const int64_t*>(values)[i]
                      : static_cast<const int32_t*>(values)[i];
  }
  int64_t operator[](int64_t i) const { return given(i) + offset; }
  // Returns whether all of them are rows of a table of `rows`.
  bool all_within(int64_t count, int64_t rows) const {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = given(i);
      if (id < -offset || id >= rows - offset) return false;
    }
    return true;
  }
};

}  // namespace quire
