// How many threads the kernels use.
#pragma once

namespace mlx_h2o::kernels {

inline constexpr int kMaxThreads = 256;

/// Threads that one call may use, including the caller: the number of `set_thread_count`, else
/// MLX_H2O_THREADS, else the processors that this process may use (affinity, and the quota of its
/// control group). Throws std::invalid_argument if MLX_H2O_THREADS is not a number from 1 to
/// kMaxThreads.
int thread_count();

/// Sets the number of threads from the next call on; 0 returns to the default. Throws
/// std::invalid_argument outside 0 to kMaxThreads. Does not affect a running call.
void set_thread_count(int threads);

}  // namespace mlx_h2o::kernels
