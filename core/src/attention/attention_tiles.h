// The inner loops of attention: the logits for some rows and keys, and the weighted sums of some
// values. Included once per SIMD target, after attention_stored.h: hence no include guard.

// scores[i, j] = scale * queries[i] . keys[first + j] for Rows x Keys pairs. The queries are padded
// with zeros to whole vectors, the keys are not.
template <int Rows, int Keys, typename Source>
inline void dot_tile(const float* queries, int64_t query_stride, const Source& keys, int64_t first,
                     int width, float scale, float* scores, int64_t score_stride) {
  constexpr int kVectors = Source::kVectors;
  Vector sums[Rows * Keys];
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows * Keys; ++i) sums[i] = broadcast(0);
  const int runs = width / Source::kRun;
  Cursor<Keys> cursor(keys.at(first, 0), keys.row_bytes());
  const char* later = static_cast<const char*>(keys.at(first, 0)) + keys.ahead;
  for (int run = 0; run < runs;
       ++run, cursor.advance(Source::kRunBytes), later += Keys * Source::kRunBytes) {
    const float* part = queries + run * Source::kRun;
    if constexpr (Rows < 4) {
      MLX_H2O_UNROLL
      for (int j = 0; j < Keys; ++j) {
        Vector key[kVectors];
        fetch<Source::kRunBytes>(later + j * Source::kRunBytes);
        keys.load_run(cursor.row(j), first + j, run, key);
        MLX_H2O_UNROLL
        for (int c = 0; c < kVectors; ++c) {
          MLX_H2O_UNROLL
          for (int i = 0; i < Rows; ++i) {
            const Vector query = load(part + i * query_stride + c * kLanes);
            sums[i * Keys + j] = multiply_add(query, key[c], sums[i * Keys + j]);
          }
        }
      }
    } else {
      // The queries of a run do not fit in registers: each is loaded once for all keys.
      Vector key[Keys][kVectors];
      MLX_H2O_UNROLL
      for (int j = 0; j < Keys; ++j) {
        fetch<Source::kRunBytes>(later + j * Source::kRunBytes);
        keys.load_run(cursor.row(j), first + j, run, key[j]);
      }
      MLX_H2O_UNROLL
      for (int c = 0; c < kVectors; ++c) {
        MLX_H2O_UNROLL
        for (int i = 0; i < Rows; ++i) {
          const Vector query = load(part + i * query_stride + c * kLanes);
          MLX_H2O_UNROLL
          for (int j = 0; j < Keys; ++j) {
            sums[i * Keys + j] = multiply_add(query, key[j][c], sums[i * Keys + j]);
          }
        }
      }
    }
  }
  if constexpr (Source::kHasTail) {
    for (int d = runs * Source::kRun; d < width; d += kLanes) {
      MLX_H2O_UNROLL
      for (int j = 0; j < Keys; ++j) {
        const Vector key = keys.load_tail(first + j, d, width);
        MLX_H2O_UNROLL
        for (int i = 0; i < Rows; ++i) {
          const Vector query = load(queries + i * query_stride + d);
          sums[i * Keys + j] = multiply_add(query, key, sums[i * Keys + j]);
        }
      }
    }
  }
  if constexpr (Rows * Keys == kSums) {
    float reduced[kSums];
    reduce(sums, scale, reduced);
    MLX_H2O_UNROLL
    for (int i = 0; i < Rows; ++i) {
      std::memcpy(scores + i * score_stride, reduced + i * Keys, Keys * sizeof(float));
    }
  } else {
    MLX_H2O_UNROLL
    for (int i = 0; i < Rows; ++i) {
      MLX_H2O_UNROLL
      for (int j = 0; j < Keys; ++j) {
        scores[i * score_stride + j] = scale * sum(sums[i * Keys + j]);
      }
    }
  }
}

