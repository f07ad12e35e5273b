// The threads that kernels share: one small pool per process, independent of MLX.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "mlx_h2o/threads.h"

namespace mlx_h2o::kernels {

namespace pool {

using Body = void (*)(const void* context, int64_t first, int64_t last, int worker);

/// Calls `body` for disjoint ranges that cover [0, count), `grain` indices each but the last.
void run(int64_t count, int64_t grain, int max_workers, Body body, const void* context);

}  // namespace pool

/// Calls function(index) or function(index, worker) for every index of [0, count), on at most
/// `max_workers` threads, including the caller; returns when all calls are done and the caller sees
/// their writes. `worker` is below `max_workers`, and unique among concurrent calls: it selects
/// scratch memory. Any worker may get any index, so results must not depend on it.
///
/// A thread takes `grain` indices at a time. Everything runs on the calling thread if count <=
/// grain, while another caller has the pool, inside such a call, and after the end of main. Nothing
/// here waits for a thread to wake up: the caller works too, and threads that come too late find
/// nothing to do. `function` must not throw. Costs about 2 microseconds more than a loop, whether
/// threads are awake or asleep, and nothing with one thread.
template <typename Function>
void parallel_for(int64_t count, const Function& function, int64_t grain = 1,
                  int max_workers = kMaxThreads) {
  pool::run(
      count, grain, max_workers,
      [](const void* context, int64_t first, int64_t last, int worker) {
        const Function& call = *static_cast<const Function*>(context);
        for (int64_t index = first; index < last; ++index) {
          if constexpr (std::is_invocable_v<const Function&, int64_t, int>) {
            call(index, worker);
          } else {
            call(index);
          }
        }
      },
      std::addressof(function));
}

/// Scratch memory of the calling thread, at least this many floats, kept for its next call.
inline float* thread_memory(int64_t floats) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats) memory.resize(static_cast<size_t>(floats));
  return memory.data();
}

}  // namespace mlx_h2o::kernels
