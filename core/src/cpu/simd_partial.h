// What follows from a target's loads and stores. Included once per SIMD target, at the end of its
// simd_*.h: hence no include guard.

// The first `count` lanes from memory, the rest zero; reads nothing beyond them.
template <typename T>
inline Vector load_partial(const T* from, int count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}

// A full vector, or only the first `count` lanes if fewer are left.
template <typename T>
inline Vector load_from(const T* from, int left) {
  return left >= kLanes ? load(from) : load_partial(from, left);
}

template <typename T>
inline void widen(const T* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = to_float(from[i]);
}

// `count` elements from number `first` on.
inline void widen(ElementType type, const void* from, int64_t first, int64_t count, float* to) {
  with_type(type, [&]<typename T>(T) { widen(static_cast<const T*>(from) + first, count, to); });
}
