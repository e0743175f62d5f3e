// Copies of whole blocks in the paged cache.
#include <cstdlib>
#include <cstring>

#include "native/parallel.h"
#include "native/simd.h"

// Copies blocks within a pool. pages: num_planes planes of num_blocks contiguous blocks of
// block_bytes. Within a plane all sources are read before any destination is written, through a
// buffer; planes are independent. Returns 2 without memory for the buffer.
QUIRE_API int quire_copy_blocks(void* pages, int64_t num_planes, int64_t num_blocks,
                                int64_t block_bytes, const int64_t* src, const int64_t* dst,
                                int64_t count, quire::Team* team) {
  using namespace quire;
  std::atomic<int> failed{0};
  parallel_for(num_planes, 1, team, [&](int64_t plane) {
    char* base = static_cast<char*>(pages) + plane * num_blocks * block_bytes;
    char* buffer = static_cast<char*>(std::malloc(count * block_bytes));
    if (buffer == nullptr) {
      failed = 2;
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

// Copies blocks of `source` to blocks of `target`, two pools of num_planes planes that share no
// memory.
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
