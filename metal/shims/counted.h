// A pointer to a kernel input that records which bytes are read through it.
#pragma once
#include <cstdint>
#include <cstring>

namespace emulator {

template <class T>
class Counted {
 public:
  // `seen` has a byte for each byte of the buffer; 1 means read.
  Counted(const void* data, void* seen)
      : data_(static_cast<const T*>(data)), seen_(static_cast<unsigned char*>(seen)) {}

  Counted operator+(int64_t count) const {
    return Counted(data_ + count, seen_ + count * static_cast<int64_t>(sizeof(T)));
  }

  T operator[](int64_t index) const {
    std::memset(seen_ + index * static_cast<int64_t>(sizeof(T)), 1, sizeof(T));
    return data_[index];
  }

 private:
  const T* data_;
  unsigned char* seen_;
};

}  // namespace emulator
