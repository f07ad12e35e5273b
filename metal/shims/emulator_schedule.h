// Which thread goes on when one cannot (the second half of emulator.h).
#pragma once
#include <bit>

namespace emulator {

inline uint64_t Threadgroup::random() {
  random_state_ = random_state_ * 6364136223846793005u + 1442695040888963407u;
  return random_state_ >> 33;
}

inline int Threadgroup::choose_lane(uint32_t ready) {
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

// A simdgroup with a thread that can go on, or -1.
inline int Threadgroup::choose_simdgroup() {
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

inline void Threadgroup::switch_to(int thread) {
  const int self = current_;
  if (thread != self) {
    current_ = thread;
    switch_fiber(&fibers_[self], fibers_[thread]);
  }
}

// The current thread waits, or has returned.
inline void Threadgroup::go_on_elsewhere() {
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

inline void Threadgroup::barrier(const Site& site) {
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

inline void Threadgroup::leave() {
  void* abandoned;
  switch_fiber(&abandoned, caller_);
  __builtin_unreachable();
}

// Ends the run; the other fibres are abandoned where they are.
inline void Threadgroup::fail(const std::string& message) {
  error_ = message;
  leave();
}

inline void Threadgroup::memory_fault() {
  fail("memory fault: thread " + std::to_string(current_) +
       " read or wrote outside the buffers of the kernel");
}

inline void Threadgroup::thread_main() {
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

inline void Threadgroup::prepare(Position id, Position threads, Position threadgroups) {
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
    // Tops at different offsets: equal ones would all compete for the same cache sets.
    char* top = stacks_.begin() + (i + 1) * kStackBytes - i % 64 * 320;
    fibers_[i] = new_fiber(top, &Threadgroup::thread_main);
  }
}

inline void Threadgroup::run(Position id, Position threads, Position threadgroups) {
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

}  // namespace emulator
