#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "mlx_h2o/threads.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace mlx_h2o {
namespace {

std::atomic<int> chosen{0};  // 0: the default

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

// Processors that the control group grants, rounded up; 0 if it sets no limit. Container runtimes
// limit by this quota and leave the affinity unchanged.
int quota() {
  double microseconds = 0;
  double period = 0;
  std::ifstream unified("/sys/fs/cgroup/cpu.max");  // "max 100000" fails to parse: no limit
  if (!(unified >> microseconds >> period)) {
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> microseconds;
    std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
  }
  if (microseconds <= 0 || period <= 0) return 0;
  return static_cast<int>((microseconds + period - 1) / period);
}

int default_count() {
  const char* text = std::getenv("MLX_H2O_THREADS");
  if (text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long wanted = std::strtol(text, &end, 10);
    if (*end == '\0' && wanted >= 1 && wanted <= kMaxThreads) return static_cast<int>(wanted);
    throw std::invalid_argument("[mlx_h2o] MLX_H2O_THREADS is \"" + std::string(text) +
                                "\", expected a number from 1 to " + std::to_string(kMaxThreads) +
                                ".");
  }
  const int limit = quota();
  const int available = limit > 0 ? std::min(limit, processors()) : processors();
  return std::clamp(available, 1, kMaxThreads);
}

}  // namespace

int threads() {
  const int count = chosen.load(std::memory_order_relaxed);
  if (count != 0) return count;
  static const int by_default = default_count();
  return by_default;
}

void set_threads(int count) {
  if (count < 0 || count > kMaxThreads) {
    throw std::invalid_argument("[set_threads] threads are " + std::to_string(count) +
                                ", expected 1 to " + std::to_string(kMaxThreads) +
                                ", or none for the default.");
  }
  chosen.store(count, std::memory_order_relaxed);
}

}  // namespace mlx_h2o
