"""Registers of a decode loop whose lanes serve several query heads at once, by NVRTC.

    python benchmarks/grouped_registers.py --json benchmarks/results/grouped_registers.json

A draft of the main loop only, from the functions of metal/h2o.h: dense float16 or packed rows of
128, no mask, no merge of the simdgroups. It says what such a kernel needs at least, and nothing of
its speed. Needs the wheels that tests/lib/nvrtc.py names. Occupancy is arithmetic for compute
capability 9.0: 65536 registers, handed out to warps by 256, 64 warps and 32 threadgroups on a
multiprocessor.
"""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "lib"))

import common

import nvrtc
from mlx_h2o.evaluation.environment import environment
from mlx_h2o.operations.gpu import cuda

SIZE = 128
WARP = 32
REGISTERS, WARPS, GROUPS = 65536, 64, 32

SIGNATURE = """
extern "C" __global__ void draft(
    const __half* queries, const KEYS* keys, const KEYS* values, const __half* scales,
    const __half* biases, float* scores, float* out, int key_count, float scale) {
  constexpr int P = 4;  // of 128 elements, a lane's
  const int lane = threadIdx.x & 31;
  const int group = threadIdx.x >> 5;
  float query[HEADS][P];
  float sums[HEADS][P];
  h2o_softmax state[HEADS];
  for (int g = 0; g < HEADS; g++) {
    h2o_load<P>(queries + (blockIdx.x * HEADS + g) * 128 + lane * P, int64_t(1), query[g]);
    for (int j = 0; j < P; j++) {
      query[g][j] *= scale;
      sums[g][j] = 0.0f;
    }
    state[g] = h2o_softmax_empty();
  }
  for (int i = group; i < key_count; i += SIMDGROUPS) {
    const int64_t row = int64_t(blockIdx.x) * key_count + i;
    float key[P];
    float value[P];
    LOAD
    for (int g = 0; g < HEADS; g++) {
      const float score = metal::simd_sum(h2o_dot<P>(query[g], key));
      if (lane == 0) {
        scores[(blockIdx.x * HEADS + g) * int64_t(key_count) + i] = score;
      }
      const float weight = h2o_softmax_weigh<P>(state[g], sums[g], score);
      h2o_add_row<P>(sums[g], weight, value);
    }
  }
  for (int g = 0; g < HEADS; g++) {
    for (int j = 0; j < P; j++) {
      out[((blockIdx.x * HEADS + g) * SIMDGROUPS + group) * 130 + lane * P + j] = sums[g][j];
    }
    out[((blockIdx.x * HEADS + g) * SIMDGROUPS + group) * 130 + 128] = state[g].maximum;
    out[((blockIdx.x * HEADS + g) * SIMDGROUPS + group) * 130 + 129] = state[g].total;
  }
}
"""
DENSE = """h2o_load<P>(keys + row * 128 + lane * P, int64_t(1), key);
    h2o_load<P>(values + row * 128 + lane * P, int64_t(1), value);"""
PACKED = """h2o_load_quantized<P, BITS, 64>(keys + row * (BITS * 4), int64_t(1), scales + row * 2,
        int64_t(1), biases + row * 2, int64_t(1), lane * P, key);
    h2o_load_quantized<P, BITS, 64>(values + row * (BITS * 4), int64_t(1), scales + row * 2,
        int64_t(1), biases + row * 2, int64_t(1), lane * P, value);"""


def draft(heads: int, bits: int | None, simdgroups: int) -> str:
    """The text of one draft, with launch bounds for its threads."""
    text = SIGNATURE.replace("LOAD", DENSE if bits is None else PACKED)
    words = {
        "HEADS": heads,
        "SIMDGROUPS": simdgroups,
        "KEYS": "__half" if bits is None else "uint32_t",
        "BITS": bits,
    }
    for word, value in words.items():
        text = re.sub(rf"\b{word}\b", str(value), text)
    include = f'#include "{nvrtc.MLX_UTILS_NAME}"\n#include <cooperative_groups.h>\n'
    return include + cuda.header(simdgroups * WARP) + "namespace cg = cooperative_groups;" + text


def resident_warps(registers: int, simdgroups: int) -> int:
    """Warps that a multiprocessor holds at once, in whole threadgroups."""
    of_a_warp = -(-registers * WARP // 256) * 256
    groups = min(REGISTERS // (of_a_warp * simdgroups), WARPS // simdgroups, GROUPS)
    return groups * simdgroups


def main() -> None:
    args = common.arguments(__doc__)
    results = []
    for bits, heads, simdgroups in itertools.product((None, 8, 4), (1, 4, 8, 16), (32, 8)):
        (needs,) = nvrtc.compile_cuda(draft(heads, bits, simdgroups), "sm_90").values()
        found = {
            "rows": "float16" if bits is None else f"{bits} bits",
            "heads": heads,
            "simdgroups": simdgroups,
            "registers": needs.registers,
            "local_bytes": needs.stack,
            "resident_warps": resident_warps(needs.registers, simdgroups),
        }
        common.show("draft", found)
        results.append(found)
    where = environment() | {"compiler": "NVRTC 13.0, sm_90"}
    common.save(args.json, {"environment": where, "results": results})


if __name__ == "__main__":
    main()
