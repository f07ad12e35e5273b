// The work of one item: the logits of a span of keys, then softmax and values. Included once per
// SIMD target, after attention_rows.h: hence no include guard.

// The scratch memory of a thread.
struct Scratch {
  float* queries;  // [rows, query_width]
  float* weights;  // [rows, block_keys]; the logits too, unless they are kept
  float* groups;   // of kStep rows: scales, biases, and the unpacked rows if need be
};

inline Scratch make_scratch(const AttentionArguments& a, const Plan& plan) {
  const int64_t queries = plan.tile_rows * plan.query_width;
  const int64_t weights = plan.tile_rows * plan.block_keys;
  const Stored values = values_of(a);
  const int64_t groups =
      std::max(packed_floats(keys_of(a)),
               packed_floats(values) + (plan.two_phases ? gathered_floats(values) : 0));
  float* memory = thread_memory(queries + weights + groups);
  return {memory, memory + queries, memory + queries + weights};
}

// The rows of a matrix of floats, from some column on.
struct Matrix {
  float* first;
  int64_t stride;

  float* row(int row) const { return first + row * stride; }
};

inline void load_queries(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                         float* to) {
  for (int row = 0; row < piece.rows; ++row) {
    const int64_t offset = piece.batch * a.query_strides[0] +
                           query_head_of(a, piece, row) * a.query_strides[1] +
                           query_of(a, piece, row) * a.query_strides[2];
    load_row(a, offset, to + row * plan.query_width);
  }
}

// Logits of the `seen` keys from `first` on.
inline void score_block(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                        const Scratch& scratch, int first, int seen, const Matrix& logits) {
  constexpr int kTogether = 16;  // keys that stay in the L1 cache while all rows use them
  for (int step = 0; step < seen; step += kStep) {
    const int step_keys = std::min(kStep, seen - step);
    with_rows(a, keys_of(a), piece, first + step, step_keys, scratch.groups, [&](const auto& keys) {
      for (int key = 0; key < step_keys; key += kTogether) {
        dot_rows(scratch.queries, plan.query_width, piece.rows, keys, key,
                 std::min(kTogether, step_keys - key), a.width, a.scale, logits.first + step,
                 logits.stride);
      }
    });
  }
}

// Importance of the rows of a piece, from `first` on.
inline float* importance_at(const AttentionArguments& a, const Piece& piece, int first) {
  const int rows = a.importance_rows == 0 ? a.key_count : a.importance_rows;
  return a.importance + piece.cache_head(a) * rows + first;
}

// Prefetches the importance of a block, which is needed when its keys are done.
inline void fetch_importance(const AttentionArguments& a, const Piece& piece, int first,
                             int count) {
  const float* importance = importance_at(a, piece, first);
  constexpr int kLine = 16;
  for (int i = 0; i < count; i += kLine) __builtin_prefetch(importance + i, 1);
}

// Updates the moving average with the scores of a block of keys.
inline void accumulate_scores(const AttentionArguments& a, const Piece& piece, const Matrix& logits,
                              int first, int count) {
  ScoredBlock block;
  block.count = count;
  block.group = a.query_heads / a.kv_heads;
  block.query_count = a.query_count;
  block.scores = logits.first;
  block.stride = logits.stride;
  block.decay = a.decay;
  block.importance = importance_at(a, piece, first);
  accumulate_block(block, kTarget);
}

// Adds the values of `count` keys from `first` on to the sums of the rows.
inline void add_block(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                      const Scratch& scratch, const Matrix& weights, int first, int count,
                      float* sums) {
  for (int step = 0; step < count; step += kStep) {
    const int step_keys = std::min(kStep, count - step);
    with_rows(a, values_of(a), piece, first + step, step_keys, scratch.groups,
              [&](const auto& values) {
                add_rows(weights.first + step, weights.stride, piece.rows, step_keys, values,
                         a.value_width, sums, plan.value_width);
              });
  }
}

