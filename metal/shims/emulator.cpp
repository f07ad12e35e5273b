// Runs the kernels: threads that meet, scheduling when one has to wait, and launches.
#include "emulator.h"

#include <atomic>
#include <bit>
#include <memory>
#include <mutex>
#include <signal.h>
#include <stdexcept>
#include <thread>
#include <vector>

#include "fiber.h"

namespace emulator {

constinit thread_local Threadgroup* running = nullptr;

namespace {

std::string describe(const Site& site) {
  return std::string(site.file_name()) + ":" + std::to_string(site.line());
}

std::string describe(const Position& p) {
  return std::to_string(p.x) + "," + std::to_string(p.y) + "," + std::to_string(p.z);
}

size_t volume(const Position& p) { return size_t{p.x} * p.y * p.z; }

// While it exists, a memory fault in kernel code ends that threadgroup with an error.
// Only one at a time in a process: signal handlers belong to all threads.
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
      // Not kernel code: let the fault repeat and end the process.
      ::signal(signal, SIG_DFL);
      return;
    }
    running->memory_fault();
  }

  struct sigaction segment_, bus_;
};

}  // namespace

Threadgroup::Threadgroup(const Body& body, Schedule schedule, uint64_t seed)
    : body_(body), schedule_(schedule), seed_(seed), stacks_(kMaxThreads * kStackBytes) {}

void* Threadgroup::allocate(const char* name, size_t bytes) {
  const std::string problem = arena_.problem(allocations_[current_], name, bytes);
  if (!problem.empty()) {
    fail(problem);
  }
  return arena_.allocation(allocations_[current_]++);
}

void Threadgroup::check_lane(int from, const Site& site) {
  if (from < 0 || from >= kLanes) {
    fail("shuffle from lane " + std::to_string(from) + " at " + describe(site));
  }
}

unsigned Threadgroup::meet(Collective kind, const void* value, size_t bytes, const Site& site,
                           Reduce reduce) {
  Simdgroup& simdgroup = own_simdgroup();
  const unsigned round = rounds_[current_]++ % 2;
  std::memcpy(simdgroup.values[round][lane()], value, bytes);
  if (simdgroup.arrived == 0) {
    simdgroup.kind = kind;
    simdgroup.site = site;
  } else if (simdgroup.kind != kind || simdgroup.site.line() != site.line()) {
    fail("divergence: lanes of one simdgroup are in different collectives, at " + describe(site) +
         " and at " + describe(simdgroup.site));
  }
  simdgroup.arrived |= 1u << lane();
  simdgroup.ready &= ~(1u << lane());
  if (simdgroup.arrived != kAllLanes) {
    go_on_elsewhere();
    return round;
  }
  if (reduce != nullptr) {
    reduce(simdgroup, round);
  }
  simdgroup.arrived = 0;
  simdgroup.ready = kAllLanes;
  // On a GPU, too, other simdgroups may get ahead here.
  if (schedule_ == Schedule::random && random() % 8 == 0) {
    const int next = choose_simdgroup();
    switch_to(next * kLanes + choose_lane(simdgroups_[next].ready));
  }
  return round;
}

uint64_t Threadgroup::random() {
  random_state_ = random_state_ * 6364136223846793005u + 1442695040888963407u;
  return random_state_ >> 33;
}

int Threadgroup::choose_lane(uint32_t ready) {
  switch (schedule_) {
    case Schedule::forward:
      return std::countr_zero(ready);
    case Schedule::reverse:
      return kLanes - 1 - std::countl_zero(ready);
    case Schedule::random: {
      const int turn = static_cast<int>(random() % kLanes);
      return (std::countr_zero(std::rotr(ready, turn)) + turn) % kLanes;
    }
  }
  return 0;
}

// A simdgroup with a thread that can run, or -1.
int Threadgroup::choose_simdgroup() {
  const int count = thread_count_ / kLanes;
  const int own = current_ / kLanes;
  const int start = schedule_ == Schedule::random ? static_cast<int>(random() % count) : own;
  const int step = schedule_ == Schedule::reverse ? count - 1 : 1;
  for (int i = 1; i <= count; i++) {
    const int candidate = (start + i * step) % count;
    if (simdgroups_[candidate].ready != 0) {
      return candidate;
    }
  }
  return -1;
}

void Threadgroup::switch_to(int thread) {
  const int self = current_;
  if (thread != self) {
    current_ = thread;
    switch_fiber(&fibers_[self], fibers_[thread]);
  }
}

