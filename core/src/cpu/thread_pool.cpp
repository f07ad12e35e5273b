// One caller at a time owns the pool (`owned`); any other does its own work alone, so nobody waits
// for anybody's job. A job is published in `ticket`, and a worker that wants to help takes a place
// there in the same atomic step that makes sure the job is still open: a worker that wakes up too
// late takes no part, and the caller waits only for those that took a place.
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

// How long a worker looks for the next job before it sleeps: waking it costs the caller a system
// call and the job some microseconds. While it looks it offers its processor to others, the caller
// among them, who may share it.
constexpr auto kPatience = std::chrono::microseconds(20);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// The fields of a ticket, from the lowest bit on: workers inside, free places, number of the job.
// A job is open while it has free places.
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
    // Signals are for the threads of the program.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 0; i < count; ++i) threads_.emplace_back([this] { live(); });
    } catch (const std::system_error&) {
      // No more threads are to be had: those that there are do the work.
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

  /// How many were asked for.
  int wanted() const { return wanted_; }

  void run(const Job& job, uint64_t helpers) {
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t last = ticket_.load(std::memory_order_relaxed);
    ticket_.store((number(last) + 1) * kNumber + helpers * kPlace);
    wake(std::min(helpers, sleepers_.load()));
    job.work(next_, 0);
    // Who has not come by now need not come.
    ticket_.fetch_and(~(kNumber - kPlace), std::memory_order_acq_rel);
    for (int turn = 0; inside(ticket_.load(std::memory_order_acquire)) != 0; ++turn) {
      turn < 1000 ? relax() : std::this_thread::yield();
    }
  }

 private:
  void wake(uint64_t count) {
    if (count == 0) return;
    // Whoever has counted itself a sleeper holds the lock until it does sleep.
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

  /// Waits for a job other than number `seen`; false: the end has come instead.
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

  /// Takes a place in the job that is open, if there is still one; returns the job's number.
  uint64_t help(uint64_t seen) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    do {
      if (places(ticket) == 0 || number(ticket) == seen) return seen;
    } while (!ticket_.compare_exchange_weak(ticket, ticket + kInside - kPlace,
                                            std::memory_order_acq_rel));
    // The free places count down, so that each worker of a job has a number of its own above 0.
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

// Who holds `owned` may use `workers`.
std::atomic<bool> owned{false};
Workers* workers = nullptr;
Workers* lost = nullptr;  // of the process that this one was forked from: its threads are not here

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

// At the end of the process the threads are joined, and `owned` stays taken: streams that still
// run then do their work alone.
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
  const int threads = thread_count();
  const int64_t parts = (count - 1) / grain + 1;
  const int64_t helpers = std::min<int64_t>({threads, max_workers, parts}) - 1;
  if (helpers < 1 || owned.exchange(true, std::memory_order_acquire)) {
    return body(context, 0, count, 0);
  }
  workers_for(threads).run({body, context, count, grain}, static_cast<uint64_t>(helpers));
  owned.store(false, std::memory_order_release);
}

}  // namespace mlx_h2o::kernels
