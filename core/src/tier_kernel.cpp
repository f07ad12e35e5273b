#include "tier_kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "half.h"
#include "thread_pool.h"

#ifdef __clang__
#pragma STDC FP_CONTRACT OFF  // GCC is told by CMake
#endif

namespace mlx_h2o::kernels {
namespace {

uint32_t code_at(const PackedRow& row, int index) {
  const int bit = index * row.bits;
  return row.words[bit / 32] >> (bit % 32) & ((1u << row.bits) - 1);
}

template <typename T>
void cut_groups(const PackedRow& from, const PackedRow& to, int width) {
  const T* scales = static_cast<const T*>(from.scales);
  const T* biases = static_cast<const T*>(from.biases);
  T* new_scales = static_cast<T*>(to.scales);
  T* new_biases = static_cast<T*>(to.biases);
  const int lost = from.bits - to.bits;
  std::fill(to.words, to.words + static_cast<int64_t>(width) * to.bits / 32, 0u);
  for (int group = 0; group < width / from.group_size; ++group) {
    const int first = group * from.group_size;
    const int last = first + from.group_size;
    uint32_t most = 0;
    for (int i = first; i < last; ++i) most = std::max(most, code_at(from, i));
    const bool fits = most < 1u << to.bits;
    for (int i = first; i < last; ++i) {
      const uint32_t code = code_at(from, i) >> (fits ? 0 : lost);
      to.words[i * to.bits / 32] |= code << (i * to.bits % 32);
    }
    const float step = to_float(scales[group]);
    const float middle = static_cast<float>((1 << lost) - 1) / 2;
    const float bias = to_float(biases[group]) + step * middle;
    new_scales[group] = fits ? scales[group] : round_to<T>(step * static_cast<float>(1 << lost));
    new_biases[group] = fits ? biases[group] : round_to<T>(bias);
  }
}

// The row with codes of fewer bits, of 2, 4 and 8: the upper ones, where they do not fit as they
// are.
void cut_row(ElementType type, const PackedRow& from, const PackedRow& to, int width) {
  switch (type) {
    case ElementType::float32:
      return cut_groups<float>(from, to, width);
    case ElementType::float16:
      return cut_groups<Float16>(from, to, width);
    case ElementType::bfloat16:
      return cut_groups<BFloat16>(from, to, width);
  }
}

PackedRow packed_at(const StoredRows& rows, int64_t row) {
  return packed_row(rows.type, rows.packed, rows.width, row);
}

float ordered(float rank) {
  return std::isnan(rank) ? -std::numeric_limits<float>::infinity() : rank;
}

// The rows of one head.
class Head {
 public:
  Head(const TierArguments& a, int64_t head, SimdTarget target)
      : a_(a),
        head_(head),
        slots_(a.heavy.rows + a.light.rows + a.newest.rows),
        importance_(a.importance + head * slots_),
        positions_(a.positions + head * slots_),
        target_(target) {
    if (a.key_sum == nullptr) return;
    sums_ = a.key_sum + head * a.heavy.keys.width;
    inverse_norms_ = a.inverse_norms + head * slots_;
    key_.resize(static_cast<size_t>(a.heavy.keys.width));
  }

  void replace(const float* ranks, const void* new_key, const void* new_value) {
    const int heavy = a_.heavy.rows;
    const int oldest = heavy + a_.light.rows;
    const auto found = find_worst(ranks, positions_, slots_, a_.zones, target_).slot;
    const int worst = std::min(static_cast<int>(found), oldest - 1);
    forget(worst);
    int place = worst;
    if (worst >= heavy) {
      const int lightest = lightest_heavy(ranks);
      if (ordered(ranks[oldest]) > ordered(ranks[lightest])) {
        forget(lightest);
        sink(lightest, worst - heavy);
        remember(worst, lightest);
        place = lightest;
      }
    }
    forget(oldest);
    pack_oldest(place);
    remember(place, oldest);
    shift(oldest);
    append(new_key, new_value);
  }

 private:
  int64_t row_of(const Tier& tier, int slot) const { return head_ * tier.rows + slot; }

  int lightest_heavy(const float* ranks) const {
    int lightest = 0;
    for (int slot = 1; slot < a_.heavy.rows; ++slot) {
      if (ordered(ranks[slot]) < ordered(ranks[lightest])) lightest = slot;
    }
    return lightest;
  }

  void sink(int from, int to) {
    const Tier &heavy = a_.heavy, &light = a_.light;
    cut_row(heavy.keys.type, packed_at(heavy.keys, row_of(heavy, from)),
            packed_at(light.keys, row_of(light, to)), heavy.keys.width);
    cut_row(heavy.values.type, packed_at(heavy.values, row_of(heavy, from)),
            packed_at(light.values, row_of(light, to)), heavy.values.width);
  }

