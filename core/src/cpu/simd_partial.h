// Included once per SIMD target, after its simd_*.h and inside its namespace and target region:
// hence no include guard.

// The first `count` lanes from memory, the rest zero; reads nothing past them.
template <typename T>
inline Vector load_partial(const T* from, int count) {
  T lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(T));
  return load(lanes);
}
