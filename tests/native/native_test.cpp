// Drives the kernels of core/ without MLX, on memory of exactly the size that they may read, so
// that a sanitizer sees any step outside it: h2o_native_test [cases [seed]].
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "attention_cases.h"
#include "cache_cases.h"
#include "merging_cases.h"
#include "pool_cases.h"
#include "prefill_cases.h"
#include "selection_cases.h"
#include "step_cases.h"

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 300;
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  if (cases < 1) {
    std::fprintf(stderr, "usage: %s [cases [seed]]\n", argv[0]);
    return 2;
  }
  mlx_h2o::test::Random random(static_cast<unsigned>(seed));
  mlx_h2o::test::Report report;
  mlx_h2o::test::test_pool(random, std::min(cases, 50), report);
  mlx_h2o::kernels::set_thread_count(3);  // whatever this machine has
  mlx_h2o::test::test_selection(random, cases * 4, report);
  mlx_h2o::test::test_accumulation(random, cases, report);
  mlx_h2o::test::test_key_diversity(random, cases, report);
  mlx_h2o::test::test_quantization(random, cases, report);
  mlx_h2o::test::test_merging(random, cases, report);
  mlx_h2o::test::test_worst_row(random, cases, report);
  mlx_h2o::test::test_row_writing(random, cases, report);
  mlx_h2o::test::test_prefill(random, cases, report);
  // Last, as it takes nearly all the time: a fault elsewhere is found before it.
  mlx_h2o::test::test_attention(random, cases, report);
  std::printf("%d cases from seed %d: %ld mismatches\n", cases, seed, report.mismatches());
  return report.mismatches() == 0 ? 0 : 1;
}
