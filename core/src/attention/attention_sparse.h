// Sparse V: adds the values of a span whose weight reaches the threshold in some row, once all
// logits and totals are known. Included once per SIMD target, after attention_sweeps.h: hence no
// include guard.
//
// A pair is skipped if x < limit, with x = logit - shift in float32, weight = exp(x) / total and
// limit = log(threshold * total). So exponentials are computed only for wanted pairs, and the
// skipped count is exact. A masked pair has x = -inf and is never wanted. NaN is wanted, and makes
// its row NaN.

// The limits that the rows compare their logits with.
struct Limits {
  float* shifts;  // [rows], as are the limits
  float* limits;

  Limits(const AttentionArguments& a, const Plan& plan, const Piece& piece, float* memory)
      : shifts(memory), limits(memory + piece.rows) {
    for (int row = 0; row < piece.rows; ++row) {
      const Total total(a, plan, piece, row);
      const double exact = std::log(static_cast<double>(a.sparse_v_threshold) * total.total);
      // Rounded up, which does not change the comparison with any float32.
      auto limit = static_cast<float>(exact);
      if (static_cast<double>(limit) < exact) limit = std::nextafter(limit, kInfinity);
      shifts[row] = total.shift;
      limits[row] = std::max(kLeastExponent, limit);  // below it all weights are 0
    }
  }
};

// The keys of a span that some row wants, in order, found shortly before they are used.
class WantedKeys {
 public:
  WantedKeys(const AttentionArguments& a, const Piece& piece, const Matrix& logits,
             const Limits& limits, float* skipped)
      : logits_(logits),
        limits_(limits),
        rows_(piece.rows),
        first_(piece.first_key),
        next_(piece.first_key),
        last_(piece.last_key),
        skipped_(a.skipped == nullptr ? nullptr : skipped) {}

  const int* keys() const { return keys_; }
  int count() const { return count_; }

  // Finds the keys of two steps, or all that are left; returns how many may be used, at most a
  // step. The list can be read a step beyond these.
  int find() {
    while (count_ < 2 * kStep && next_ < last_) look_at(std::min(kStep, last_ - next_));
    const int usable = std::min(kStep, count_);
    if (usable > 0) std::fill(keys_ + count_, keys_ + std::max(count_, 2 * kStep), keys_[0]);
    return usable;
  }

  // Drops the first `used` keys, and continues after them.
  void drop(int used) {
    count_ -= used;
    std::memmove(keys_, keys_ + used, static_cast<size_t>(count_) * sizeof(int));
  }

 private:
  void look_at(int count) {
    const uint64_t all = ~uint64_t{0} >> (kStep - count);
    uint64_t any = 0;
    for (int row = 0; row < rows_; ++row) {
      const float* logits = logits_.row(row) + (next_ - first_);
      const uint64_t wanted =
          lanes_from(logits, count, limits_.shifts[row], limits_.limits[row]) & all;
      any |= wanted;
      if (skipped_ == nullptr) continue;
      const uint64_t seen =
          lanes_from(logits, count, 0, std::numeric_limits<float>::lowest()) & all;
      skipped_[row] += static_cast<float>(std::popcount(seen & ~wanted));
    }
    count_ += list_bits(any, next_, keys_ + count_);
    next_ += count;
  }

  // One bit for each of up to kStep logits, set unless the shifted logit is below the limit.
  static uint64_t lanes_from(const float* logits, int count, float shift, float limit) {
    uint64_t bits = 0;
    for (int i = 0; i < count; i += kLanes) {
      const Vector x = load_from(logits + i, count - i) - broadcast(shift);
      bits |= uint64_t{lanes_not_below(x, broadcast(limit))} << i;
    }
    return bits;
  }

  Matrix logits_;
  Limits limits_;
  int rows_;
  int first_, next_, last_;  // keys of the span
  float* skipped_;           // [rows], counts; null: not requested
  int count_ = 0;
  int keys_[3 * kStep];
};

inline bool follow_each_other(const int* keys, int count) {
  return keys[count - 1] - keys[0] == count - 1;
}

// The weights of kStep listed keys: 0 if the row does not want the key, and after the last key.
// `logits` start at key 0.
inline void weigh_listed(const float* logits, const int* keys, int count, float shift, float limit,
                         float* weights) {
  if (follow_each_other(keys, count)) {
    std::copy_n(logits + keys[0], count, weights);
  } else {
    for (int i = 0; i < count; ++i) weights[i] = logits[keys[i]];
  }
  std::fill(weights + count, weights + kStep, -kInfinity);
  for (int i = 0; i < kStep; i += kLanes) {
    const Vector x = load(weights + i) - broadcast(shift);
    store(weights + i, zero_below(x, broadcast(limit), exp_nonpositive(x)));
  }
}

// Phase 2: adds the values of a span, whose logits and totals are known.
inline void add_span(const AttentionArguments& a, const Plan& plan, const Piece& piece,
                     const Partial& partial) {
  const Scratch scratch = make_scratch(a, plan);
  std::fill(partial.sums, partial.sums + piece.rows * plan.value_width, 0.0f);
  std::fill(partial.skipped, partial.skipped + piece.rows, 0.0f);
  // The queries are no longer needed, and their memory has room for two floats a row.
  const Limits limits(a, plan, piece, scratch.queries);
  const Matrix logits = logits_at(a, plan, piece, scratch, piece.first_key);
  const Stored values = values_of(a);
  const RowBytes stored = row_bytes(a, values, piece);
  WantedKeys wanted(a, piece, logits, limits, partial.skipped);
  bool is_first = true;
  while (const int count = wanted.find()) {
    const int* keys = wanted.keys();
    for (int i = 0; i < count && is_first; ++i) stored.fetch(keys[i]);
    is_first = false;
    for (int row = 0; row < piece.rows; ++row) {
      weigh_listed(logits.row(row) - piece.first_key, keys, count, limits.shifts[row],
                   limits.limits[row], scratch.weights + row * kStep);
    }
    const auto add = [&](const auto& rows) {
      add_rows(scratch.weights, kStep, piece.rows, count, rows, a.value_width, partial.sums,
               plan.value_width);
    };
    if (follow_each_other(keys, count)) {
      with_rows(a, values, piece, keys[0], count, scratch.groups, add);
    } else {
      with_listed_rows(a, values, piece, keys, count, scratch.groups, add);
    }
    wanted.drop(count);
  }
}
