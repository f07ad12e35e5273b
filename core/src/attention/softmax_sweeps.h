// The steps of a softmax on the Vector of one SIMD target. Included once per target, after its
// simd_*.h: hence no include guard.

// Below this the exponential is 0.
constexpr float kLeastExponent = -87.3f;

// exp(x) for x <= 0, to about 2 ulp; 0 where the result would be subnormal; NaN stays NaN.
inline Vector exp_nonpositive(Vector x) {
  // Adding 1.5 * 2^23 rounds x / ln 2 to an integer n and leaves n in the low bits.
  const Vector magic = broadcast(12582912.0f);
  const Vector shifted = multiply_add(x, broadcast(1.44269504088896341f), magic);
  const Vector n = shifted - magic;
  Vector r = multiply_add(n, broadcast(-0.693359375f), x);  // ln 2 in two parts (Cody and Waite)
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  // Minimax polynomial of Cephes' expf on [-ln 2 / 2, ln 2 / 2].
  Vector p = broadcast(1.9875691500e-4f);
  p = multiply_add(p, r, broadcast(1.3981999507e-3f));
  p = multiply_add(p, r, broadcast(8.3334519073e-3f));
  p = multiply_add(p, r, broadcast(4.1665795894e-2f));
  p = multiply_add(p, r, broadcast(1.6666665459e-1f));
  p = multiply_add(p, r, broadcast(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + broadcast(1.0f));
  return zero_below(x, broadcast(kLeastExponent), p * exponent_from_low_bits(shifted));
}

// The greatest of some scores and of `maximum_so_far`; NaN is ignored.
inline float row_maximum(const float* scores, int count, float maximum_so_far) {
  int i = 0;
  if (count >= kLanes) {
    Vector largest = broadcast(maximum_so_far);
    for (; i + kLanes <= count; i += kLanes) largest = maximum(load(scores + i), largest);
    float lanes[kLanes];
    store(lanes, largest);
    for (float lane : lanes) maximum_so_far = lane > maximum_so_far ? lane : maximum_so_far;
  }
  for (; i < count; ++i) maximum_so_far = scores[i] > maximum_so_far ? scores[i] : maximum_so_far;
  return maximum_so_far;
}

// If a row sees nothing, any finite shift makes every weight exp(-inf) = 0.
inline float shift_of(float maximum) { return maximum == -kInfinity ? 0 : maximum; }

// weights[i] = exp(scores[i] - maximum), in place too; returns their sum.
inline float weigh(const float* scores, int count, float maximum, float* weights) {
  const Vector shift = broadcast(maximum);
  Vector total = broadcast(0);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector weight = exp_nonpositive(load(scores + i) - shift);
    store(weights + i, weight);
    total = total + weight;
  }
  float rest = 0;
  if (i < count) {
    float lanes[kLanes];
    store(lanes, exp_nonpositive(load_partial(scores + i, count - i) - shift));
    for (int lane = 0; i + lane < count; ++lane) {
      weights[i + lane] = lanes[lane];
      rest += lanes[lane];
    }
  }
  return sum(total) + rest;
}
