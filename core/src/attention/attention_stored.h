// Reads stored rows of keys or values, unpacking a run of elements at a time. Included once per
// SIMD target, after its simd_*.h, inside its namespace and target region: hence no include guard.

// How many bytes ahead to prefetch. 2 to 16 KB were tried with cold caches.
constexpr int64_t kAhead = 8192;

// Prefetches the cache lines of a later run: rows follow each other in memory, but several are read
// at a time, an order that the hardware prefetcher does not follow.
template <size_t Bytes>
MLX_H2O_INLINE void fetch(const char* at) {
  MLX_H2O_UNROLL
  for (size_t line = 0; line < Bytes; line += 64) {
    __builtin_prefetch(at + line);
  }
}

// Keeps the compiler from computing addresses ahead of a loop, which would need too many registers.
MLX_H2O_INLINE void keep(const char*& pointer) { __asm__("" : "+r"(pointer)); }

// The addresses of one run in several rows, advanced from run to run. Four rows share a pointer.
template <int Rows>
struct Cursor {
  static constexpr int kQuads = (Rows + 3) / 4;
  const char* quads[kQuads];
  int64_t stride;  // bytes

  Cursor(const void* first, int64_t row_bytes) : stride(row_bytes) {
    MLX_H2O_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      quads[i] = static_cast<const char*>(first) + 4 * i * row_bytes;
      keep(quads[i]);
    }
  }
  MLX_H2O_INLINE const char* row(int row) const { return quads[row / 4] + row % 4 * stride; }
  MLX_H2O_INLINE void advance(int64_t bytes) {
    MLX_H2O_UNROLL
    for (int i = 0; i < kQuads; ++i) {
      quads[i] += bytes;
      keep(quads[i]);
    }
  }
};

// `load_run` loads one run; `load_tail` loads the end of a row that no whole run covers.
template <typename T>
struct DenseRows {
  static constexpr int kVectors = 4;
  static constexpr int kRun = kVectors * kLanes;
  static constexpr bool kHasTail = true;
  const T* first;
  int64_t stride;
  int64_t ahead;  // bytes

  static constexpr int64_t kRunBytes = kRun * sizeof(T);
  const void* at(int64_t row, int run) const { return first + row * stride + run * kRun; }
  int64_t row_bytes() const { return stride * static_cast<int64_t>(sizeof(T)); }
  MLX_H2O_INLINE void fetch_run(const void* at) const {
    fetch<kRunBytes>(static_cast<const char*>(at) + ahead);
  }
  MLX_H2O_INLINE void load_run(const void* at, int64_t, int, Vector (&to)[kVectors]) const {
    const T* from = static_cast<const T*>(at);
    MLX_H2O_UNROLL
    for (int i = 0; i < kVectors; ++i) to[i] = load(from + i * kLanes);
  }
  Vector load_tail(int64_t row, int d, int width) const {
    return load_from(first + row * stride + d, width - d);
  }
};

// The integers that affine codes stand for, repeated to fill 16 places.
template <int Bits>
constexpr std::array<float, 16> counts() {
  std::array<float, 16> found{};
  for (int i = 0; i < 16; ++i) found[static_cast<size_t>(i)] = i % (1 << Bits);
  return found;
}

// If Looked, codes are looked up in a table, else converted to floats.
template <int Bits, int Run, bool Looked = false>
struct PackedRows {
  static constexpr int kVectors = Run / kLanes;
  static constexpr int kRun = Run;
  static constexpr bool kHasTail = false;
  const uint8_t* first;
  int64_t stride;       // bytes
  const float* scales;  // [groups, kStep], as are the biases
  const float* biases;
  int group_shift;  // 2^group_shift runs share a scale
  int64_t ahead;    // bytes
  const float* table = nullptr;

