// Memory of a threadgroup: pages from the system, and the 32 KiB that its threads
// share, poisoned before each run and with red zones between arrays.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <sys/mman.h>

namespace emulator {

// Zeroed pages that take no memory until they are touched.
class Pages {
 public:
  explicit Pages(size_t bytes) : bytes_(bytes) {
    void* address =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) {
      throw std::runtime_error("the emulator has no memory for its stacks");
    }
    begin_ = static_cast<char*>(address);
  }
  ~Pages() { munmap(begin_, bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  char* begin() const { return begin_; }

 private:
  char* begin_;
  size_t bytes_;
};

class Arena {
 public:
  static constexpr size_t kLimit = 32 * 1024;

  void reset() {
    count_ = 0;
    used_ = 0;
  }

  // Makes the index-th allocation, or checks that it matches the one that another
  // thread made. Returns an error message, or "".
  std::string problem(int index, const char* name, size_t bytes) {
    if (index < count_) {
      const bool same =
          std::strcmp(arrays_[index].name, name) == 0 && arrays_[index].bytes == bytes;
      return same ? "" : std::string("threads disagree on threadgroup array ") + name;
    }
    size_t total = bytes;
    for (int i = 0; i < count_; i++) {
      total += (arrays_[i].bytes + 15) / 16 * 16;
    }
    if (total > kLimit || index >= kMaxArrays) {
      return "threadgroup memory: " + std::to_string(total) + " bytes with array " + name +
             ", the limit is " + std::to_string(kLimit);
    }
    arrays_[count_++] = {name, bytes, used_};
    // NaN in every float format, to expose a read before the first write.
    std::memset(pages_.begin() + used_, 0xFF, bytes);
    used_ += bytes;
    const size_t end = (used_ + 15) / 16 * 16 + kRedZone;
    std::memset(pages_.begin() + used_, kRedZoneByte, end - used_);
    used_ = end;
    return "";
  }

  void* allocation(int index) const { return pages_.begin() + arrays_[index].offset; }

  // An error that names an array written past its end, or "".
  std::string overrun() const {
    for (int i = 0; i < count_; i++) {
      const size_t end = i + 1 < count_ ? arrays_[i + 1].offset : used_;
      for (size_t at = arrays_[i].offset + arrays_[i].bytes; at < end; at++) {
        if (static_cast<unsigned char>(pages_.begin()[at]) != kRedZoneByte) {
          return std::string("write past the end of threadgroup array ") + arrays_[i].name;
        }
      }
    }
    return "";
  }

 private:
  static constexpr int kMaxArrays = 32;
  static constexpr size_t kRedZone = 64;
  static constexpr unsigned char kRedZoneByte = 0x7F;  // 0x7F7F7F7F: a huge float

  struct Array {
    const char* name;
    size_t bytes, offset;
  };

  // Twice the limit, so that overruns and red zones stay inside.
  Pages pages_{2 * kLimit};
  Array arrays_[kMaxArrays];
  int count_ = 0;
  size_t used_ = 0;
};

}  // namespace emulator
