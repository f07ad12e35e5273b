// Drives the kernels of core/ without MLX, on memory of exactly the size that they may read, so
// that a sanitizer sees any step outside it: h2o_native_test [cases [seed [part ...]]].
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <set>
#include <string>

#include "attention_cases.h"
#include "cache_cases.h"
#include "merging_cases.h"
#include "pool_cases.h"
#include "prefill_cases.h"
#include "selection_cases.h"
#include "step_cases.h"

namespace {

using mlx_h2o::test::Random;
using mlx_h2o::test::Report;

struct Part {
  const char* name;
  void (*test)(Random&, int, Report&);
};

// Attention last, as it takes nearly all the time: a fault elsewhere is found before it.
constexpr Part kParts[] = {
    {"pool", mlx_h2o::test::test_pool},
    {"selection", mlx_h2o::test::test_selection},
    {"accumulation", mlx_h2o::test::test_accumulation},
    {"key_diversity", mlx_h2o::test::test_key_diversity},
    {"quantization", mlx_h2o::test::test_quantization},
    {"merging", mlx_h2o::test::test_merging},
    {"worst_row", mlx_h2o::test::test_worst_row},
    {"row_writing", mlx_h2o::test::test_row_writing},
    {"prefill", mlx_h2o::test::test_prefill},
    {"attention", mlx_h2o::test::test_attention},
};

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 300;
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  bool right = cases >= 1;
  std::set<std::string> wanted(argv + std::min(argc, 3), argv + argc);
  for (const std::string& name : wanted) {
    right &= std::any_of(std::begin(kParts), std::end(kParts),
                         [&](const Part& part) { return name == part.name; });
  }
  if (!right) {
    std::fprintf(stderr, "usage: %s [cases [seed [part ...]]]; the parts are", argv[0]);
    for (const Part& part : kParts) std::fprintf(stderr, " %s", part.name);
    std::fputc('\n', stderr);
    return 2;
  }
  Report report;
  for (const Part& part : kParts) {
    if (!wanted.empty() && wanted.count(part.name) == 0) continue;
    mlx_h2o::kernels::set_thread_count(3);       // whatever this machine has
    Random random(static_cast<unsigned>(seed));  // so that a part alone has the same cases
    part.test(random, cases, report);
  }
  std::printf("%d cases from seed %d: %ld mismatches\n", cases, seed, report.mismatches());
  return report.mismatches() == 0 ? 0 : 1;
}
