// One kernel launch: all its threadgroups, on a few CPU threads.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <signal.h>
#include <thread>
#include <vector>

#include "emulator.h"

namespace emulator {

struct Launch {
  Position grid;     // in threads, as metal_kernel takes it
  Position threads;  // of a threadgroup
  Schedule schedule;
  uint64_t seed;
  int workers;
};

inline size_t volume(const Position& p) { return size_t{p.x} * p.y * p.z; }

// While it lives, a fault in kernel code ends that threadgroup with an error.
// One at a time in a process: handlers of signals belong to all threads.
class FaultHandler {
 public:
  FaultHandler() {
    struct sigaction action = {};
    action.sa_handler = &FaultHandler::handle;
    action.sa_flags = SA_NODEFER;  // the handler does not return
    sigaction(SIGSEGV, &action, &segment_);
    sigaction(SIGBUS, &action, &bus_);
  }
  ~FaultHandler() {
    sigaction(SIGSEGV, &segment_, nullptr);
    sigaction(SIGBUS, &bus_, nullptr);
  }
  FaultHandler(const FaultHandler&) = delete;
  FaultHandler& operator=(const FaultHandler&) = delete;

 private:
  static void handle(int signal) {
    if (running == nullptr) {
      // Not kernel code: the fault repeats and ends the process.
      ::signal(signal, SIG_DFL);
      return;
    }
    running->memory_fault();
  }

  struct sigaction segment_, bus_;
};

inline void run(const Launch& launch, const Body& body) {
  const Position threads = launch.threads;
  if (volume(threads) == 0 || volume(threads) > kMaxThreads || volume(threads) % kLanes != 0) {
    throw std::runtime_error("threadgroup " + describe(threads) +
                             ": expected a multiple of 32 threads, at most 1024");
  }
  if (launch.grid.x % threads.x || launch.grid.y % threads.y || launch.grid.z % threads.z) {
    throw std::runtime_error("grid " + describe(launch.grid) +
                             " is not a multiple of threadgroup " + describe(threads));
  }
  const Position count = {launch.grid.x / threads.x, launch.grid.y / threads.y,
                          launch.grid.z / threads.z};
  const size_t total = volume(count);
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::string error;

  const auto work = [&] {
    const auto group = std::make_unique<Threadgroup>(body, launch.schedule, launch.seed);
    try {
      for (size_t i = next++; i < total; i = next++) {
        const size_t at = launch.schedule == Schedule::forward ? i : total - 1 - i;
        group->run(
            {static_cast<unsigned>(at % count.x), static_cast<unsigned>(at / count.x % count.y),
             static_cast<unsigned>(at / count.x / count.y)},
            threads, count);
      }
    } catch (const std::exception& exception) {
      next = total;
      const std::lock_guard<std::mutex> lock(mutex);
      error = exception.what();
    }
  };
  const FaultHandler handler;
  std::vector<std::thread> others;
  for (int i = 1; i < launch.workers && static_cast<size_t>(i) < total; i++) {
    others.emplace_back(work);
  }
  work();
  for (std::thread& other : others) {
    other.join();
  }
  if (!error.empty()) {
    throw std::runtime_error(error);
  }
}

}  // namespace emulator
