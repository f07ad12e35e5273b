#define _GNU_SOURCE  // for memmem of glibc
#include "checksum.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// Fractional parts of the cube roots of the first 64 primes.
static const uint32_t CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t turned(uint32_t word, int count) { return word >> count | word << (32 - count); }

static void add_block(uint32_t state[8], const unsigned char* block) {
  uint32_t words[64];
  for (int i = 0; i < 16; ++i)
    words[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    uint32_t early = words[i - 15], late = words[i - 2];
    words[i] = words[i - 16] + (turned(early, 7) ^ turned(early, 18) ^ early >> 3) + words[i - 7] +
               (turned(late, 17) ^ turned(late, 19) ^ late >> 10);
  }
  uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
  uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
  for (int i = 0; i < 64; ++i) {
    uint32_t first = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) +
                     CONSTANTS[i] + words[i];
    uint32_t second =
        (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first;
    d = c, c = b, b = a, a = first + second;
  }
  const uint32_t added[8] = {a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) state[i] += added[i];
}

void mlx_h2o_swift_sha256(const void* bytes, size_t count, char digest[65]) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const unsigned char* data = bytes;
  size_t left = count;
  for (; left >= 64; left -= 64, data += 64) add_block(state, data);
  // The rest, a bit, zeros, and the number of bits fill one block or two.
  unsigned char end[128] = {0};
  if (left > 0) memcpy(end, data, left);
  end[left] = 0x80;
  size_t blocks = left < 56 ? 1 : 2;
  for (int i = 0; i < 8; ++i)
    end[64 * blocks - 1 - i] = (unsigned char)((uint64_t)count * 8 >> 8 * i);
  for (size_t i = 0; i < blocks; ++i) add_block(state, end + 64 * i);
  for (int i = 0; i < 8; ++i) snprintf(digest + 8 * i, 9, "%08x", state[i]);
}

// Computes the checksum of the open file in which `written` stands in its place; returns this
// place, or -1 if the file cannot be read or does not name it.
static off_t checksum_of(int file, const char* written, char digest[65]) {
  char before[96];
  // Metadata is JSON within JSON, so its quotes are escaped.
  size_t size = (size_t)snprintf(before, sizeof before, "\\\"checksum\\\": \\\"%s", written);
  struct stat about;
  if (size >= sizeof before || fstat(file, &about) != 0 || about.st_size <= 0) return -1;
  // A private mapping: the zeros do not reach the file.
  char* data = mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
  if (data == MAP_FAILED) return -1;
  char* found = memmem(data, (size_t)about.st_size, before, size);
  off_t place = -1;
  if (found != NULL) {
    place = found + size - strlen(written) - data;
    memset(data + place, '0', strlen(written));
    mlx_h2o_swift_sha256(data, (size_t)about.st_size, digest);
  }
  munmap(data, (size_t)about.st_size);
  return place;
}

bool mlx_h2o_swift_is_whole(const char* path, const char* checksum) {
  char digest[65];
  int file = open(path, O_RDONLY);
  if (file < 0) return false;
  bool found = checksum_of(file, checksum, digest) >= 0 && strcmp(digest, checksum) == 0;
  close(file);
  return found;
}

bool mlx_h2o_swift_seal(const char* path) {
  static const char unknown[] = "0000000000000000000000000000000000000000000000000000000000000000";
  char digest[65];
  int file = open(path, O_RDWR);
  if (file < 0) return false;
  errno = EINVAL;  // if it does not say where the checksum is to be
  off_t place = checksum_of(file, unknown, digest);
  bool done = place >= 0 && pwrite(file, digest, 64, place) == 64 && fsync(file) == 0;
  int error = errno;
  close(file);
  errno = error;
  return done;
}
