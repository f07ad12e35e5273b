// How many threads the native kernels use.
#pragma once

namespace mlx_h2o {

inline constexpr int kMaxThreads = 256;

/// Threads that one operation may use, including the caller: the number of `set_threads`, else the
/// environment variable MLX_H2O_THREADS, else the processors that this process may use (affinity,
/// and the quota of its control group). Throws std::invalid_argument if the variable is not a
/// number from 1 to kMaxThreads.
int threads();

/// Sets the number for the whole process, for operations that run from now on; 0 returns to the
/// default. Throws std::invalid_argument outside 0 to kMaxThreads. Safe from any thread.
void set_threads(int count);

}  // namespace mlx_h2o
