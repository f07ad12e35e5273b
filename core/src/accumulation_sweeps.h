// The loops of the moving average and of the search for the worst row, which compilers vectorise
// for the target of the region. Included once per SIMD target: hence no include guard.

// Whether any score of a query is masked (-inf) or NaN.
inline bool has_unseen(const float* scores, int64_t stride, int members, int count) {
  int unseen = 0;
  for (int member = 0; member < members; ++member) {
    const float* row = scores + member * stride;
    for (int i = 0; i < count; ++i) unseen |= row[i] > -kInfinity ? 0 : 1;
  }
  return unseen != 0;
}

// C = keep * C + take * |mean|, of sums over Members scores that are all unmasked.
template <int Members>
inline void average_seen(const float* __restrict scores, int64_t stride, int count, Decay decay,
                         float* __restrict importance) {
  for (int i = 0; i < count; ++i) {
    float sum = scores[i];
    MLX_H2O_UNROLL
    for (int member = 1; member < Members; ++member) sum += scores[member * stride + i];
    // By a power of two: the same bits as the division.
    const float score = std::fabs(sum * (1.0f / Members));
    const float before = importance[i];
    const float averaged = decay.keep * before + decay.take * score;
    importance[i] = before != before ? score : averaged;
  }
}

// The same for any group and any mask.
inline void average_any(const float* scores, int64_t stride, int members, int count, Decay decay,
                        float* __restrict importance) {
  constexpr int kPart = 256;
  float sums[kPart];
  float counts[kPart];
  for (int first = 0; first < count; first += kPart) {
    const int part = std::min(kPart, count - first);
    std::fill(sums, sums + part, 0.0f);
    std::fill(counts, counts + part, 0.0f);
    for (int member = 0; member < members; ++member) {
      const float* row = scores + member * stride + first;
      for (int i = 0; i < part; ++i) {
        const bool seen = row[i] > -kInfinity;
        sums[i] += seen ? row[i] : 0.0f;
        counts[i] += seen ? 1.0f : 0.0f;
      }
    }
    for (int i = 0; i < part; ++i) {
      const float before = importance[first + i];
      const float seen = counts[i];
      const float score = std::fabs(sums[i] / (seen > 1.0f ? seen : 1.0f));
      const float averaged = decay.keep * before + decay.take * score;
      const float scored = before != before ? score : averaged;
      importance[first + i] = seen > 0.0f ? scored : before;
    }
  }
}

inline void average(const float* scores, int64_t stride, int members, int count, Decay decay,
                    float* importance) {
  const bool seen = !has_unseen(scores, stride, members, count);
  switch (seen ? members : 0) {
    case 1:
      return average_seen<1>(scores, stride, count, decay, importance);
    case 2:
      return average_seen<2>(scores, stride, count, decay, importance);
    case 4:
      return average_seen<4>(scores, stride, count, decay, importance);
    case 8:
      return average_seen<8>(scores, stride, count, decay, importance);
    default:
      return average_any(scores, stride, members, count, decay, importance);
  }
}

// In the order of Worst::rank; signed, as the comparisons of vectors are.
inline int32_t rank_of(float score, int32_t position, Zones zones) {
  const auto bits = static_cast<int32_t>(to_bits(score + 0.0f));  // -0 and +0 are equal
  const int32_t ordered = bits ^ ((bits >> 31) & Worst::kProtected);
  int32_t rank = (bits & Worst::kProtected) > 0x7f800000 ? Worst::kNotANumber : ordered;
  rank = position >= zones.recent_start ? Worst::kProtected : rank;
  rank = position < zones.sink_size ? Worst::kProtected : rank;
  return position < 0 ? Worst::kPadding : rank;
}

// Rows from slot `first` of their head on, at most kSearched of them.
inline void search_part(const float* scores, const int32_t* positions, int count, int first,
                        Zones zones, Worst& worst) {
  int32_t ranks[kSearched];  // apart from the minimum: compilers vectorise the two only singly
  for (int i = 0; i < count; ++i) ranks[i] = rank_of(scores[i], positions[i], zones);
  int32_t least = Worst::kProtected;
  for (int i = 0; i < count; ++i) least = ranks[i] < least ? ranks[i] : least;
  if (least > worst.rank) return;
  int32_t latest = -1;
  for (int i = 0; i < count; ++i) {
    const int32_t order = positions[i] < 0 ? first + i : positions[i];
    const int32_t own = ranks[i] == least ? order : -1;
    latest = own > latest ? own : latest;
  }
  if (least == worst.rank && latest < worst.order) return;
  for (int i = count - 1; i >= 0; --i) {
    const int32_t order = positions[i] < 0 ? first + i : positions[i];
    if (order != latest || ranks[i] != least) continue;
    worst = {least, latest, static_cast<uint32_t>(first + i)};
    return;
  }
}

inline void search(const float* scores, const int32_t* positions, int count, int first, Zones zones,
                   Worst& worst) {
  for (int done = 0; done < count; done += kSearched) {
    search_part(scores + done, positions + done, std::min(kSearched, count - done), first + done,
                zones, worst);
  }
}

inline void take_in(const ScoredBlock& block, Worst& worst) {
  for (int query = 0; query < block.query_count; ++query) {
    average(block.scores + query * block.stride, block.query_count * block.stride, block.group,
            block.count, block.decay, block.importance);
  }
  if (block.positions == nullptr) return;
  search(block.importance, block.positions, block.count, block.first, block.zones, worst);
}