  void pack_oldest(int slot) {
    const bool in_heavy = slot < a_.heavy.rows;
    const Tier& tier = in_heavy ? a_.heavy : a_.light;
    const int64_t row = row_of(tier, in_heavy ? slot : slot - a_.heavy.rows);
    quantize_row(tier.keys.type, newest(a_.newest.keys, 0), tier.keys.width,
                 packed_at(tier.keys, row), target_);
    quantize_row(tier.values.type, newest(a_.newest.values, 0), tier.values.width,
                 packed_at(tier.values, row), target_);
  }

  char* newest(const StoredRows& rows, int index) const {
    return static_cast<char*>(rows.dense) +
           row_of(a_.newest, index) * rows.width * element_size(rows.type);
  }

  // Makes room at the end.
  void shift(int oldest) {
    const auto rest = static_cast<size_t>(a_.newest.rows - 1);
    for (const StoredRows* rows : {&a_.newest.keys, &a_.newest.values}) {
      const auto bytes = static_cast<size_t>(rows->width) * element_size(rows->type);
      std::memmove(newest(*rows, 0), newest(*rows, 1), rest * bytes);
    }
    std::memmove(importance_ + oldest, importance_ + oldest + 1, rest * sizeof(float));
    std::memmove(positions_ + oldest, positions_ + oldest + 1, rest * sizeof(int32_t));
    if (sums_ == nullptr) return;
    std::memmove(inverse_norms_ + oldest, inverse_norms_ + oldest + 1, rest * sizeof(float));
  }

  void append(const void* key, const void* value) {
    const int last = a_.newest.rows - 1;
    const auto copy = [&](const StoredRows& rows, const void* from) {
      const auto bytes = static_cast<size_t>(rows.width) * element_size(rows.type);
      std::memcpy(newest(rows, last), from, bytes);
    };
    copy(a_.newest.keys, key);
    copy(a_.newest.values, value);
    importance_[slots_ - 1] = std::numeric_limits<float>::quiet_NaN();
    positions_[slots_ - 1] = a_.position;
    add(slots_ - 1);
  }

  // The row at `slot` is now that which was at `from`, as it is stored now.
  void remember(int slot, int from) {
    importance_[slot] = importance_[from];
    positions_[slot] = positions_[from];
    add(slot);
  }

  void read_key(int slot) {
    const int packed = a_.heavy.rows + a_.light.rows;
    if (slot >= packed) {
      return read_row(a_.newest.keys, row_of(a_.newest, slot - packed), key_.data());
    }
    const bool in_heavy = slot < a_.heavy.rows;
    const Tier& tier = in_heavy ? a_.heavy : a_.light;
    read_row(tier.keys, row_of(tier, in_heavy ? slot : slot - a_.heavy.rows), key_.data());
  }

  void forget(int slot) {
    if (sums_ == nullptr) return;
    read_key(slot);
    add_scaled(key_, -inverse_norms_[slot], sums_);
  }

  void add(int slot) {
    if (sums_ == nullptr) return;
    read_key(slot);
    inverse_norms_[slot] = inverse_norm(key_);
    add_scaled(key_, inverse_norms_[slot], sums_);
  }

  const TierArguments& a_;
  int64_t head_;
  int slots_;
  float* importance_;
  int32_t* positions_;
  SimdTarget target_;
  float* sums_ = nullptr;
  float* inverse_norms_ = nullptr;
  std::vector<float> key_;
};

}  // namespace

void replace_in_tiers(const TierArguments& a, SimdTarget target) {
  const int slots = a.heavy.rows + a.light.rows + a.newest.rows;
  const auto replace_one = [&](int64_t head) {
    const int64_t batch = head / a.heads;
    const int64_t of_batch = head % a.heads;
    const auto place = [&](const int64_t* strides) {
      return batch * strides[0] + of_batch * strides[1];
    };
    const auto new_row = [&](const void* rows, const int64_t* strides, ElementType type) {
      return static_cast<const char*>(rows) + place(strides) * element_size(type);
    };
    const float* ranks =
        a.ranks == nullptr ? a.importance + head * slots : a.ranks + place(a.rank_strides);
    Head(a, head, target)
        .replace(ranks, new_row(a.new_keys, a.new_key_strides, a.newest.keys.type),
                 new_row(a.new_values, a.new_value_strides, a.newest.values.type));
  };
  // A head moves its newest rows, some ten thousand bytes: a few microseconds.
  parallel_for(int64_t{a.batch} * a.heads, replace_one, 8);
}

}  // namespace mlx_h2o::kernels