  static constexpr int64_t kRunBytes = Run * Bits / 8;
  const void* at(int64_t row, int run) const { return first + row * stride + run * kRunBytes; }
  int64_t row_bytes() const { return stride; }
  MLX_H2O_INLINE void fetch_run(const void* at) const {
    fetch<kRunBytes>(static_cast<const char*>(at) + ahead);
  }
  MLX_H2O_INLINE void load_run(const void* at, int64_t row, int run, Vector (&to)[kVectors]) const {
    const int64_t group = int64_t{run >> group_shift} * kStep + row;
    const auto* from = static_cast<const uint8_t*>(at);
    if constexpr (Looked) {
      unpack_codes<Bits, Run>(from, table, scales[group], biases[group], to);
    } else if constexpr (Bits == 8) {
      unpack_bytes<Run>(from, scales[group], biases[group], to);
    } else {
      unpack_nibbles<Run>(from, scales[group], biases[group], to);
    }
  }
  Vector load_tail(int64_t, int, int) const { return broadcast(0); }
};

// Widens the scales or biases of `count` rows to float32 [groups, kStep].
template <typename T>
inline void widen_rows(const void* data, const int64_t* strides, const Piece& piece, int64_t first,
                       int count, int groups, float* to) {
  const T* from = static_cast<const T*>(data) + piece.batch * strides[0] +
                  piece.kv_head * strides[1] + first * strides[2];
  // Prefetch for the step after the next: a page holds too few for the hardware to predict.
  const auto* later = reinterpret_cast<const char*>(from + 2 * kStep * strides[2]);
  for (int64_t i = 0; i < kStep * groups * int64_t{sizeof(T)}; i += 64) fetch<64>(later + i);
  int row = 0;
  if (strides[2] == groups && groups == 1) return widen(from, count, to);
  if (strides[2] == groups && groups == 2) {
    for (; row + kLanes <= count; row += kLanes) {
      Vector even, odd;
      split_pairs(load(from + 2 * row), load(from + 2 * row + kLanes), even, odd);
      store(to + row, even);
      store(to + kStep + row, odd);
    }
  }
  for (; row < count; ++row) {
    float* place = to + row;
    const T* own = from + row * strides[2];
    int group = 0;
    for (; group + kLanes <= groups; group += kLanes) {
      float lanes[kLanes];
      store(lanes, load(own + group));
      for (int lane = 0; lane < kLanes; ++lane) place[(group + lane) * kStep] = lanes[lane];
    }
    if (group == groups) continue;
    float lanes[kLanes];
    store(lanes, load_partial(own + group, groups - group));
    for (int lane = 0; group + lane < groups; ++lane) place[(group + lane) * kStep] = lanes[lane];
  }
}

inline void widen_rows(ElementType type, const void* data, const int64_t* strides,
                       const Piece& piece, int64_t first, int count, int groups, float* to) {
  with_type(type,
            [&]<typename T>(T) { widen_rows<T>(data, strides, piece, first, count, groups, to); });
}

// One row of any number of bits to float32; its scales and biases are kStep apart.
inline void unpack_row(const uint32_t* words, int width, const Packing& packing,
                       const float* scales, const float* biases, float* to) {
  for (int i = 0; i < width; ++i) {
    const auto level = static_cast<float>(read_bits(words, i, packing.bits));
    const int group = i / packing.group_size;
    to[i] = scales[group * kStep] * level + biases[group * kStep];
  }
}

inline int group_shift(const Packing& packing, int run) {
  return __builtin_ctz(static_cast<unsigned>(packing.group_size / run));
}

// Keys or values: their address and their packing.
struct Stored {
  const void* data;
  const int64_t* strides;
  const Packing& packing;
  int width;
  int64_t ahead = kAhead;
};

// The floats that kStep unpacked rows take: scales, biases, and the rows themselves if need be.
inline int64_t packed_floats(const Stored& stored) {
  const Packing& packing = stored.packing;
  if (packing.bits == 0) return 0;
  const int64_t row = is_unpacked_in_registers(packing) ? 0 : stored.width;
  return kStep * (row + 2 * int64_t{stored.width} / packing.group_size);
}

inline Stored keys_of(const AttentionArguments& a) {
  return {a.keys, a.key_strides, a.key_packing, a.width};
}

