// SHA-256 (FIPS 180-4), of what a fingerprint is made of.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace mlx_h2o_c {

class Sha256 {
 public:
  void update(const void* bytes, size_t count);
  // In hexadecimal digits; nothing may be added afterwards.
  std::string finish();

 private:
  void block();

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> pending_{};
  size_t used_ = 0;
  uint64_t total_ = 0;
};

}  // namespace mlx_h2o_c