inline Matrix scores_at(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                        int first) {
  return {a.scores + piece.output_row(a, plan) * a.key_count + first, a.key_count};
}

// The memory for the logits of a block.
inline Matrix logits_at(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                        const Scratch& scratch, int first) {
  if (a.return_scores && plan.two_phases) return scores_at(a, plan, piece, first);
  if (plan.keep_logits) {
    return {piece.unit + plan.spans * plan.partial_floats + first, a.key_count};
  }
  return {scratch.weights, plan.block_keys};
}

// The memory for the weights of a block, which are relative to the maxima of its rows so far.
inline Matrix weights_at(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                         const Scratch& scratch, int first) {
  if (a.mass) return {piece.unit + plan.weights_at + first, a.key_count};
  return {scratch.weights, plan.block_keys};
}

// These maxima, [rows].
inline float* maxima_of(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                        int first) {
  const int64_t block = (first - piece.first_key) / plan.block_keys;
  const int64_t index = piece.first_key / plan.span_keys * plan.span_blocks + block;
  return piece.unit + plan.weights_at + plan.tile_rows * (a.key_count + index);
}

// Phase 1: the logits, maxima and totals of a span; also its sums of values, unless all weights
// must be known first.
inline void attend_span(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                        const Partial& partial) {
  const Scratch scratch = make_scratch(a, plan);
  load_queries(a, plan, piece, scratch.queries);
  std::fill(partial.maxima, partial.maxima + piece.rows, -kInfinity);
  std::fill(partial.totals, partial.totals + piece.rows, 0.0f);
  if (!plan.two_phases) {
    std::fill(partial.sums, partial.sums + piece.rows * plan.value_width, 0.0f);
  }
  const bool hands_out = a.return_scores && !plan.two_phases;
  for (int first = piece.first_key; first < piece.last_key;
       first += static_cast<int>(plan.block_keys)) {
    const int count = std::min(static_cast<int>(plan.block_keys), piece.last_key - first);
    const Matrix logits = logits_at(a, plan, piece, scratch, first);
    const int seen = visible_to_any(a, piece, first, count);
    if (a.accumulate) fetch_importance(a, piece, first, count);
    score_block(a, plan, piece, scratch, first, seen, logits);
    for (int row = 0; row < piece.rows; ++row) {
      float* scores = logits.row(row);
      mask_row(a, piece.batch, query_head_of(a, piece, row), query_of(a, piece, row), first, count,
               scores);
    }
    if (a.accumulate && !a.mass) accumulate_scores(a, piece, logits, first, count);
    const Matrix weights = weights_at(a, plan, piece, scratch, first);
    float* maxima = a.mass ? maxima_of(a, plan, piece, first) : nullptr;
    for (int row = 0; row < piece.rows; ++row) {
      const float* scores = logits.row(row);
      if (hands_out) stream_out(scores, count, scores_at(a, plan, piece, first).row(row));
      const float before = partial.maxima[row];
      const float now = row_maximum(scores, count, before);
      if (now != before && first != piece.first_key) {
        const float factor = std::exp(before - now);
        partial.totals[row] *= factor;
        float* sums = partial.sums + row * plan.value_width;
        for (int64_t d = 0; d < plan.value_width && !plan.two_phases; ++d) sums[d] *= factor;
      }
      partial.maxima[row] = now;
      if (maxima != nullptr) maxima[row] = now;
      partial.totals[row] += weigh(scores, count, shift_of(now), weights.row(row));
    }
    if (!plan.two_phases) add_block(a, plan, piece, scratch, weights, first, seen, partial.sums);
  }
  if (hands_out) end_streams();
}

// The maximum and the total of a row over all spans and its sink, which has no key and no value.
struct Total {
  float shift;
  double total;

