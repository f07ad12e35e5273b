// Divides a long chunk into pieces of work, by its shape alone, and shares them among the threads.
#include "attention/prefill_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "cpu/thread_pool.h"

namespace mlx_h2o::kernels {
namespace {

constexpr int kKeyBlock = 64;
constexpr int64_t kMostRows = 4096;                // with logits in memory at a time
constexpr int64_t kMassFloats = int64_t{1} << 19;  // of logits, unless 4 rows need more
constexpr int64_t kItems = 32;                     // enough to keep some threads busy

// (group member, query) pairs of one KV head: `queries` queries of each member.
struct QueryRows {
  int64_t first_member, first_query, queries;
  int64_t count;

  int64_t member(int64_t row) const { return first_member + row / queries; }
  int64_t query(int64_t row) const { return first_query + row % queries; }
};

// Memory of the calling thread, kept for its next piece.
struct PrefillScratch {
  float* row;      // [width]
  float* queries;  // [4, width]
  float* turned;   // [width, kKeyBlock]
  float* logits;

  PrefillScratch(int width, int64_t logit_count) {
    row = thread_memory(int64_t{width} * (5 + kKeyBlock) + logit_count);
    queries = row + width;
    turned = queries + 4 * width;
    logits = turned + width * kKeyBlock;
  }
};

#define MLX_H2O_SWEEPS "attention/prefill_sweeps.h"
#include "cpu/simd_each_target.h"
#undef MLX_H2O_SWEEPS

int blocks_of(const AttentionArguments& a) { return (a.key_count + kKeyBlock - 1) / kKeyBlock; }

void average(const AttentionArguments& a, SimdTarget target) {
  const int64_t group = a.query_heads / a.kv_heads;
  const int64_t blocks = blocks_of(a);
  const int64_t together = std::clamp<int64_t>(kMostRows / group, 1, a.query_count);
  parallel_for(int64_t{a.batch} * a.kv_heads * blocks, [&](int64_t item) {
    const int64_t cache_head = item / blocks;
    const int64_t batch = cache_head / a.kv_heads;
    const int64_t kv_head = cache_head % a.kv_heads;
    const auto first = static_cast<int>(item % blocks) * kKeyBlock;
    const PrefillScratch scratch(a.width, group * together * kKeyBlock);
    ScoredBlock block;
    block.count = std::min(kKeyBlock, a.key_count - first);
    block.group = static_cast<int>(group);
    block.scores = scratch.logits;
    block.stride = kKeyBlock;
    block.decay = a.decay;
    block.importance = a.importance + cache_head * a.key_count + first;
    for (int64_t query = 0; query < a.query_count; query += together) {
      const int64_t queries = std::min(together, a.query_count - query);
      const QueryRows rows{0, query, queries, group * queries};
      MLX_H2O_CALL_TARGET(target, score_rows(a, batch, kv_head, rows, first, block.count, scratch,
                                             scratch.logits, kKeyBlock));
      block.query_count = static_cast<int>(queries);
      accumulate_block(block, target);
    }
  });
}

void mass(const AttentionArguments& a, SimdTarget target) {
  const int64_t group = a.query_heads / a.kv_heads;
  const int64_t heads = int64_t{a.batch} * a.kv_heads;
  const int64_t tile = std::clamp<int64_t>(kMassFloats / a.key_count, 4, 64);
  const int64_t tiles_of_member = (a.query_count + tile - 1) / tile;
  const int64_t tiles = group * tiles_of_member;
  // Each part sums its own tiles; the parts are then added in order.
  const int64_t parts = std::clamp<int64_t>((kItems + heads - 1) / heads, 1, tiles);
  std::vector<float> sums(static_cast<size_t>(heads * parts * a.key_count), 0.0f);
  parallel_for(heads * parts, [&](int64_t item) {
    const int64_t batch = item / parts / a.kv_heads;
    const int64_t kv_head = item / parts % a.kv_heads;
    const PrefillScratch scratch(a.width, tile * a.key_count);
    for (int64_t n = item % parts; n < tiles; n += parts) {
      const int64_t query = n % tiles_of_member * tile;
      const int64_t queries = std::min(tile, a.query_count - query);
      const QueryRows rows{n / tiles_of_member, query, queries, queries};
      for (int first = 0; first < a.key_count; first += kKeyBlock) {
        const int count = std::min(kKeyBlock, a.key_count - first);
        MLX_H2O_CALL_TARGET(target, score_rows(a, batch, kv_head, rows, first, count, scratch,
                                               scratch.logits + first, a.key_count));
      }
      MLX_H2O_CALL_TARGET(
          target, add_mass(a, kv_head, rows, scratch.logits, sums.data() + item * a.key_count));
    }
  });
  for (int64_t head = 0; head < heads; ++head) {
    float* result = a.importance + head * a.key_count;
    std::fill(result, result + a.key_count, 0.0f);
    for (int64_t part = 0; part < parts; ++part) {
      const float* from = sums.data() + (head * parts + part) * a.key_count;
      for (int key = 0; key < a.key_count; ++key) result[key] += from[key];
    }
  }
}

}  // namespace

void prefill_scores(const AttentionArguments& a, SimdTarget target) {
  a.mass ? mass(a, target) : average(a, target);
}

}  // namespace mlx_h2o::kernels
