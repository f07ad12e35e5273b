// Attention of one KV head in two sweeps: logits over the keys, then softmax and values. Included
// once per SIMD target, after attention_tiles.h: hence no include guard.

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The rows (query head, query) of one KV head that go through the two sweeps together.
struct Rows {
  int64_t first;  // counted within the KV head: head of the group * query_count + query
  int count;
  int64_t query_width;  // padded to whole vectors, as is value_width
  int64_t value_width;
  float* queries;  // [count, query_width]
  float* sums;     // [count, value_width]
  float* weights;  // [count, kKeyBlock]
  float* scores;   // [count, key_count], in the output or in the workspace
  float* maxima;   // [count]
  double* totals;  // [count]: the denominators
};

inline int query_of(const AttentionArguments& a, const Rows& rows, int row) {
  return static_cast<int>((rows.first + row) % a.query_count);
}

inline int query_head_of(const AttentionArguments& a, const Rows& rows, int row, int kv_head) {
  const int group = a.query_heads / a.kv_heads;
  return kv_head * group + static_cast<int>((rows.first + row) / a.query_count);
}

// How many keys of a block, from its first on, causality lets the row see.
inline int visible_keys(const AttentionArguments& a, const Rows& rows, int row, int first,
                        int block) {
  if (!a.causal) return block;
  const int64_t last = static_cast<int64_t>(query_of(a, rows, row)) + a.key_count - a.query_count;
  return static_cast<int>(std::clamp<int64_t>(last + 1 - first, 0, block));
}

template <typename Mask>
inline void mask_scores(float* scores, const Mask* mask, int64_t stride, int count,
                        float threshold) {
  for (int i = 0; i < count; ++i) {
    if constexpr (std::is_same_v<Mask, uint8_t>) {
      scores[i] = mask[i * stride] != 0 ? scores[i] : -kInfinity;
    } else {
      const float bias = to_float(mask[i * stride]);
      scores[i] = bias <= threshold ? -kInfinity : scores[i] + bias;
    }
  }
}

inline void apply_mask(const AttentionArguments& a, int batch, int head, int query, int key,
                       int count, float* scores) {
  const int64_t offset = batch * a.mask_strides[0] + head * a.mask_strides[1] +
                         query * a.mask_strides[2] + key * a.mask_strides[3];
  const int64_t stride = a.mask_strides[3];
  const float threshold = a.mask_threshold;
  switch (a.mask_type) {
    case MaskType::none:
      return;
    case MaskType::boolean:
      return mask_scores(scores, static_cast<const uint8_t*>(a.mask) + offset, stride, count,
                         threshold);
    case MaskType::float32:
      return mask_scores(scores, static_cast<const float*>(a.mask) + offset, stride, count,
                         threshold);
    case MaskType::float16:
      return mask_scores(scores, static_cast<const Float16*>(a.mask) + offset, stride, count,
                         threshold);
    case MaskType::bfloat16:
      return mask_scores(scores, static_cast<const BFloat16*>(a.mask) + offset, stride, count,
                         threshold);
  }
}

inline float row_maximum(const float* scores, int count, float maximum_so_far) {
  int i = 0;
  if (count >= kLanes) {
    Vector largest = broadcast(maximum_so_far);
    for (; i + kLanes <= count; i += kLanes) largest = maximum(largest, load(scores + i));
    float lanes[kLanes];
    store(lanes, largest);
    for (float lane : lanes) maximum_so_far = lane > maximum_so_far ? lane : maximum_so_far;
  }
  for (; i < count; ++i) maximum_so_far = scores[i] > maximum_so_far ? scores[i] : maximum_so_far;
  return maximum_so_far;
}

// Sweep 1: scores and their row maxima.
template <typename T>
void score_keys(const AttentionArguments& a, const Rows& rows, int batch, int kv_head) {
  const T* keys =
      static_cast<const T*>(a.keys) + batch * a.key_strides[0] + kv_head * a.key_strides[1];
  for (int first = 0; first < a.key_count; first += kKeyBlock) {
    const int block = std::min(kKeyBlock, a.key_count - first);
    const T* from = keys + first * a.key_strides[2];
    for (int row = 0; row < rows.count;) {
      const int tile = rows.count - row >= kRowTile ? kRowTile : 1;
      int seen = 0;
      for (int i = 0; i < tile; ++i) {
        seen = std::max(seen, visible_keys(a, rows, row + i, first, block));
      }
      const float* query = rows.queries + row * rows.query_width;
      float* scores = rows.scores + static_cast<int64_t>(row) * a.key_count + first;
      if (tile == kRowTile) {
        dot_rows<kRowTile>(query, rows.query_width, from, a.key_strides[2], seen, a.width, a.scale,
                           scores, a.key_count);
      } else {
        dot_rows<1>(query, rows.query_width, from, a.key_strides[2], seen, a.width, a.scale, scores,
                    a.key_count);
      }
      row += tile;
    }
    for (int row = 0; row < rows.count; ++row) {
      float* scores = rows.scores + static_cast<int64_t>(row) * a.key_count + first;
      const int seen = visible_keys(a, rows, row, first, block);
      std::fill(scores + seen, scores + block, -kInfinity);
      apply_mask(a, batch, query_head_of(a, rows, row, kv_head), query_of(a, rows, row), first,
                 seen, scores);
      rows.maxima[row] = row_maximum(scores, seen, rows.maxima[row]);
    }
  }
}