  Total(const AttentionArguments& a, const Plan& plan, const Piece& piece, int row) {
    const float sink =
        a.sinks == nullptr ? -kInfinity : a.sinks[query_head_of(a, piece, row) * a.sink_stride];
    float largest = sink > -kInfinity ? sink : -kInfinity;
    for (int64_t span = 0; span < plan.spans; ++span) {
      const float own = Partial(plan, piece, span).maxima[row];
      largest = own > largest ? own : largest;
    }
    shift = shift_of(largest);
    total = std::exp(static_cast<double>(sink) - static_cast<double>(shift));
    for (int64_t span = 0; span < plan.spans; ++span) {
      const Partial partial(plan, piece, span);
      total += static_cast<double>(partial.totals[row]) * factor(partial.maxima[row]);
    }
  }

  // Rescales sums that are relative to `maximum`.
  double factor(float maximum) const {
    return std::exp(static_cast<double>(shift_of(maximum)) - static_cast<double>(shift));
  }
};

// importance[i] += factor * weights[i].
inline void add_weights(const float* weights, int count, float factor, float* importance) {
  const Vector by = broadcast(factor);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(importance + i, multiply_add(load(weights + i), by, load(importance + i)));
  }
  for (; i < count; ++i) importance[i] += weights[i] * factor;
}

// Adds the weights of a span, whose totals are known, to the importance. NaN, the importance of an
// unscored row, counts as 0.
inline void add_mass(const AttentionArguments& a, const Plan& plan, const Piece& piece) {
  float* importance = importance_at(a, piece, piece.first_key);
  for (int i = 0; i < piece.last_key - piece.first_key; ++i) {
    importance[i] = importance[i] == importance[i] ? importance[i] : 0;
  }
  for (int row = 0; row < piece.rows; ++row) {
    const Total total(a, plan, piece, row);
    if (total.total == 0) continue;  // the row sees nothing
    for (int first = piece.first_key; first < piece.last_key;
         first += static_cast<int>(plan.block_keys)) {
      const int count = std::min(static_cast<int>(plan.block_keys), piece.last_key - first);
      const float* weights = piece.unit + plan.weights_at + row * a.key_count + first;
      const double factor = total.factor(maxima_of(a, plan, piece, first)[row]) / total.total;
      add_weights(weights, count, static_cast<float>(factor),
                  importance + (first - piece.first_key));
    }
  }
}

// The output of one row: the sums of its spans, added in order.
template <typename T>
void finish_row(const AttentionArguments& a, const Plan& plan, const Piece& piece, int row,
                const Total& total, float* sums) {
  std::fill(sums, sums + plan.value_width, 0.0f);
  for (int64_t span = 0; span < plan.spans && total.total != 0; ++span) {
    const Partial partial(plan, piece, span);
    const double relative = plan.two_phases ? 1 : total.factor(partial.maxima[row]);
    const auto factor = static_cast<float>(relative / total.total);
    const float* from = partial.sums + row * plan.value_width;
    for (int64_t d = 0; d < plan.value_width; ++d) sums[d] += from[d] * factor;
  }
  store_row(a, sums, static_cast<T*>(a.out) + (piece.output_row(a, plan) + row) * a.value_width);
}

// The outputs of a unit, once all its items are done.
inline void finish_unit(const AttentionArguments& a, const Plan& plan, const Piece& piece) {
  float* sums = thread_memory(2 * plan.value_width);
  for (int row = 0; row < piece.rows; ++row) {
    const Total total(a, plan, piece, row);  // 0: fully masked; NaN must pass through
    with_type(a.type, [&]<typename T>(T) { finish_row<T>(a, plan, piece, row, total, sums); });
    const int64_t output = piece.output_row(a, plan) + row;
    if (a.lse != nullptr) {
      a.lse[output] =
          total.total == 0
              ? -kInfinity
              : static_cast<float>(static_cast<double>(total.shift) + std::log(total.total));
    }
    if (a.skipped == nullptr) continue;
    float skipped = 0;
    for (int64_t span = 0; span < plan.spans && plan.two_phases; ++span) {
      skipped += Partial(plan, piece, span).skipped[row];
    }
    a.skipped[output] = skipped / static_cast<float>(a.key_count);
  }
}
