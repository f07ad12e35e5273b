// How many threads the native kernels use.
#pragma once

namespace mlx_h2o {

/// Threads that one operation may use: the number of `set_threads`, else the environment variable
/// MLX_H2O_THREADS, else the processors that this process may use. Throws std::invalid_argument if
/// the variable is not a number from 1 to 256.
int threads();

/// Sets the number for the whole process, for operations that run from now on; 0 returns to the
/// default. Throws std::invalid_argument outside 0 to 256. Safe from any thread.
void set_threads(int count);

}  // namespace mlx_h2o
