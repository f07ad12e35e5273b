#include "mlx_h2o/threads.h"

#include "cpu/thread_count.h"

namespace mlx_h2o {

int threads() { return kernels::thread_count(); }

void set_threads(int count) { kernels::set_thread_count(count); }

}  // namespace mlx_h2o