inline Stored values_of(const AttentionArguments& a) {
  return {a.values, a.value_strides, a.value_packing, a.value_width};
}

// The address of a row in units of T: elements, or words of packed rows.
template <typename T>
const T* row_at(const Stored& stored, const Piece& piece, int64_t row) {
  return static_cast<const T*>(stored.data) + piece.batch * stored.strides[0] +
         piece.kv_head * stored.strides[1] + row * stored.strides[2];
}

template <int Run, typename Work>
void with_runs(const Stored& stored, const uint32_t* words, const float* scales,
               const float* biases, const Work& work) {
  static constexpr std::array<float, 16> kTables[] = {counts<2>(), counts<3>(), counts<4>()};
  const Packing& packing = stored.packing;
  const auto* bytes = reinterpret_cast<const uint8_t*>(words);
  const int64_t stride = 4 * stored.strides[2];
  const int shift = group_shift(packing, Run);
  const auto looked = [&](auto bits) {
    const float* table =
        packing.codes != nullptr ? packing.codes->levels : kTables[bits.value - 2].data();
    work(PackedRows<bits.value, Run, true>{bytes, stride, scales, biases, shift, stored.ahead,
                                           table});
  };
  if (packing.bits == 8) {
    return work(PackedRows<8, Run>{bytes, stride, scales, biases, shift, stored.ahead});
  }
  if (packing.bits == 2) return looked(std::integral_constant<int, 2>{});
  if (packing.bits == 3) return looked(std::integral_constant<int, 3>{});
  if constexpr (!kLooksUp) {  // here converting is faster
    if (packing.codes == nullptr) {
      return work(PackedRows<4, Run>{bytes, stride, scales, biases, shift, stored.ahead});
    }
  }
  looked(std::integral_constant<int, 4>{});
}

// Calls `work` with packed rows that are unpacked in registers.
template <typename Work>
void with_unpacking(const Stored& stored, const uint32_t* words, const float* scales,
                    const float* biases, const Work& work) {
  if constexpr (kPackedRun != 32) {
    if (packed_run(stored.packing, kPackedRun) == kPackedRun) {
      return with_runs<kPackedRun>(stored, words, scales, biases, work);
    }
  }
  with_runs<32>(stored, words, scales, biases, work);
}

template <typename Work>
void with_packed(const Stored& stored, const Piece& piece, int64_t first, int count, float* memory,
                 const Work& work) {
  const Packing& packing = stored.packing;
  const int groups = stored.width / packing.group_size;
  float* scales = memory;
  float* biases = memory + kStep * groups;
  widen_rows(packing.type, packing.scales, packing.scale_strides, piece, first, count, groups,
             scales);
  if (packing.codes != nullptr) {
    std::fill(biases, biases + kStep * groups, 0.0f);
  } else {
    widen_rows(packing.type, packing.biases, packing.bias_strides, piece, first, count, groups,
               biases);
  }
  const uint32_t* words = row_at<uint32_t>(stored, piece, first);
  if (is_unpacked_in_registers(packing)) {
    return with_unpacking(stored, words, scales, biases, work);
  }
  float* rows = biases + kStep * groups;
  for (int row = 0; row < count; ++row) {
    unpack_row(words + row * stored.strides[2], stored.width, packing, scales + row, biases + row,
               rows + int64_t{row} * stored.width);
  }
  work(DenseRows<float>{rows, stored.width, 0});
}

// Calls `work` with at most kStep stored rows, from `first` on, in a type that can load them.
template <typename Work>
void with_rows(const AttentionArguments& a, const Stored& stored, const Piece& piece, int64_t first,
               int count, float* memory, const Work& work) {
  if (stored.packing.bits != 0) {
    return with_packed(stored, piece, first, count, memory, work);
  }
  with_type(a.type, [&]<typename T>(T) {
    work(DenseRows<T>{row_at<T>(stored, piece, first), stored.strides[2], stored.ahead});
  });
}
