// The union of the replicas that ranks have touched (OPER, §5.3), by bitmaps over their fixed
// numbering: equal bitmaps give equal numberings, so no ids travel and nothing is sorted.
//
// Each bucket begins at a word of its own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "oper/common/simd.h"

namespace oper {

OPER_HD inline int64_t words_of(int64_t rows) { return (rows + 63) / 64; }

// The replicas of a bucket, which are numbered in the order of their slots; slots of other buckets
// may lie between them.
struct Replicas {
  const int64_t* slots;  // [count] ascending; null: number n is slot n
  int64_t count;

  OPER_HD int64_t slot_of(int64_t number) const { return slots ? slots[number] : number; }
};

// The number of the first replica from number `from` on whose slot is no less; looked for near
// `from` at first.
inline int64_t number_from(const Replicas& replicas, int64_t from, int64_t slot) {
  if (!replicas.slots) return slot;
  int64_t step = 1;
  while (from + step < replicas.count && replicas.slots[from + step - 1] < slot) {
    from += step;
    step *= 2;
  }
  return std::lower_bound(replicas.slots + from,
                          replicas.slots + std::min(from + step, replicas.count), slot) -
         replicas.slots;
}

// f(n, the number of the replica at slots[n]) for slots that ascend; returns the index of the first
// that does not, or is no replica's, or -1.
template <typename F>
int64_t number_slots(const int64_t* slots, int64_t size, const Replicas& replicas, const F& f) {
  int64_t least = 0;
  for (int64_t n = 0; n < size; ++n, ++least) {
    if (least >= replicas.count) return n;
    const int64_t number = number_from(replicas, least, slots[n]);
    if (number < least || number >= replicas.count || replicas.slot_of(number) != slots[n])
      return n;
    f(n, number);
    least = number;
  }
  return -1;
}

inline void set_bit(int64_t number, uint64_t* words) {
  words[number / 64] |= uint64_t{1} << (number % 64);
}

// Counting bits is one instruction on any x86-64 since 2008, which the baseline leaves out.
inline __attribute__((always_inline)) int64_t count_bits_body(const uint64_t* words, int64_t size) {
  int64_t count = 0;
  for (int64_t w = 0; w < size; ++w) count += __builtin_popcountll(words[w]);
  return count;
}

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("popcnt"))) inline int64_t count_bits_popcnt(const uint64_t* words,
                                                                   int64_t size) {
  return count_bits_body(words, size);
}
#endif

inline int64_t count_bits(const uint64_t* words, int64_t size) {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool popcnt = __builtin_cpu_supports("popcnt");
  if (popcnt) return count_bits_popcnt(words, size);
#endif
  return count_bits_body(words, size);
}

// The set bits in order, as numbers from `first` on.
inline void list_bits(const uint64_t* words, int64_t size, int64_t first, int64_t* numbers) {
  for (int64_t w = 0; w < size; ++w)
    for (uint64_t word = words[w]; word; word &= word - 1)
      *numbers++ = first + 64 * w + __builtin_ctzll(word);
}

}  // namespace oper