// The same for `key_count` keys.
template <int Rows, typename Source>
inline void dot_keys(const float* queries, int64_t query_stride, const Source& keys, int first,
                     int key_count, int width, float scale, float* scores, int64_t score_stride) {
  constexpr int kKeys = kSums / Rows;
  int key = first;
  const int last = first + key_count;
  for (; key + kKeys <= last; key += kKeys) {
    dot_tile<Rows, kKeys>(queries, query_stride, keys, key, width, scale, scores + key,
                          score_stride);
  }
  for (; key < last; ++key) {
    dot_tile<Rows, 1>(queries, query_stride, keys, key, width, scale, scores + key, score_stride);
  }
}

// Divides rows into tiles: calls `tile` with their number, a constant, and the first of them.
template <typename Tile>
MLX_H2O_INLINE void for_tiles(int row_count, const Tile& tile) {
  int row = 0;
  if constexpr (kRowTile == 4) {
    for (; row + 4 <= row_count; row += 4) tile(std::integral_constant<int, 4>{}, row);
  }
  for (; row + 2 <= row_count; row += 2) tile(std::integral_constant<int, 2>{}, row);
  for (; row < row_count; ++row) tile(std::integral_constant<int, 1>{}, row);
}

// The same for any number of rows.
template <typename Source>
inline void dot_rows(const float* queries, int64_t query_stride, int row_count, const Source& keys,
                     int first, int key_count, int width, float scale, float* scores,
                     int64_t score_stride) {
  for_tiles(row_count, [&](auto rows, int at) {
    dot_keys<rows.value>(queries + at * query_stride, query_stride, keys, first, key_count, width,
                         scale, scores + at * score_stride, score_stride);
  });
}

// sums[i, d] += sum over the keys of weights[i, key] * values[key, d], for Runs runs of elements
// from `run` on. `keys` lists the keys; if it is null they are the first `key_count`. With Mixed, a
// value of weight 0 is ignored, even NaN.
template <int Rows, int Runs, bool Mixed, typename Source>
inline void add_runs(const float* weights, int64_t weight_stride, const int* keys, int key_count,
                     const Source& values, int run, float* sums, int64_t sum_stride) {
  constexpr int kVectors = Source::kVectors;
  Vector block[Rows][Runs * kVectors];
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows; ++i) {
    MLX_H2O_UNROLL
    for (int c = 0; c < Runs * kVectors; ++c) block[i][c] = broadcast(0);
  }
  for (int index = 0; index < key_count; ++index) {
    const int key = keys == nullptr ? index : keys[index];
    Vector weight[Rows];
    MLX_H2O_UNROLL
    for (int i = 0; i < Rows; ++i) weight[i] = broadcast(weights[i * weight_stride + key]);
    MLX_H2O_UNROLL
    for (int r = 0; r < Runs; ++r) {
      Vector value[kVectors];
      const void* from = values.at(key, run + r);
      values.fetch_run(from);
      values.load_run(from, key, run + r, value);
      MLX_H2O_UNROLL
      for (int c = 0; c < kVectors; ++c) {
        MLX_H2O_UNROLL
        for (int i = 0; i < Rows; ++i) {
          Vector& to = block[i][r * kVectors + c];
          to = multiply_add(weight[i], Mixed ? where_nonzero(weight[i], value[c]) : value[c], to);
        }
      }
    }
  }
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows; ++i) {
    MLX_H2O_UNROLL
    for (int c = 0; c < Runs * kVectors; ++c) {
      float* to = sums + i * sum_stride + run * Source::kRun + c * kLanes;
      store(to, load(to) + block[i][c]);
    }
  }
}

template <int Rows, bool Mixed, typename Source>
inline void add_tail(const float* weights, int64_t weight_stride, const int* keys, int key_count,
                     const Source& values, int d, int width, float* sums, int64_t sum_stride) {
  Vector block[Rows];
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows; ++i) block[i] = broadcast(0);
  for (int index = 0; index < key_count; ++index) {
    const int key = keys == nullptr ? index : keys[index];
    const Vector value = values.load_tail(key, d, width);
    MLX_H2O_UNROLL
    for (int i = 0; i < Rows; ++i) {
      const Vector weight = broadcast(weights[i * weight_stride + key]);
      block[i] = multiply_add(weight, Mixed ? where_nonzero(weight, value) : value, block[i]);
    }
  }
  MLX_H2O_UNROLL
  for (int i = 0; i < Rows; ++i) {
    float* to = sums + i * sum_stride + d;
    store(to, load(to) + block[i]);
  }
}