// weights[i] = exp(scores[i] - maximum); returns their sum.
inline float weigh(const float* scores, int count, float maximum, float* weights) {
  const Vector shift = broadcast(maximum);
  Vector total = broadcast(0);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector weight = exp_nonpositive(load(scores + i) - shift);
    store(weights + i, weight);
    total = total + weight;
  }
  float rest = 0;
  if (i < count) {
    float lanes[kLanes];
    store(lanes, exp_nonpositive(load_partial(scores + i, count - i) - shift));
    for (int lane = 0; i + lane < count; ++lane) {
      weights[i + lane] = lanes[lane];
      rest += lanes[lane];
    }
  }
  return sum(total) + rest;
}

// Adds the values of one block of keys to `Tile` rows. A row whose weight is 0 takes nothing from
// that key, so that a masked value may hold anything, NaN included; a key that no row wants is not
// read.
template <int Tile, typename T>
void add_block(const Rows& rows, int row, const T* values, int64_t value_stride, int block,
               int width) {
  const float* weights = rows.weights + static_cast<int64_t>(row) * kKeyBlock;
  float* sums = rows.sums + row * rows.value_width;
  int shared[kKeyBlock];
  int own[kKeyBlock];
  int shared_count = 0;
  bool mixed = false;
  for (int key = 0; key < block; ++key) {
    int wanted = 0;
    for (int i = 0; i < Tile; ++i) wanted += weights[i * kKeyBlock + key] != 0 ? 1 : 0;
    if (wanted == Tile) shared[shared_count++] = key;
    mixed |= wanted != 0 && wanted != Tile;
  }
  if (shared_count > 0) {
    add_value_rows<Tile>(weights, kKeyBlock, shared, shared_count, values, value_stride, width,
                         sums, rows.value_width);
  }
  if (!mixed) return;
  for (int i = 0; i < Tile; ++i) {
    int own_count = 0;
    for (int key = 0; key < block; ++key) {
      int wanted = 0;
      for (int j = 0; j < Tile; ++j) wanted += weights[j * kKeyBlock + key] != 0 ? 1 : 0;
      if (wanted != Tile && weights[i * kKeyBlock + key] != 0) own[own_count++] = key;
    }
    add_value_rows<1>(weights + i * kKeyBlock, kKeyBlock, own, own_count, values, value_stride,
                      width, sums + i * rows.value_width, rows.value_width);
  }
}

// Sweep 2: weights of each block of keys, their sums, and the weighted values.
template <typename T>
void add_all_values(const AttentionArguments& a, const Rows& rows, int batch, int kv_head) {
  const T* values =
      static_cast<const T*>(a.values) + batch * a.value_strides[0] + kv_head * a.value_strides[1];
  for (int first = 0; first < a.key_count; first += kKeyBlock) {
    const int block = std::min(kKeyBlock, a.key_count - first);
    const T* from = values + first * a.value_strides[2];
    for (int row = 0; row < rows.count; ++row) {
      const float* scores = rows.scores + static_cast<int64_t>(row) * a.key_count + first;
      rows.totals[row] += weigh(scores, block, rows.maxima[row],
                                rows.weights + static_cast<int64_t>(row) * kKeyBlock);
    }
    int row = 0;
    for (; row + kRowTile <= rows.count; row += kRowTile) {
      add_block<kRowTile>(rows, row, from, a.value_strides[2], block, a.value_width);
    }
    for (; row < rows.count; ++row) {
      add_block<1>(rows, row, from, a.value_strides[2], block, a.value_width);
    }
  }
}

// Brings the queries of the rows to float32, padded with zeros, and clears the sums.
template <typename T>
void begin_rows(const AttentionArguments& a, const Rows& rows, int batch, int kv_head) {
  for (int row = 0; row < rows.count; ++row) {
    const int head = query_head_of(a, rows, row, kv_head);
    const int query = query_of(a, rows, row);
    const T* from = static_cast<const T*>(a.queries) + batch * a.query_strides[0] +
                    head * a.query_strides[1] + query * a.query_strides[2];
    float* to = rows.queries + row * rows.query_width;
    for (int d = 0; d < a.width; ++d) to[d] = to_float(from[d]);
    std::fill(to + a.width, to + rows.query_width, 0.0f);
    rows.maxima[row] = -kInfinity;
    rows.totals[row] = 0;
  }
  std::fill(rows.sums, rows.sums + rows.count * rows.value_width, 0.0f);
}

