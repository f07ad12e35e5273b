// Reads rows of values from a list of keys. Included once per SIMD target, after
// attention_stored.h: hence no include guard.

// The bytes of the rows in one stored array: codes or elements, scales or biases.
struct RowBytes {
  const char* first;
  int64_t stride, bytes;

  RowBytes(const void* data, const int64_t* strides, const Piece& piece, int64_t element,
           int64_t elements)
      : first(static_cast<const char*>(data) +
              (piece.batch * strides[0] + piece.kv_head * strides[1]) * element),
        stride(strides[2] * element),
        bytes(elements * element) {}

  MLX_H2O_INLINE void fetch(int64_t key) const {
    const char* from = first + key * stride;
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + line);
    __builtin_prefetch(from + bytes - 1);
  }

  // Copies the rows next to each other; returns the place of the next row. Listed rows are few and
  // far between, so the hardware prefetcher misses them all: with each row, prefetch the row that
  // is kStep further on in the list. The list must extend that far.
  char* gather(const int* keys, int count, char* to) const {
    for (int i = 0; i < count; ++i, to += bytes) {
      fetch(keys[i + kStep]);
      std::memcpy(to, first + keys[i] * stride, static_cast<size_t>(bytes));
    }
    return to;
  }
};

inline RowBytes row_bytes(const AttentionArguments& a, const Stored& stored, const Piece& piece) {
  const int bits = stored.packing.bits;
  return bits == 0
             ? RowBytes{stored.data, stored.strides, piece, element_size(a.type), stored.width}
             : RowBytes{stored.data, stored.strides, piece, 4, int64_t{stored.width} * bits / 32};
}

// The floats that kStep gathered rows take.
inline int64_t gathered_floats(const Stored& stored) {
  const Packing& packing = stored.packing;
  const int64_t groups = packing.bits == 0 ? 0 : stored.width / packing.group_size;
  return kStep * (stored.width + 2 * groups);
}

// Calls `work` with the rows of at most kStep keys, ascending. The list goes on for kStep more.
template <typename Work>
void with_listed_rows(const AttentionArguments& a, const Stored& stored, const Piece& piece,
                      const int* keys, int count, float* memory, const Work& work) {
  Packing packing = stored.packing;
  const RowBytes rows = row_bytes(a, stored, piece);
  char* first = reinterpret_cast<char*>(memory + packed_floats(stored));
  char* to = rows.gather(keys, count, first);
  if (packing.bits != 0) {
    const int64_t groups = stored.width / packing.group_size;
    const int64_t element = element_size(packing.type);
    const auto gather = [&](const void*& data, int64_t(&strides)[3]) {
      const RowBytes own(data, strides, piece, element, groups);
      data = to;
      to = own.gather(keys, count, to);
      strides[0] = strides[1] = 0;
      strides[2] = groups;
    };
    gather(packing.scales, packing.scale_strides);
    if (packing.codes == nullptr) gather(packing.biases, packing.bias_strides);
  }
  const int64_t element = packing.bits == 0 ? element_size(a.type) : 4;
  const int64_t strides[3] = {0, 0, rows.bytes / element};
  with_rows(a, {first, strides, packing, stored.width, 0}, piece, 0, count, memory, work);
}
