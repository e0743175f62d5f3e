// Data movement in the paged cache: store this step's K and V, copy blocks.
#include <cstdlib>

#include "parallel.h"
#include "simd.h"

namespace quire {
namespace {

constexpr int64_t kBytesPerTask = 64 * 1024;

template <class From, class To>
QUIRE_INLINE void convert(const From* from, To* to, int64_t n) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, n * sizeof(To));
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
    const int rest = static_cast<int>(n - i);
    if (rest > 0) store_part(to + i, load_part(from + i, rest), rest);
  }
}

}  // namespace
}  // namespace quire

// k, v: num_tokens rows of `width` = K · D elements, token strides in elements. Slots < 0 are
// skipped. k_cache, v_cache: contiguous [B · S, K · D].
QUIRE_API int quire_write_kv(const void* k, const void* v, void* k_cache, void* v_cache,
                             const int64_t* slots, int64_t num_tokens, int64_t width,
                             int64_t k_stride, int64_t v_stride, int32_t dtype,
                             int32_t cache_dtype, quire::Team* team) {
  using namespace quire;
  int inner = 0;
  const int outer = dispatch(static_cast<DType>(dtype), [&](auto* from) {
    using From = std::remove_pointer_t<decltype(from)>;
    inner = dispatch(static_cast<DType>(cache_dtype), [&](auto* to) {
      using To = std::remove_pointer_t<decltype(to)>;
      const int64_t grain = kBytesPerTask / (width * 2 * sizeof(To)) + 1;
      parallel_for(num_tokens, grain, team, [&](int64_t t) {
        if (slots[t] < 0) return;
        const int64_t at = slots[t] * width;
        convert(static_cast<const From*>(k) + t * k_stride, static_cast<To*>(k_cache) + at, width);
        convert(static_cast<const From*>(v) + t * v_stride, static_cast<To*>(v_cache) + at, width);
      });
    });
  });
  return outer | inner;
}

// pages: num_planes planes of num_blocks contiguous blocks of block_bytes. Within a plane all
// sources are read before any destination is written, through a buffer; planes are independent.
QUIRE_API int quire_copy_blocks(void* pages, int64_t num_planes, int64_t num_blocks,
                                int64_t block_bytes, const int64_t* src, const int64_t* dst,
                                int64_t count, quire::Team* team) {
  using namespace quire;
  std::atomic<int> failed{0};
  parallel_for(num_planes, 1, team, [&](int64_t plane) {
    char* base = static_cast<char*>(pages) + plane * num_blocks * block_bytes;
    char* buffer = static_cast<char*>(std::malloc(count * block_bytes));
    if (buffer == nullptr) {
      failed = 1;
      return;
    }
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(buffer + i * block_bytes, base + src[i] * block_bytes, block_bytes);
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(base + dst[i] * block_bytes, buffer + i * block_bytes, block_bytes);
    std::free(buffer);
  });
  return failed;
}
