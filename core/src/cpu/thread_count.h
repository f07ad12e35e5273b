// How many threads the kernels use.
#pragma once

namespace mlx_h2o::kernels {

inline constexpr int kMaxThreads = 256;

/// Threads that one call may use, the calling one included: what `set_thread_count` said, else
/// MLX_H2O_THREADS, else the processors that this process may use (affinity, and the quota of its
/// control group). Throws std::invalid_argument where MLX_H2O_THREADS is not a number from 1 to
/// kMaxThreads.
int thread_count();

/// Sets the number of threads from the next call on; 0 returns to the default. Throws
/// std::invalid_argument outside 0 to kMaxThreads. A call that is under way is not disturbed.
void set_thread_count(int threads);

}  // namespace mlx_h2o::kernels
