// Makes the kernel calls of a captured step again.
#include "native/replay.h"

#include "native/simd.h"

namespace quire {

struct Call {
  int (*kernel)(const uint64_t*);  // what QUIRE_REPLAYABLE exports
  const uint64_t* arguments;       // the team included
};

}  // namespace quire

// In order, up to the first that fails: returns its code and sets `failed` to its index.
QUIRE_API int quire_replay(const quire::Call* calls, int64_t count, int64_t* failed) {
  for (int64_t i = 0; i < count; ++i) {
    const int code = calls[i].kernel(calls[i].arguments);
    if (code != 0) {
      *failed = i;
      return code;
    }
  }
  return 0;
}
