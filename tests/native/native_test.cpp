// Drives the kernels of core/ without MLX, on memory of exactly the size that they may read, so
// that a sanitizer sees any step outside it: h2o_native_test [cases [seed]].
#include <cstdio>
#include <cstdlib>

#include "attention_cases.h"
#include "cache_cases.h"
#include "folding_cases.h"
#include "pool_cases.h"
#include "prefill_cases.h"
#include "selection_cases.h"
#include "turbo_cases.h"

int main(int argc, char** argv) {
  using namespace mlx_h2o::test;
  const int cases = argc > 1 ? std::atoi(argv[1]) : 300;
  const int seed = argc > 2 ? std::atoi(argv[2]) : 1;
  if (cases < 1) {
    std::fprintf(stderr, "usage: %s [cases [seed]]\n", argv[0]);
    return 2;
  }
  Report report;
  // Attention last, as it takes nearly all the time: a fault elsewhere is found before it.
  for (auto* test : {test_pool, test_selection, test_accumulation, test_key_diversity,
                     test_quantization, test_codes, test_folding, test_prefill, test_attention}) {
    mlx_h2o::set_threads(3);                     // whatever this machine has
    Random random(static_cast<unsigned>(seed));  // more cases of one change no other's
    test(random, cases, report);
  }
  std::printf("%d cases from seed %d: %ld mismatches\n", cases, seed, report.mismatches());
  return report.mismatches() == 0 ? 0 : 1;
}
