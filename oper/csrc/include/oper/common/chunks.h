// Cutting ranges of rows into chunks of work whose borders do not depend on the number of
// threads, so that results are the same on every machine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace oper {

// Rows [begin, end) of range `range`, counted from the range's first row.
struct Chunk {
  int32_t range;
  int64_t begin;
  int64_t end;
};

// Cut ranges [offsets[n], offsets[n+1]) into chunks of about `rows` rows, a multiple of `align`,
// but into no more than about kMostChunks in all.
inline std::vector<Chunk> cut_chunks(const int64_t* offsets, int64_t ranges, int64_t rows,
                                     int64_t align) {
  constexpr int64_t kMostChunks = 4096;
  const int64_t total = offsets[ranges] - offsets[0];
  const int64_t wanted = std::max(rows, total / kMostChunks);
  const int64_t step = (wanted + align - 1) / align * align;
  std::vector<Chunk> chunks;
  for (int64_t range = 0; range < ranges; ++range) {
    const int64_t size = offsets[range + 1] - offsets[range];
    for (int64_t begin = 0; begin < size; begin += step)
      chunks.push_back({static_cast<int32_t>(range), begin, std::min(begin + step, size)});
  }
  return chunks;
}

}  // namespace oper
