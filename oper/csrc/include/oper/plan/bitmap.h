// The bitmap of listed rows: one bit a row, with running counts, so that a row's place among the
// listed rows is found in one cache line.
//
// A line of 64 bytes covers 448 rows of one table: 7 words of bits behind a header. The header's
// low 37 bits are the listed rows of all tables before the line; above them three fields of 9 bits
// are those in the line before words 2, 4 and 6, so that at most two words are counted.
#pragma once

#include <cstdint>

#include "oper/common/simd.h"

namespace oper {

constexpr int64_t kWordsPerLine = 7;
constexpr int64_t kRowsPerLine = 64 * kWordsPerLine;

struct Line {
  static constexpr int kBeforeBits = 37;
  static constexpr int kPartBits = 9;

  uint64_t header;
  uint64_t words[kWordsPerLine];

  // Listed rows of all tables before this line.
  OPER_HD int64_t before() const {
    return static_cast<int64_t>(header & ((uint64_t{1} << kBeforeBits) - 1));
  }

  // Listed rows of this line.
  int64_t listed() const {
    int64_t count = 0;
    for (uint64_t word : words) count += __builtin_popcountll(word);
    return count;
  }

  OPER_HD bool test(uint32_t position) const { return words[position / 64] >> (position % 64) & 1; }

  // Listed rows of all tables before the row at `position` (0 to 447) of this line.
  OPER_HD OPER_INLINE int64_t rank(uint32_t position) const {
    const uint32_t word = position / 64;
    // Fields 1 to 3, for words 2 to 7, and a field 0 of zeros.
    const uint64_t fields = header >> kBeforeBits << kPartBits;
    const uint64_t part = fields >> (kPartBits * (word / 2)) & ((1u << kPartBits) - 1);
    const uint64_t odd = (word & 1) ? words[word - 1] : 0;
    const uint64_t below = words[word] & ((uint64_t{1} << (position % 64)) - 1);
    return before() + static_cast<int64_t>(part) + __builtin_popcountll(odd) +
           __builtin_popcountll(below);
  }

  void set_header(int64_t before_line) {
    uint64_t fields = 0, part = 0;
    for (int field = 0; field < 3; ++field) {
      part += __builtin_popcountll(words[2 * field]) + __builtin_popcountll(words[2 * field + 1]);
      fields |= part << (kPartBits * field);
    }
    header = static_cast<uint64_t>(before_line) | fields << kBeforeBits;
  }
};
static_assert(sizeof(Line) == 64, "a line of the bitmap is one cache line");

// Lines of a table: at least one, so that every table has a header to count from.
inline int64_t lines_of(int64_t rows) {
  return rows > 0 ? (rows + kRowsPerLine - 1) / kRowsPerLine : 1;
}

}  // namespace oper
