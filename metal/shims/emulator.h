// Runs one GPU threadgroup at a time on a CPU thread, with a fibre for each GPU thread.
// Fibres switch only where GPU threads meet: in simdgroup collectives and at barriers,
// where all 32 lanes, or all threads, must arrive at the same place in the source.
// Anything else is reported as an error. Results must not depend on the order in which
// threads run, so tests run several orders.
//
// Kernels are compiled against this header, and run by emulator.cpp, compiled once.
#pragma once
#include <cstring>
#include <functional>
#include <source_location>
#include <string>

#include "arena.h"

namespace emulator {

inline constexpr int kLanes = 32;
inline constexpr int kMaxThreads = 1024;
inline constexpr int kMaxSimdgroups = kMaxThreads / kLanes;
inline constexpr uint32_t kAllLanes = ~0u;

struct Position {
  unsigned x, y, z;
};

// The built-in values of a GPU thread.
struct ThreadInfo {
  Position in_threadgroup, threadgroup, threads, threadgroups;
  unsigned index, lane, simdgroup, simdgroups;
};

enum class Schedule { forward, reverse, random };
enum class Collective { sum, maximum, exchange };
using Site = std::source_location;
using Body = std::function<void(const ThreadInfo&)>;

class Threadgroup {
 public:
  Threadgroup(const Body& body, Schedule schedule, uint64_t seed);

  // Runs all threads of threadgroup `id` to the end; throws the first error.
  void run(Position id, Position threads, Position threadgroups);

  // From here on: functions that kernel code calls through the shim.

  // Every lane passes a value and gets the combination of all.
  template <Collective kind, class T>
  T combine(T value, const Site& site) {
    const unsigned round = meet(kind, &value, sizeof value, site, &reduce<kind, T>);
    return load<T>(own_simdgroup().combined[round]);
  }

  // Every lane passes a value and gets the value of lane `from`.
  template <class T>
  T exchange(T value, int from, const Site& site) {
    static_assert(sizeof(T) <= kLargestValue);
    check_lane(from, site);
    const unsigned round = meet(Collective::exchange, &value, sizeof value, site, nullptr);
    return load<T>(own_simdgroup().values[round][from]);
  }

  void barrier(const Site& site);

  // The current thread accessed an unmapped page.
  [[noreturn]] void memory_fault();

  // Returns the same memory to all threads, in the order of their allocations.
  void* allocate(const char* name, size_t bytes);

  int lane() const { return current_ % kLanes; }

 private:
  static constexpr size_t kStackBytes = 64 * 1024;
  static constexpr size_t kLargestValue = 16;

  struct Simdgroup {
    uint32_t alive;    // lanes that have not returned
    uint32_t ready;    // lanes that can run
    uint32_t arrived;  // lanes in the collective
    Collective kind;
    Site site;
    // Alternating, so that a lane can pass a value before all have read the last one.
    alignas(16) unsigned char values[2][kLanes][kLargestValue];
    alignas(16) unsigned char combined[2][kLargestValue];
  };

  template <class T>
  static void store(unsigned char* to, T value) {
    static_assert(sizeof(T) <= kLargestValue);
    std::memcpy(to, &value, sizeof value);
  }

  template <class T>
  static T load(const unsigned char* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
  }

  using Reduce = void (*)(Simdgroup& simdgroup, unsigned round);

  // Passes the lane's value, waits for all lanes (the last one reduces); returns the round.
  unsigned meet(Collective kind, const void* value, size_t bytes, const Site& site, Reduce reduce);
  template <Collective kind, class T>
  static void reduce(Simdgroup& simdgroup, unsigned round);
  void check_lane(int from, const Site& site);

  Simdgroup& own_simdgroup() { return simdgroups_[current_ / kLanes]; }
  int choose_lane(uint32_t ready);
  int choose_simdgroup();
  void prepare(Position id, Position threads, Position threadgroups);
  void switch_to(int thread);
  void go_on_elsewhere();
  [[noreturn]] void leave();
  [[noreturn]] void fail(const std::string& message);
  static void thread_main();
  uint64_t random();

  const Body& body_;
  const Schedule schedule_;
  const uint64_t seed_;
  Pages stacks_;
  Arena arena_;
  Simdgroup simdgroups_[kMaxSimdgroups];
  ThreadInfo infos_[kMaxThreads];
  void* fibers_[kMaxThreads];
  int allocations_[kMaxThreads];
  unsigned rounds_[kMaxThreads];
  void* caller_ = nullptr;
  int thread_count_ = 0;
  int alive_count_ = 0;
  int waiting_count_ = 0;  // threads at the barrier
  int current_ = 0;
  Site barrier_site_;
  uint64_t random_state_ = 0;
  std::string error_;
};

// The threadgroup that this CPU thread is running.
extern constinit thread_local Threadgroup* running;

// A butterfly: hardware adds in the same order.
template <Collective kind, class T>
void Threadgroup::reduce(Simdgroup& simdgroup, unsigned round) {
  if constexpr (kind != Collective::exchange) {
    T values[kLanes];
    for (int i = 0; i < kLanes; i++) {
      values[i] = load<T>(simdgroup.values[round][i]);
    }
    for (int half = kLanes / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; i++) {
        const T a = values[i];
        const T b = values[i + half];
        if constexpr (kind == Collective::sum) {
          values[i] = static_cast<T>(a + b);
        } else {
          values[i] = a < b ? b : a;
        }
      }
    }
    store(simdgroup.combined[round], values[0]);
  }
}

struct Launch {
  Position grid;     // in threads, as metal_kernel takes it
  Position threads;  // of a threadgroup
  Schedule schedule;
  uint64_t seed;
  int workers;
};

// Runs all threadgroups on a few CPU threads; throws an error of one of them.
void run(const Launch& launch, const Body& body);

}  // namespace emulator
