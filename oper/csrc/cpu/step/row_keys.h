// The key space of a batch's rows: what sorting accesses by row and numbering their rows share.
//
// Rows are ordered by (bucket, owner code, slot). All (bucket, owner code) pairs together number
// the rows they may name without gaps, as far as the largest slot of the bucket.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/step/batch_arguments.h"
#include "oper/common/bits.h"
#include "oper/step/sort.h"

namespace oper {

constexpr int64_t kAccessesPerChunk = 1 << 15;

// The accesses of features with gradients, as segments, and the key space of their rows.
struct RowKeys {
  const int64_t* addresses;
  std::vector<SortedSegment> segments;
  int64_t elements = 0;
  int64_t rank, ranks, buckets;
  int number_bits = 0;                 // of what accesses are called: positions, or bags
  std::vector<uint64_t> first_key{0};  // of each bucket and owner code, and the end
  std::vector<uint64_t> base;          // the first key of each bucket and field code

  int64_t owner_codes() const { return ranks + 1; }
  int64_t field_codes() const { return ranks + 2; }
  uint64_t keys() const { return first_key.back(); }
  int key_bits() const { return bit_width(std::max<uint64_t>(keys(), 1) - 1); }
  int64_t chunks() const {
    return std::clamp<int64_t>(elements / kAccessesPerChunk, 1, at::get_num_threads());
  }
  const uint64_t* base_of(const SortedSegment& segment) const {
    return base.data() + segment.bucket * field_codes();
  }

  // The key space of the next bucket: so many slots, of replicas and then of each rank.
  void add_bucket(int64_t slots);

  // f(segment, begin, end) for the accesses of elements [first, last), piece by piece.
  template <typename F>
  void for_each_piece(int64_t first, int64_t last, const F& f) const {
    auto segment = std::upper_bound(
        segments.begin(), segments.end(), first,
        [](int64_t element, const SortedSegment& s) { return element < s.element; });
    for (--segment; first < last; ++segment) {
      const int64_t begin = segment->begin + first - segment->element;
      const int64_t end = std::min(segment->end, begin + last - first);
      f(*segment, begin, end);
      first += end - begin;
    }
  }

  // f(chunk, first, last) with the elements of each chunk, on all threads.
  template <typename F>
  void for_each_chunk(const F& f) const {
    const int64_t count = chunks();
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk)
        f(chunk, elements * chunk / count, elements * (chunk + 1) / count);
    });
  }

  // Makes keys of runs, ascending, slots of their bucket and owner code, and fills `count`
  // [buckets · owner codes + 1] with the runs before each of these.
  void slots_of_keys(int64_t* slot, int64_t runs, int64_t* count) const {
    count[0] = 0;
    for (int64_t c = 0; c < buckets * owner_codes(); ++c) {
      const auto first = static_cast<int64_t>(first_key[c]);
      const auto last = static_cast<int64_t>(first_key[c + 1]);
      count[c + 1] = std::lower_bound(slot + count[c], slot + runs, last) - slot;
      for (int64_t run = count[c]; run < count[c + 1]; ++run) slot[run] -= first;
    }
  }
};

// The accesses that an operator's arguments describe, checked. The key space is empty: buckets are
// to be added to it.
RowKeys segments_of_rows(const at::Tensor& addresses, const at::Tensor& segment_offset,
                         const at::Tensor& features, int64_t rank, int64_t ranks, int64_t buckets);

// The accesses that an operator's arguments describe, checked, and the key space as far as the
// largest slot that is read.
RowKeys row_keys(const at::Tensor& addresses, const at::Tensor& segment_offset,
                 const at::Tensor& features, int64_t rank, int64_t ranks, int64_t buckets);

}  // namespace oper
