// The simplest possible read of memory, as a baseline for benchmarks.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/checks.h"
#include "cpu/thread_pool.h"
#include "mlx_h2o/ops.h"

namespace mlx_h2o {
namespace {

constexpr size_t kPiece = size_t{1} << 18;  // bytes that a thread takes at a time

// The widest vectors that every compiler accepts; several sums, to hide the latency of additions.
using Words = uint64_t __attribute__((vector_size(64)));
constexpr int kSums = 4;

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t
sum_words(const char* from, size_t bytes) {
  Words sums[kSums] = {};
  size_t at = 0;
  for (; at + sizeof sums <= bytes; at += sizeof sums) {
    for (int i = 0; i < kSums; ++i) {
      Words words;
      std::memcpy(&words, from + at + static_cast<size_t>(i) * sizeof words, sizeof words);
      sums[i] += words;
    }
  }
  uint64_t total = 0;
  for (; at + 8 <= bytes; at += 8) {
    uint64_t word;
    std::memcpy(&word, from + at, sizeof word);
    total += word;
  }
  for (const Words& sum : sums) {
    for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  }
  return total;
}

uint64_t read_bytes(const char* from, size_t bytes) {
  std::atomic<uint64_t> total{0};
  const auto pieces = static_cast<int64_t>((bytes + kPiece - 1) / kPiece);
  kernels::parallel_for(pieces, [&](int64_t piece) {
    const size_t first = static_cast<size_t>(piece) * kPiece;
    const size_t count = std::min(kPiece, bytes - first);
    total += sum_words(from + first, count);
  });
  return total;
}

}  // namespace

uint64_t plain_read(const std::vector<mlx::core::array>& arrays) {
  uint64_t total = 0;
  for (const mlx::core::array& array : arrays) {
    if (!array.is_available()) {
      fail("plain_read", "found an array that is not evaluated, expected evaluated ones.");
    }
    total += read_bytes(array.data<char>(), array.nbytes());
  }
  return total;
}

}  // namespace mlx_h2o
