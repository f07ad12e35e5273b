// One caller at a time owns the pool (`owned`); any other caller does its work alone, so nobody
// waits for another caller's job. A job is published in `ticket`. A worker joins by taking a place
// there, in one atomic step that also checks that the job is still open: a worker that wakes up too
// late stays out, and the caller waits only for workers that took a place.
#include "cpu/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <pthread.h>
#include <system_error>
#include <thread>
#include <vector>

namespace mlx_h2o::kernels {
namespace {

// How long a worker spins for the next job before it sleeps: waking it costs the caller a system
// call and the job some microseconds. While it spins it yields its processor, which it may share
// with the caller.
constexpr auto kPatience = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The fields of a ticket, from the lowest bit on: workers inside, free places, number of the job. A
// job is open while it has free places.
constexpr uint64_t kInside = 1;
constexpr uint64_t kPlace = uint64_t{1} << 16;
constexpr uint64_t kNumber = uint64_t{1} << 32;

constexpr uint64_t inside(uint64_t ticket) { return ticket & (kPlace - 1); }
constexpr uint64_t places(uint64_t ticket) { return ticket / kPlace % (kNumber / kPlace); }
constexpr uint64_t number(uint64_t ticket) { return ticket / kNumber; }

struct Job {
  pool::Body body = nullptr;
  const void* context = nullptr;
  int64_t count = 0;
  int64_t grain = 1;

  void work(std::atomic<int64_t>& next, int worker) const {
    for (;;) {
      const int64_t first = next.fetch_add(grain, std::memory_order_relaxed);
      if (first >= count) return;
      body(context, first, std::min(count, first + grain), worker);
    }
  }
};

class Workers {
 public:
  explicit Workers(int count) {
    // Block all signals in workers: they are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 0; i < count; ++i) threads_.emplace_back([this] { live(); });
    } catch (const std::system_error&) {
      // The system has no more threads: work with those that started.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    wanted_ = count;
  }

  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  ~Workers() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  /// The number of threads that were requested.
  int wanted() const { return wanted_; }

  void run(const Job& job, uint64_t helpers) {
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t last = ticket_.load(std::memory_order_relaxed);
    ticket_.store((number(last) + 1) * kNumber + helpers * kPlace);
    wake(std::min(helpers, sleepers_.load()));
    job.work(next_, 0);
    // Close the job to workers that have not joined yet.
    ticket_.fetch_and(~(kNumber - kPlace), std::memory_order_acq_rel);
    for (int turn = 0; inside(ticket_.load(std::memory_order_acquire)) != 0; ++turn) {
      turn < 1000 ? relax() : std::this_thread::yield();
    }
  }

 private:
  void wake(uint64_t count) {
    if (count == 0) return;
    // A worker that is counted as sleeping holds the lock until it sleeps, so it will be woken.
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    for (; count > 0; --count) wake_.notify_one();
  }

  void live() {
    for (uint64_t seen = 0; wait_for_job(seen);) seen = help(seen);
  }

  bool is_due(uint64_t seen) const {
    const uint64_t ticket = ticket_.load();
    return (places(ticket) != 0 && number(ticket) != seen) || stop_.load();
  }

  /// Waits for a job with another number than `seen`; false: the pool stops instead.
  bool wait_for_job(uint64_t seen) {
    const auto until = std::chrono::steady_clock::now() + kPatience;
    do {
      for (int turn = 0; turn < 16; ++turn) {
        if (is_due(seen)) return !stop_.load();
        relax();
      }
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return is_due(seen); });
    sleepers_.fetch_sub(1);
    return !stop_.load();
  }

  /// Takes a place in the open job, if there still is one, and works; returns the job's number.
  uint64_t help(uint64_t seen) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if (places(ticket) == 0 || number(ticket) == seen) return seen;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + kInside - kPlace,
                                            std::memory_order_acq_rel));
    // Free places count down, so each worker of a job gets its own number, above 0.
    job_.work(next_, static_cast<int>(places(ticket)));
    ticket_.fetch_sub(kInside, std::memory_order_release);
    return number(ticket);
  }

  alignas(64) std::atomic<uint64_t> ticket_{0};
  std::vector<std::thread> threads_;
  Job job_;
  alignas(64) std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  int wanted_ = 0;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint64_t> sleepers_{0};
};

// The owner of `owned` may use `workers`.
std::atomic<bool> owned{false};
Workers* workers = nullptr;
Workers* lost = nullptr;  // left over in a forked child: its threads do not exist here

void begin_child() {
  lost = workers;
  workers = nullptr;
  owned.store(false);
}

Workers& workers_for(int threads) {
  if (workers == nullptr) {
    static const bool watches_forks = pthread_atfork(nullptr, nullptr, begin_child) == 0;
    static_cast<void>(watches_forks);
  }
  if (workers == nullptr || workers->wanted() != threads - 1) {
    delete workers;
    workers = new Workers(threads - 1);
  }
  return *workers;
}

// At the end of the process, join the threads and keep `owned` taken: streams that still run then
// do their work alone.
struct Ending {
  ~Ending() {
    while (owned.exchange(true, std::memory_order_acquire)) std::this_thread::yield();
    delete workers;
    workers = nullptr;
  }
} ending;

}  // namespace

void pool::run(int64_t count, int64_t grain, int max_workers, Body body, const void* context) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int threads = mlx_h2o::threads();
  const int64_t parts = (count - 1) / grain + 1;
  const int64_t helpers = std::min<int64_t>({threads, max_workers, parts}) - 1;
  if (helpers < 1 || owned.exchange(true, std::memory_order_acquire)) {
    return body(context, 0, count, 0);
  }
  workers_for(threads).run({body, context, count, grain}, static_cast<uint64_t>(helpers));
  owned.store(false, std::memory_order_release);
}

}  // namespace mlx_h2o::kernels
