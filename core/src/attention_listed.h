// Rows of values by their place in a list of keys. Included once per SIMD target, after
// attention_stored.h: hence no include guard.

// Listed rows are few and far between, so the processor foresees none of them: each load asks for
// the lines of the row that is kStep places further on. The list goes on that far.
template <typename Rows>
struct Listed {
  static constexpr int kVectors = Rows::kVectors;
  static constexpr int kRun = Rows::kRun;
  static constexpr bool kHasTail = Rows::kHasTail;
  Rows rows;  // by their keys; scales and biases by place
  const int* keys;

  const void* at(int64_t place, int run) const { return rows.at(keys[place], run); }
  MLX_H2O_INLINE void fetch_run(const void* at, int64_t place) const {
    const int64_t ahead = int64_t{keys[place + kStep] - keys[place]} * rows.row_bytes();
    const char* later = static_cast<const char*>(at) + ahead;
    fetch<Rows::kRunBytes>(later);
    __builtin_prefetch(later + Rows::kRunBytes - 1);
  }
  MLX_H2O_INLINE void load_run(const void* at, int64_t place, int run,
                               Vector (&to)[kVectors]) const {
    rows.load_run(at, place, run, to);
  }
  Vector load_tail(int64_t place, int d, int width) const {
    return rows.load_tail(keys[place], d, width);
  }
};

// Scales or biases of `count` listed rows, [groups, kStep] in float32.
template <typename T>
inline void widen_listed(const void* data, const int64_t* strides, const Piece& piece,
                         const int* keys, int count, int groups, float* to) {
  const T* from =
      static_cast<const T*>(data) + piece.batch * strides[0] + piece.kv_head * strides[1];
  T together[kStep];
  for (int group = 0; group < groups; ++group) {
    for (int i = 0; i < count; ++i) {
      __builtin_prefetch(from + keys[i + kStep] * strides[2] + group);
      together[i] = from[keys[i] * strides[2] + group];
    }
    widen(together, count, to + group * kStep);
  }
}

inline void widen_listed(ElementType type, const void* data, const int64_t* strides,
                         const Piece& piece, const int* keys, int count, int groups, float* to) {
  switch (type) {
    case ElementType::float32:
      return widen_listed<float>(data, strides, piece, keys, count, groups, to);
    case ElementType::float16:
      return widen_listed<Float16>(data, strides, piece, keys, count, groups, to);
    case ElementType::bfloat16:
      return widen_listed<BFloat16>(data, strides, piece, keys, count, groups, to);
  }
}

template <typename Work>
void with_listed_packed(const Stored& stored, const Piece& piece, const int* keys, int count,
                        float* memory, const Work& work) {
  const Packing& packing = stored.packing;
  const int groups = stored.width / packing.group_size;
  float* scales = memory;
  float* biases = memory + kStep * groups;
  widen_listed(packing.type, packing.scales, packing.scale_strides, piece, keys, count, groups,
               scales);
  if (packing.codes != nullptr) {
    std::fill(biases, biases + kStep * groups, 0.0f);
  } else {
    widen_listed(packing.type, packing.biases, packing.bias_strides, piece, keys, count, groups,
                 biases);
  }
  const uint32_t* words = words_of(stored, piece, 0);
  if (is_unpacked_in_registers(packing)) {
    return with_unpacking(stored, words, scales, biases, [&](const auto& rows) {
      work(Listed<std::decay_t<decltype(rows)>>{rows, keys});
    });
  }
  float* rows = biases + kStep * groups;
  for (int i = 0; i < count; ++i) {
    unpack_row(words + keys[i] * stored.strides[2], stored.width, packing, scales + i, biases + i,
               rows + int64_t{i} * stored.width);
  }
  work(DenseRows<float>{rows, stored.width, 0});
}

// Calls `work` with the rows of at most kStep keys, ascending, which it loads by their place in the
// list. Behind them the list has kStep more, whose rows are asked for.
template <typename Work>
void with_listed_rows(const AttentionArguments& a, const Stored& stored, const Piece& piece,
                      const int* keys, int count, float* memory, const Work& work) {
  if (stored.packing.bits != 0) {
    return with_listed_packed(stored, piece, keys, count, memory, work);
  }
  with_dense_rows(a, stored, piece, 0, [&](const auto& rows) {
    work(Listed<std::decay_t<decltype(rows)>>{rows, keys});
  });
}

inline int64_t row_bytes(const AttentionArguments& a, const Stored& stored) {
  const int64_t element = a.type == ElementType::float32 ? 4 : 2;
  return stored.packing.bits == 0 ? stored.width * element
                                  : int64_t{stored.width} * stored.packing.bits / 8;
}

// Asks for the lines of one row.
MLX_H2O_INLINE void fetch_row(const AttentionArguments& a, const Stored& stored, const Piece& piece,
                              int64_t key) {
  const int64_t bytes = row_bytes(a, stored);
  const int64_t element = stored.packing.bits != 0 ? 4 : bytes / stored.width;
  const int64_t at =
      piece.batch * stored.strides[0] + piece.kv_head * stored.strides[1] + key * stored.strides[2];
  const char* from = static_cast<const char*>(stored.data) + at * element;
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line);
  __builtin_prefetch(from + bytes - 1);
}