// Lets the sinks into the maxima and denominators: they have no key and no value.
inline void join_sinks(const AttentionArguments& a, const Rows& rows, int kv_head) {
  for (int row = 0; row < rows.count; ++row) {
    float& largest = rows.maxima[row];
    float sink = -kInfinity;
    if (a.sinks != nullptr) {
      sink = a.sinks[query_head_of(a, rows, row, kv_head) * a.sink_stride];
      largest = sink > largest ? sink : largest;
    }
    // With nothing to attend to, any finite shift makes every weight exp(-inf) = 0.
    if (largest == -kInfinity) largest = 0;
    rows.totals[row] = std::exp(static_cast<double>(sink) - static_cast<double>(largest));
  }
}

template <typename T>
void finish_rows(const AttentionArguments& a, const Rows& rows, int64_t first_output_row) {
  for (int row = 0; row < rows.count; ++row) {
    const double total = rows.totals[row];  // 0: fully masked; NaN must go through
    const float factor = total == 0 ? 0.0f : static_cast<float>(1 / total);
    const float* sums = rows.sums + row * rows.value_width;
    T* to = static_cast<T*>(a.out) + (first_output_row + row) * a.value_width;
    for (int d = 0; d < a.value_width; ++d) to[d] = round_to<T>(sums[d] * factor);
    if (a.lse != nullptr) {
      a.lse[first_output_row + row] =
          total == 0 ? -kInfinity : static_cast<float>(rows.maxima[row] + std::log(total));
    }
  }
}

// What the rows of one KV head add to the moving average: for each query two rows of floats, the
// sums of its scores over the query heads and how many of them were unmasked.
inline void collect_scores(const AttentionArguments& a, const Rows& rows, float* collected) {
  for (int row = 0; row < rows.count; ++row) {
    float* sums = collected + query_of(a, rows, row) * accumulation_workspace_size(a.key_count);
    add_scores(rows.scores + static_cast<int64_t>(row) * a.key_count, a.key_count, sums,
               sums + a.key_count);
  }
}

inline void accumulate_collected(const AttentionArguments& a, const float* collected,
                                 float* importance) {
  for (int query = 0; query < a.query_count; ++query) {
    const float* sums = collected + query * accumulation_workspace_size(a.key_count);
    accumulate(sums, sums + a.key_count, a.key_count, a.decay, importance);
  }
}

template <typename T>
void attend(const AttentionArguments& a, float* workspace) {
  const int group = a.query_heads / a.kv_heads;
  const int64_t all_rows = static_cast<int64_t>(group) * a.query_count;
  const int limit = rows_together(a);
  float maxima[kMaxRows];
  double totals[kMaxRows];
  float* collected = workspace + limit * floats_per_row(a);
  const int64_t collected_size = a.query_count * accumulation_workspace_size(a.key_count);
  for (int batch = 0; batch < a.batch; ++batch) {
    for (int kv_head = 0; kv_head < a.kv_heads; ++kv_head) {
      const int64_t cache_head = static_cast<int64_t>(batch) * a.kv_heads + kv_head;
      const int64_t output = cache_head * all_rows;
      if (a.accumulate) std::fill(collected, collected + collected_size, 0.0f);
      for (int64_t first = 0; first < all_rows; first += limit) {
        Rows rows;
        rows.first = first;
        rows.count = static_cast<int>(std::min<int64_t>(limit, all_rows - first));
        rows.query_width = padded(a.width);
        rows.value_width = padded(a.value_width);
        rows.queries = workspace;
        rows.sums = rows.queries + limit * rows.query_width;
        rows.weights = rows.sums + limit * rows.value_width;
        rows.scores = a.return_scores ? a.scores + (output + first) * a.key_count
                                      : rows.weights + static_cast<int64_t>(limit) * kKeyBlock;
        rows.maxima = maxima;
        rows.totals = totals;
        begin_rows<T>(a, rows, batch, kv_head);
        score_keys<T>(a, rows, batch, kv_head);
        if (a.accumulate) collect_scores(a, rows, collected);
        join_sinks(a, rows, kv_head);
        add_all_values<T>(a, rows, batch, kv_head);
        finish_rows<T>(a, rows, output + first);
      }
      if (a.accumulate) {
        accumulate_collected(a, collected, a.importance + cache_head * a.key_count);
      }
    }
  }
}

void attention(const AttentionArguments& a, float* workspace) {
  switch (a.type) {
    case ElementType::float32:
      return attend<float>(a, workspace);
    case ElementType::float16:
      return attend<Float16>(a, workspace);
    case ElementType::bfloat16:
      return attend<BFloat16>(a, workspace);
  }
}