// Switches away from the current thread, which waits or has returned.
void Threadgroup::go_on_elsewhere() {
  const Simdgroup& own = own_simdgroup();
  if (own.ready != 0) {
    switch_to(current_ / kLanes * kLanes + choose_lane(own.ready));
    return;
  }
  if (own.arrived != 0) {
    fail("divergence: " + std::to_string(std::popcount(own.arrived)) +
         " lanes wait in the collective at " + describe(own.site) + ", the others do not come");
  }
  const int next = choose_simdgroup();
  if (next < 0) {
    fail("deadlock: " + std::to_string(waiting_count_) + " of " + std::to_string(thread_count_) +
         " threads wait at the barrier " + describe(barrier_site_) + ", the others have returned");
  }
  switch_to(next * kLanes + choose_lane(simdgroups_[next].ready));
}

void Threadgroup::barrier(const Site& site) {
  if (waiting_count_ == 0) {
    barrier_site_ = site;
  } else if (barrier_site_.line() != site.line()) {
    fail("divergence: threads wait at different barriers, " + describe(site) + " and " +
         describe(barrier_site_));
  }
  own_simdgroup().ready &= ~(1u << lane());
  if (++waiting_count_ == thread_count_) {
    waiting_count_ = 0;
    for (int i = 0; i < thread_count_ / kLanes; i++) {
      simdgroups_[i].ready = simdgroups_[i].alive;
    }
    const int next = choose_simdgroup();
    switch_to(next * kLanes + choose_lane(simdgroups_[next].ready));
  } else {
    go_on_elsewhere();
  }
}

void Threadgroup::leave() {
  void* abandoned;
  switch_fiber(&abandoned, caller_);
  __builtin_unreachable();
}

// Ends the run and abandons the other fibres where they are.
void Threadgroup::fail(const std::string& message) {
  error_ = message;
  leave();
}

void Threadgroup::memory_fault() {
  fail("memory fault: thread " + std::to_string(current_) +
       " read or wrote outside the buffers of the kernel");
}

void Threadgroup::thread_main() {
  Threadgroup& self = *running;
  self.body_(self.infos_[self.current_]);
  Simdgroup& simdgroup = self.own_simdgroup();
  simdgroup.alive &= ~(1u << self.lane());
  simdgroup.ready &= ~(1u << self.lane());
  if (--self.alive_count_ == 0) {
    self.leave();
  }
  self.go_on_elsewhere();
  __builtin_unreachable();
}

void Threadgroup::prepare(Position id, Position threads, Position threadgroups) {
  thread_count_ = alive_count_ = static_cast<int>(threads.x * threads.y * threads.z);
  waiting_count_ = 0;
  error_.clear();
  random_state_ = seed_ + (id.x * 73856093u ^ id.y * 19349663u ^ id.z * 83492791u);
  arena_.reset();
  const unsigned simdgroups = static_cast<unsigned>(thread_count_) / kLanes;
  for (unsigned i = 0; i < simdgroups; i++) {
    simdgroups_[i].alive = simdgroups_[i].ready = kAllLanes;
    simdgroups_[i].arrived = 0;
  }
  for (unsigned i = 0; i < static_cast<unsigned>(thread_count_); i++) {
    infos_[i] = {
        .in_threadgroup = {i % threads.x, i / threads.x % threads.y, i / (threads.x * threads.y)},
        .threadgroup = id,
        .threads = threads,
        .threadgroups = threadgroups,
        .index = i,
        .lane = i % kLanes,
        .simdgroup = i / kLanes,
        .simdgroups = simdgroups};
    allocations_[i] = 0;
    rounds_[i] = 0;
    // Stagger the stack tops, or all would compete for the same cache sets.
    char* top = stacks_.begin() + (i + 1) * kStackBytes - i % 64 * 320;
    fibers_[i] = new_fiber(top, &Threadgroup::thread_main);
  }
}

void Threadgroup::run(Position id, Position threads, Position threadgroups) {
  prepare(id, threads, threadgroups);
  running = this;
  current_ = 0;
  const int first = choose_simdgroup();
  current_ = first * kLanes + choose_lane(simdgroups_[first].ready);
  switch_fiber(&caller_, fibers_[current_]);
  running = nullptr;
  if (error_.empty()) {
    error_ = arena_.overrun();
  }
  if (!error_.empty()) {
    throw std::runtime_error(error_ + " [threadgroup " + describe(id) + "]");
  }
}


void run(const Launch& launch, const Body& body) {
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