template <int Rows, bool Mixed, typename Source>
MLX_H2O_INLINE void add_values(const float* weights, int64_t weight_stride, const int* keys,
                               int key_count, const Source& values, int width, float* sums,
                               int64_t sum_stride) {
  // As many runs as fit in registers, up to two.
  constexpr int kRuns = 2 * Rows * Source::kVectors <= kSums ? 2 : 1;
  const int runs = width / Source::kRun;
  int run = 0;
  for (; run + kRuns <= runs; run += kRuns) {
    add_runs<Rows, kRuns, Mixed>(weights, weight_stride, keys, key_count, values, run, sums,
                                 sum_stride);
  }
  for (; run < runs; ++run) {
    add_runs<Rows, 1, Mixed>(weights, weight_stride, keys, key_count, values, run, sums,
                             sum_stride);
  }
  if constexpr (Source::kHasTail) {
    for (int d = runs * Source::kRun; d < width; d += kLanes) {
      add_tail<Rows, Mixed>(weights, weight_stride, keys, key_count, values, d, width, sums,
                            sum_stride);
    }
  }
}

// One bit for each of up to kStep weights that is not 0.
inline uint64_t nonzero(const float* weights, int count) {
  uint64_t bits = 0;
  if (count == kStep) {  // a loop of known length
    for (int i = 0; i < kStep; i += kLanes) bits |= uint64_t{nonzero_lanes(load(weights + i))} << i;
    return bits;
  }
  for (int i = 0; i < count; i += kLanes) {
    bits |= uint64_t{nonzero_lanes(load_from(weights + i, count - i))} << i;
  }
  return bits;
}

// The indices of the set bits plus `first`, ascending; returns their number.
inline int list_bits(uint64_t bits, int first, int* places) {
  int count = 0;
  for (; bits != 0; bits &= bits - 1) places[count++] = first + __builtin_ctzll(bits);
  return count;
}

// Adds the values of up to kStep keys to Rows rows. A weight of 0 adds nothing, so a masked value
// can hold anything, even NaN; a key that no row wants is not read.
template <int Rows, typename Source>
void add_step(const float* weights, int64_t weight_stride, int key_count, const Source& values,
              int width, float* sums, int64_t sum_stride) {
  const uint64_t all = ~uint64_t{0} >> (kStep - key_count);
  uint64_t any = 0, every = all;
  for (int i = 0; i < Rows; ++i) {
    const uint64_t own = nonzero(weights + i * weight_stride, key_count);
    any |= own;
    every &= own;
  }
  if (every == all) {
    return add_values<Rows, false>(weights, weight_stride, nullptr, key_count, values, width, sums,
                                   sum_stride);
  }
  int keys[kStep];
  if (const int count = list_bits(every, 0, keys); count > 0) {
    add_values<Rows, false>(weights, weight_stride, keys, count, values, width, sums, sum_stride);
  }
  if (const int count = list_bits(any & ~every, 0, keys); count > 0) {
    add_values<Rows, true>(weights, weight_stride, keys, count, values, width, sums, sum_stride);
  }
}

// The same for any number of rows.
template <typename Source>
inline void add_rows(const float* weights, int64_t weight_stride, int row_count, int key_count,
                     const Source& values, int width, float* sums, int64_t sum_stride) {
  for_tiles(row_count, [&](auto rows, int at) {
    add_step<rows.value>(weights + at * weight_stride, weight_stride, key_count, values, width,
                         sums + at * sum_stride, sum_stride);
  });
}
