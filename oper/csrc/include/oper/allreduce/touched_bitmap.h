// The union of the replicas that ranks have touched (OPER, §5.3), by bitmaps over their fixed
// numbering: equal bitmaps give equal numberings, so no ids travel and nothing is sorted.
//
// Bucket b has replicas 0 to rows[b] - 1 and begins at a word of its own.
#pragma once

#include <cstdint>

namespace oper {

inline int64_t words_of(int64_t rows) { return (rows + 63) / 64; }

// Set the bits of ascending slots; returns the index of the first out of [0, rows), or -1.
template <typename Slot>
int64_t set_bits(const Slot* slots, int64_t size, int64_t rows, uint64_t* words) {
  for (int64_t n = 0; n < size; ++n) {
    const uint64_t slot = static_cast<uint64_t>(slots[n]);
    if (slot >= static_cast<uint64_t>(rows)) return n;
    words[slot / 64] |= uint64_t{1} << (slot % 64);
  }
  return -1;
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

// The set bits in order, as slots from `first` on.
inline void list_bits(const uint64_t* words, int64_t size, int64_t first, int64_t* slots) {
  for (int64_t w = 0; w < size; ++w)
    for (uint64_t word = words[w]; word; word &= word - 1)
      *slots++ = first + 64 * w + __builtin_ctzll(word);
}

}  // namespace oper
