// Data movement in the paged cache: store this step's K and V, copy blocks.
#include <cstdlib>

#include "kv_pages.h"
#include "parallel.h"

namespace quire {
namespace {

constexpr int64_t kBytesPerTask = 64 * 1024;

}  // namespace
}  // namespace quire

// k, v: num_tokens rows of kv_heads · head_dim elements, token strides in elements. Slots < 0 are
// skipped. Pages as in kv_pages.h.
QUIRE_API int quire_write_kv(const void* k, const void* v, void* k_cache, void* v_cache,
                             float* k_scale, float* v_scale, const int64_t* slots,
                             int64_t num_tokens, int64_t kv_heads, int64_t head_dim,
                             int64_t k_stride, int64_t v_stride, int64_t block_size,
                             int64_t block_stride, int64_t token_stride,
                             int64_t scale_block_stride, int64_t scale_token_stride,
                             int32_t dtype, int32_t cache_dtype, quire::Team* team) {
  using namespace quire;
  const Pages pages{k_cache,      v_cache,      k_scale,
                    v_scale,      block_size,   block_stride,
                    token_stride, scale_block_stride, scale_token_stride};
  int inner = 0;
  const int outer = dispatch(static_cast<DType>(dtype), [&](auto* from) {
    using From = std::remove_pointer_t<decltype(from)>;
    inner = dispatch_cache(cache_dtype, [&](auto* to) {
      using To = std::remove_pointer_t<decltype(to)>;
      const int64_t grain = kBytesPerTask / (kv_heads * head_dim * 2 * sizeof(To)) + 1;
      parallel_for(num_tokens, grain, team, [&](int64_t t) {
        write_token<To>(pages, slots[t], static_cast<const From*>(k) + t * k_stride,
                        static_cast<const From*>(v) + t * v_stride, kv_heads, head_dim);
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

// Blocks of `source` to blocks of `target`, two pools of num_planes planes that share no memory.
QUIRE_API int quire_swap_blocks(const void* source, int64_t source_blocks, void* target,
                                int64_t target_blocks, int64_t num_planes, int64_t block_bytes,
                                const int64_t* src, const int64_t* dst, int64_t count,
                                quire::Team* team) {
  using namespace quire;
  parallel_for(num_planes, 1, team, [&](int64_t plane) {
    const char* from = static_cast<const char*>(source) + plane * source_blocks * block_bytes;
    char* to = static_cast<char*>(target) + plane * target_blocks * block_bytes;
    for (int64_t i = 0; i < count; ++i)
      std::memcpy(to + dst[i] * block_bytes, from + src[i] * block_bytes, block_bytes);
  });
  return 0;
}
