#ifndef MLX_H2O_SWIFT_CHECKSUM_H
#define MLX_H2O_SWIFT_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>

/// SHA-256 (FIPS 180-4) as 64 hexadecimal digits and a zero.
void mlx_h2o_swift_sha256(const void* bytes, size_t count, char digest[65]);

/// Whether a prompt cache still has this checksum: the SHA-256 of all bytes of the file, with zeros
/// in place of the checksum itself, which stands in its header. Reads all of the file.
bool mlx_h2o_swift_is_whole(const char* path, const char* checksum);

/// Write the checksum of a file in place of 64 zeros, down to the disk; false, with `errno`, if it
/// cannot be written.
bool mlx_h2o_swift_seal(const char* path);

#endif
