// The thread pool: every index once, callers at the same time, nested calls, forks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "check.h"
#include "cpu/thread_pool.h"

// A child that starts threads after a fork of a process with threads is beyond TSan, and beyond
// some emulators, for which the build defines this as 0.
#if defined(MLX_H2O_TEST_FORK)
#elif defined(__SANITIZE_THREAD__)
#define MLX_H2O_TEST_FORK 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MLX_H2O_TEST_FORK 0
#endif
#endif
#ifndef MLX_H2O_TEST_FORK
#define MLX_H2O_TEST_FORK 1
#endif

namespace mlx_h2o::test {

/// Runs one call; says whether each index came once and no worker twice at a time.
inline bool covers(int64_t count, int64_t grain, int max_workers) {
  std::vector<int> seen(static_cast<size_t>(count), 0);  // not atomic: a race is a fault
  std::vector<std::atomic<bool>> busy(static_cast<size_t>(max_workers));
  std::atomic<bool> right{true};
  kernels::parallel_for(
      count,
      [&](int64_t index, int worker) {
        if (worker < 0 || worker >= max_workers ||
            busy[static_cast<size_t>(worker)].exchange(true)) {
          right = false;
          return;
        }
        ++seen[static_cast<size_t>(index)];
        busy[static_cast<size_t>(worker)] = false;
      },
      grain, max_workers);
  for (int times : seen) {
    if (times != 1) return false;
  }
  return right;
}

/// What is wrong with a call of which `threads` threads are inside at the same time; "" if nothing.
inline const char* meeting_of(int threads) {
  std::vector<std::atomic<int>> seen(static_cast<size_t>(threads));
  std::atomic<int> inside{0}, left{0};
  std::atomic<bool> met{false}, right{true};
  kernels::parallel_for(threads, [&](int64_t, int worker) {
    if (worker < 0 || worker >= threads || seen[static_cast<size_t>(worker)]++ != 0) right = false;
    ++inside;
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(4);
    while (inside < threads && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    if (inside == threads) {
      met = true;
    } else {
      --inside;
    }
    if (worker != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ++left;
  });
  if (left != threads) return "the caller went before its helpers";
  if (!met) return "a thread did not wake up to help";
  return right ? "" : "two threads have one number";
}

inline void test_pool_counts(Random& random, int cases, Report& report) {
  for (int i = 0; i < cases; ++i) {
    set_threads(random.between(1, 5));
    const int count = random.between(0, 200);
    const int grain = random.between(1, 9);
    const int max_workers = random.between(1, 6);
    for (int repeat = 0; repeat < 20; ++repeat) {
      if (covers(count, grain, max_workers)) continue;
      report.mismatch("pool: %d indices by %d on %d of %d threads did not come once each", count,
                      grain, max_workers, threads());
    }
  }
  for (int threads = 2; threads <= 4; ++threads) {
    set_threads(threads);
    for (int pause : {0, 2}) {  // milliseconds, after which they sleep
      std::this_thread::sleep_for(std::chrono::milliseconds(pause));
      const char* complaint = meeting_of(threads);
      if (*complaint == 0) continue;
      report.mismatch("pool of %d: %s", threads, complaint);
      return;
    }
  }
}

inline void test_pool_callers(Report& report) {
  set_threads(3);
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&wrong, i] {
      for (int repeat = 0; repeat < 300; ++repeat) {
        if (!covers(37, 2, 3)) ++wrong;
        if (i == 0 && repeat % 50 == 0) set_threads(2 + repeat % 3);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  if (wrong != 0)
    report.mismatch("pool: %d of the calls at the same time went wrong", wrong.load());

  set_threads(3);
  std::atomic<int> inner{0};
  kernels::parallel_for(10, [&](int64_t) {
    kernels::parallel_for(10, [&](int64_t, int worker) { inner += worker == 0 ? 1 : 1000; });
  });
  if (inner != 100) report.mismatch("pool: nested calls counted %d, expected 100", inner.load());
}

inline void test_pool_counts_refused(Report& report) {
  for (int threads : {-1, kMaxThreads + 1}) {
    try {
      set_threads(threads);
      report.mismatch("pool: %d threads were accepted", threads);
    } catch (const std::invalid_argument&) {  // as it should
    }
  }
}

/// A child has none of its parent's threads, whether the parent used them or not.
inline void test_pool_after_fork(Report& report) {
#if MLX_H2O_TEST_FORK
  for (int round = 0; round < 3; ++round) {
    set_threads(3);
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);  // a child that hangs dies by a signal
      const bool right = covers(50, 1, 3) && *meeting_of(3) == 0;
#if defined(__SANITIZE_ADDRESS__)
      std::_Exit(right ? 0 : 1);  // the leak checker looks for the parent's threads
#else
      std::exit(right ? 0 : 1);  // with static destruction, which joins the child's threads
#endif
    }
    int status = -1;
    waitpid(child, &status, 0);
    if (status != 0) report.mismatch("pool: a child ended with status %d", status);
    if (!covers(50, 1, 3)) report.mismatch("pool: the parent of a child went wrong");
  }
#else
  static_cast<void>(report);
#endif
}

inline void test_pool(Random& random, int cases, Report& report) {
  test_pool_after_fork(report);  // first: the parent's first child comes before its first thread
  test_pool_counts(random, std::min(cases, 50), report);
  test_pool_callers(report);
  test_pool_counts_refused(report);
  set_threads(0);
}

}  // namespace mlx_h2o::test
