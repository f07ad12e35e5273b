  // Encodes rows as codes of their rotated directions, and norms (docs/design.md).  A
  // simdgroup serves one row; each lane holds E neighbouring elements.
  //   grid (rows * 32, 1, 1), threadgroup (32, 1, 1)
  //   T dtype of the rows, D elements of a row, BITS of a code; signs and levels as in the format
  constexpr int LANES = 32;
  constexpr int E = D / LANES;
  constexpr int WORDS = D * BITS / 32;
  constexpr float LEAST_NORM = 1e-8f;
  H2O_THREADGROUP(ushort, codes, D);

  const int lane = int(thread_index_in_simdgroup);
  const int heads = rows_shape[1];
  const int count = rows_shape[2];
  const int64_t row = int64_t(threadgroup_position_in_grid.x);
  const int batch = int(row / (int64_t(heads) * count));
  const int head = int(row / count % heads);
  const int token = int(row % count);
  float elements[E];
  h2o_load<E>(
      rows + h2o_offset(rows_strides, batch, head, token, lane * E), rows_strides[3], elements);

  const float length = metal::precise::sqrt(metal::simd_sum(h2o_dot<E>(elements, elements)));
  for (int j = 0; j < E; j++) {
    elements[j] = elements[j] / metal::max(length, LEAST_NORM) * signs[lane * E + j];
  }

  // The Walsh-Hadamard transform: sums and differences of elements whose indices differ
  // in one bit. Lower bits are within a lane, upper bits between lanes.
  H2O_UNROLL
  for (int bit = 1; bit < E; bit *= 2) {
    H2O_UNROLL
    for (int j = 0; j < E; j++) {
      if ((j & bit) == 0) {
        const float sum = elements[j] + elements[j + bit];
        elements[j + bit] = elements[j] - elements[j + bit];
        elements[j] = sum;
      }
    }
  }
  for (int bit = 1; bit < LANES; bit *= 2) {
    for (int j = 0; j < E; j++) {
      const float other = metal::simd_shuffle(elements[j], ushort(lane ^ bit));
      elements[j] = (lane & bit) == 0 ? elements[j] + other : other - elements[j];
    }
  }

  // A code is the number of means of neighbouring levels that the element exceeds.
  const float scale = 1.0f / metal::precise::sqrt(float(D));
  ushort exceeded[E];
  for (int j = 0; j < E; j++) {
    exceeded[j] = 0;
  }
  for (int k = 0; k + 1 < (1 << BITS); k++) {
    const float mean = (levels[k] + levels[k + 1]) / 2.0f;
    for (int j = 0; j < E; j++) {
      exceeded[j] += elements[j] * scale > mean ? 1 : 0;
    }
  }
  // Compute the norm that gives the decoded row the length of this one.
  for (int j = 0; j < E; j++) {
    elements[j] = levels[exceeded[j]];
  }
  const float coded = metal::precise::sqrt(metal::simd_sum(h2o_dot<E>(elements, elements)));
  if (lane == 0) {
    norms[row] = length / coded;
  }
  for (int j = 0; j < E; j++) {
    codes[lane * E + j] = exceeded[j];
  }
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

  // Each lane fills words: a stream of BITS per element, the lowest first.
  for (int word = lane; word < WORDS; word += LANES) {
    uint32_t filled = 0;
    for (int j = word * 32 / BITS; j * BITS < (word + 1) * 32; j++) {
      const int shift = j * BITS - word * 32;
      const uint32_t code = codes[j];
      filled |= shift < 0 ? code >> -shift : code << shift;
    }
    words[row * WORDS + word] = filled;
  }
