// Masks, maxima and weights of the logits of some rows. Included once per SIMD target, after
// attention_tiles.h: hence no include guard.

inline int query_of(const AttentionArguments& a, const Piece& piece, int row) {
  return static_cast<int>((piece.first_row + row) % a.query_count);
}

inline int query_head_of(const AttentionArguments& a, const Piece& piece, int row) {
  const int group = a.query_heads / a.kv_heads;
  return piece.kv_head * group + static_cast<int>((piece.first_row + row) / a.query_count);
}

// How many of `count` keys, from `first` on, any row sees.
inline int visible_to_any(const AttentionArguments& a, const Piece& piece, int first, int count) {
  if (!a.causal) return count;
  int seen = 0;
  for (int row = 0; row < piece.rows && seen < count; ++row) {
    seen = std::max(seen, visible_keys(a, query_of(a, piece, row), first, count));
  }
  return seen;
}

// Copies scores to the caller's memory, past the caches if the target can: an ordinary store would
// read each cache line first, and nothing here reads it again. `end_streams` makes them visible.
inline void stream_out(const float* scores, int count, float* to) {
  const auto behind = static_cast<int>(reinterpret_cast<uintptr_t>(to) / sizeof(float) % kLanes);
  int i = std::min((kLanes - behind) % kLanes, count);
  std::copy(scores, scores + i, to);
  for (; i + kLanes <= count; i += kLanes) stream(to + i, load(scores + i));
  std::copy(scores + i, scores + count, to + i);
}

// Reorders the elements of a query like unpacked codes.
template <int Run>
void order_runs(int width, float* query) {
  for (int first = 0; first < width; first += Run) {
    float elements[Run];
    std::memcpy(elements, query + first, sizeof elements);
    for (int place = 0; place < Run; ++place) {
      query[first + place] = elements[code_order(place, Run)];
    }
  }
}

// A query in float32, padded with zeros, in the basis and the order of the unpacked keys.
inline void load_row(const AttentionArguments& a, int64_t offset, float* to) {
  widen(a.type, a.queries, offset, a.width, to);
  std::fill(to + a.width, to + padded(a.width), 0.0f);
  if (a.key_packing.codes != nullptr) rotate(a.key_packing.codes->signs, to);
  if (!is_reordered(a.key_packing)) return;
  if (packed_run(a.key_packing, kPackedRun) == 32) return order_runs<32>(a.width, to);
  order_runs<kPackedRun>(a.width, to);
}

// The inverse: sums to an output row, from the order and the basis of the values. The memory after
// the sums has room for as many again.
template <typename T>
void store_row(const AttentionArguments& a, float* sums, T* to) {
  const Packing& packing = a.value_packing;
  if (is_reordered(packing)) {
    const float* unordered = sums;
    sums += padded(a.value_width);
    const int run = packed_run(packing, kPackedRun);
    for (int d = 0; d < a.value_width; ++d) {
      sums[d / run * run + code_order(d % run, run)] = unordered[d];
    }
  }
  if (packing.codes != nullptr) restore(packing.codes->signs, sums);
  for (int d = 0; d < a.value_width; ++d) to[d] = round_to<T>(sums[d]);
}
