// Reserves room for all rows of a cache at once; the kernel commits pages as they are written.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

#include <mlx/allocator.h>

#include "cpu/cpu_primitive.h"
#include "mlx_h2o/ops.h"

namespace mx = mlx::core;

namespace mlx_h2o {
namespace {

size_t page_size() {
  static const auto found = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return found;
}

// The whole pages between two addresses.
struct Pages {
  char* first;
  size_t bytes = 0;

  Pages(char* from, char* to)
      : first(from +
              (page_size() - reinterpret_cast<uintptr_t>(from) % page_size()) % page_size()) {
    const char* end = to - reinterpret_cast<uintptr_t>(to) % page_size();
    if (end > first) bytes = static_cast<size_t>(end - first);
  }

  // Frees the pages, which then read as zeros until they are written again. Only Linux promises
  // both.
  size_t give_back() const {
#if defined(__linux__)
    if (bytes > 0 && madvise(first, bytes, MADV_DONTNEED) == 0) return bytes;
#endif
    return 0;
  }
};

}  // namespace

bool commits_pages() {
#if defined(__linux__)
  return true;
#else
  return false;
#endif
}

mx::array reserved_rows(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (const int extent : shape) {
    if (extent < 1) {
      fail("reserved_rows", "shape is ", to_text(shape), ", expected positive numbers.");
    }
    if (__builtin_mul_overflow(bytes, static_cast<size_t>(extent), &bytes)) {
      fail("reserved_rows", "shape is ", to_text(shape), ", expected one that fits in memory.");
    }
  }
  mx::array found(mx::allocator::malloc(bytes), shape, dtype);
  check_memory(found);
  auto* first = found.data<char>();
  const Pages pages(first, first + bytes);
#if defined(MADV_NOHUGEPAGE)
  // Otherwise the first row of each head may commit 2 MiB. Kernels without huge pages ignore it.
  if (pages.bytes > 0) madvise(pages.first, pages.bytes, MADV_NOHUGEPAGE);
#endif
  // Memory that the allocator used before is still committed.
  if (pages.give_back() == 0) {
    std::memset(first, 0, bytes);
  } else {
    std::memset(first, 0, static_cast<size_t>(pages.first - first));
    char* end = pages.first + pages.bytes;
    std::memset(end, 0, static_cast<size_t>(first + bytes - end));
  }
  return found;
}

size_t discard_rows(mx::array& buffer, int from) {
  check_dimensions("discard_rows", "buffer", buffer, 4, "[B, H, C, width]");
  const int rows = buffer.shape(2);
  if (from < 0 || from > rows) {
    fail("discard_rows", "from is ", from, ", expected 0 to ", rows, ".");
  }
  // Other holders of the buffer may still read its rows.
  if (!buffer.is_available() || !buffer.is_donatable() || !buffer.flags().row_contiguous) return 0;
  auto* first = buffer.data<char>();
  const size_t row = row_bytes(buffer);
  const size_t head = static_cast<size_t>(rows) * row;
  size_t bytes = 0;
  for (int each = 0; each < buffer.shape(0) * buffer.shape(1); ++each, first += head) {
    bytes += Pages(first + static_cast<size_t>(from) * row, first + head).give_back();
  }
  return bytes;
}

size_t committed_bytes(const mx::array& buffer) {
  size_t absent = 0;
#if defined(__linux__)
  if (buffer.is_available() && buffer.flags().row_contiguous) {
    auto* first = const_cast<char*>(buffer.data<char>());
    const Pages pages(first, first + buffer.nbytes());
    std::array<unsigned char, 1024> resident;
    for (size_t at = 0; at < pages.bytes; at += resident.size() * page_size()) {
      const size_t bytes = std::min(resident.size() * page_size(), pages.bytes - at);
      if (mincore(pages.first + at, bytes, resident.data()) != 0) return buffer.nbytes();
      for (size_t page = 0; page < bytes / page_size(); ++page) absent += (resident[page] & 1) ^ 1;
    }
  }
#endif
  return buffer.nbytes() - absent * page_size();
}

}  // namespace mlx_h2o
