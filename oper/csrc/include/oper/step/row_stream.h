// The rows of a batch's accesses, in the order in which the lookup takes them.
//
// Work is cut into tiles, each of a few bags of all features, so that parts of the output that lie
// together are written together. Rows come in no order, and each would be waited for: where they
// lie is found in blocks of kRowsPerBlock, and with each row that is read the one kRowsPerBlock
// rows further on is fetched, across bags, features and tiles. A row that is not mapped is read as
// zeros and told afterwards (`check`), as nothing may be thrown through what reads them (simd.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oper/common/simd.h"
#include "oper/plan/address.h"
#include "oper/plan/address_vectors.h"
#include "oper/step/feature.h"

namespace oper {

constexpr int64_t kBagsPerTile = 128;
constexpr int64_t kAccessesPerTile = 1 << 16;
constexpr int64_t kRowsPerBlock = 32;
constexpr int64_t kFetchedBytes = 1024;  // of a row at most; the hardware sees where it goes on

// The accesses of a batch, and which bags they fall into.
struct Batch {
  const int64_t* addresses;
  int64_t accesses;
  const int32_t* offsets32;  // [bags + 1]; one of the two, or neither: bags hold one access each
  const int64_t* offsets64;
  const float* weights;  // one an access; null for ones
  const Feature* features;
  int64_t feature_count;
  Bases bases;

  // The first access of a bag.
  int64_t first(int64_t bag) const {
    return offsets32 ? offsets32[bag] : offsets64 ? offsets64[bag] : bag;
  }

  // At most one for each bag of the feature that has the most.
  int64_t tiles() const {
    int64_t most = 0;
    for (int64_t f = 0; f < feature_count; ++f) most = std::max(most, features[f].bags);
    return std::min(
        most, std::max((most + kBagsPerTile - 1) / kBagsPerTile, accesses / kAccessesPerTile));
  }
};

// What a tile has of a feature: bags [begin, end), counted from the feature's first.
struct Slice {
  const Feature& feature;
  int64_t begin, end;
  int64_t first_access, accesses;

  Slice(const Batch& batch, int64_t f, int64_t tile, int64_t tiles)
      : feature(batch.features[f]),
        begin(feature.bags * tile / tiles),
        end(feature.bags * (tile + 1) / tiles),
        first_access(batch.first(feature.first_bag + begin)),
        accesses(batch.first(feature.first_bag + end) - first_access) {}
};

// Whether each bag of a slice holds one access.
inline bool holds_one_each(const Batch& batch, const Slice& slice) {
  if (!batch.offsets32 && !batch.offsets64) return true;
  if (slice.accesses != slice.end - slice.begin) return false;
  bool each = true;
  for (int64_t i = slice.begin; i < slice.end; ++i)
    each &= batch.first(slice.feature.first_bag + i) - slice.first_access == i - slice.begin;
  return each;
}

// To be inlined: compilers take a function that only prefetches for one that does nothing.
template <typename Lines>
OPER_INLINE void fetch_lines(const uint8_t* row, Lines lines) {
  for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(row + 64 * line);
}

// The lines that `bytes` bytes lie in; a row may begin in the middle of one.
OPER_INLINE void fetch(const uint8_t* row, int64_t bytes) {
  fetch_lines(row, (static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % 64) + bytes + 63) / 64);
}

// Rows that are read, and as many to fetch: `fetched_bytes` of each.
struct Rows {
  const uint8_t* const* rows;
  const uint8_t* const* ahead;
  int64_t fetched_bytes;
  int64_t count;
};

#if defined(__x86_64__)
// Where rows of one width lie, for eight addresses at a time.
class RowVectors {
 public:
  RowVectors() = default;

  RowVectors(const Bases& bases, int64_t width, int64_t row_bytes) {
    constexpr int64_t kOwn = kFieldsAbove;  // codes before the fields', both the reader's own
    codes_ = kAddressVectors && row_bytes >> 32 == 0 ? kOwn + bases.ranks + 1 : 0;
    if (codes_ > kMostVectorCodes) codes_ = 0;
    row_bytes_ = row_bytes;
    for (int64_t code = 0; code < codes_; ++code) {
      const int64_t field = code < kOwn ? bases.rank : code - kOwn;
      const auto arena = reinterpret_cast<uintptr_t>(bases.arena(width, make_address(field, 0)));
      low_[code] = static_cast<uint32_t>(arena);
      high_[code] = static_cast<uint32_t>(arena >> 32);
      unmapped_[code] = arena == 0;
    }
  }

  // Finds the rows of a number of addresses, a multiple of 8 and not more than `size`, which is
  // returned: 0 if one of them is not mapped, or cannot be found in this way.
  int64_t find(const int64_t* addresses, int64_t size, const uint8_t** rows) const {
    return codes_ ? find_avx2(addresses, size, rows) : 0;
  }

 private:
  OPER_AVX2_ADDRESSES static OPER_INLINE __m256i eight_of(const uint32_t* codes) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
  }

  OPER_AVX2_ADDRESSES int64_t find_avx2(const int64_t* addresses, int64_t size,
                                        const uint8_t** rows) const {
    const __m256i lows = eight_of(low_), highs = eight_of(high_), unmapped = eight_of(unmapped_);
    const __m256i bytes = _mm256_set1_epi64x(row_bytes_), zero = _mm256_setzero_si256();
    const __m256i last = _mm256_set1_epi32(static_cast<int32_t>(codes_) - 1);
    __m256i bad = zero;
    int64_t n = 0;
    for (; n + 8 <= size; n += 8) {
      const EightAddresses eight = eight_addresses(addresses + n);
      bad = _mm256_or_si256(bad, eight.rest);
      bad = _mm256_or_si256(bad, _mm256_cmpgt_epi32(eight.code, last));
      bad = _mm256_or_si256(bad, _mm256_permutevar8x32_epi32(unmapped, eight.code));
      const __m256i low = _mm256_permutevar8x32_epi32(lows, eight.code);
      const __m256i high = _mm256_permutevar8x32_epi32(highs, eight.code);
      const __m256i before = _mm256_mul_epu32(_mm256_unpacklo_epi32(eight.slot, zero), bytes);
      const __m256i after = _mm256_mul_epu32(_mm256_unpackhi_epi32(eight.slot, zero), bytes);
      auto* const to = reinterpret_cast<__m256i*>(rows + n);
      _mm256_storeu_si256(to, _mm256_add_epi64(_mm256_unpacklo_epi32(low, high), before));
      _mm256_storeu_si256(to + 1, _mm256_add_epi64(_mm256_unpackhi_epi32(low, high), after));
    }
    return _mm256_testz_si256(bad, bad) ? n : 0;
  }

  // Of the arena of each field code, and whether it is not mapped.
  alignas(32) uint32_t low_[kMostVectorCodes] = {};
  alignas(32) uint32_t high_[kMostVectorCodes] = {};
  alignas(32) uint32_t unmapped_[kMostVectorCodes] = {};
  int64_t codes_ = 0;  // 0: rows are found one by one
  int64_t row_bytes_ = 0;
};
#endif

// The rows of all accesses of tiles [tile, last), slice after slice.
class RowStream {
 public:
  RowStream(const Batch& batch, int64_t tile, int64_t last, int64_t tiles)
      : batch_(batch),
        tile_(tile),
        last_(last),
        tiles_(tiles) {
    find_block();
  }

  // The next row.
  const uint8_t* next() {
    if (at_ == now_->count) advance();
    fetch(next_->rows[at_], next_->fetched_bytes);
    return now_->rows[at_++];
  }

  // The next rows, at least one and at most `most`. Who reads them fetches those ahead.
  Rows next(int64_t most) {
    if (at_ == now_->count) advance();
    const int64_t count = std::min(most, now_->count - at_);
    const Rows rows{now_->rows + at_, next_->rows + at_, next_->fetched_bytes, count};
    at_ += count;
    return rows;
  }

  // Throws where one of the rows so far is not mapped.
  void check() const {
    if (unmapped_ >= 0)
      throw std::out_of_range("addresses: access " + std::to_string(unmapped_) + " reads field " +
                              std::to_string(field_of(batch_.addresses[unmapped_])) +
                              ", which has no rows of width " + std::to_string(unmapped_width_) +
                              " here");
  }

 private:
  // Rows of one size; null after the last, so that fetching them does no harm.
  struct Block {
    const uint8_t* rows[kRowsPerBlock] = {};
    int64_t count = 0;
    int64_t fetched_bytes = 0;
  };

  __attribute__((noinline)) void advance() {
    for (int64_t n = now_->count; n < next_->count; ++n)
      fetch(next_->rows[n], next_->fetched_bytes);
    std::swap(now_, next_);
    at_ = 0;
    find_block();
  }

  // Finds the rows after those of `now_`.
  void find_block() {
    next_->count = next_->fetched_bytes = 0;
    while (next_->count < kRowsPerBlock && (access_ < end_ || next_slice())) {
      const int64_t bytes = std::min(feature_->row_bytes, kFetchedBytes);
      if (next_->count > 0 && bytes != next_->fetched_bytes) break;
      next_->fetched_bytes = bytes;
      find(std::min(kRowsPerBlock - next_->count, end_ - access_));
    }
    std::fill(next_->rows + next_->count, next_->rows + kRowsPerBlock, nullptr);
  }

  void find(int64_t size) {
    const int64_t* const addresses = batch_.addresses + access_;
    const Bases bases = batch_.bases;
    const int64_t width = feature_->width, row_bytes = feature_->row_bytes;
    const uint8_t** const rows = next_->rows + next_->count;
    int64_t n = 0;
#if defined(__x86_64__)
    n = vectors_.find(addresses, size, rows);
#endif
    for (; n < size; ++n) {
      const uint8_t* const arena = bases.arena(width, addresses[n]);
      if (__builtin_expect(arena == nullptr, 0))
        rows[n] = not_mapped(access_ + n);
      else
        rows[n] = arena + slot_of(addresses[n]) * row_bytes;
    }
    access_ += size;
    next_->count += size;
  }

  // Moves on to the next slice that has accesses, if there is one.
  bool next_slice() {
    for (; tile_ < last_; ++tile_, slice_ = 0)
      while (slice_ < batch_.feature_count) {
        const Slice slice(batch_, slice_++, tile_, tiles_);
        take(slice.feature);
        access_ = slice.first_access;
        end_ = access_ + slice.accesses;
        if (access_ < end_) return true;
      }
    return false;
  }

  void take(const Feature& feature) {
#if defined(__x86_64__)
    if (!feature_ || feature_->width != feature.width || feature_->row_bytes != feature.row_bytes)
      vectors_ = RowVectors(batch_.bases, feature.width, feature.row_bytes);
#endif
    feature_ = &feature;
  }

  __attribute__((noinline)) const uint8_t* not_mapped(int64_t access) {
    if (unmapped_ < 0) {
      unmapped_ = access, unmapped_width_ = feature_->width;
      int64_t most = 0;
      for (int64_t f = 0; f < batch_.feature_count; ++f)
        most = std::max(most, batch_.features[f].row_bytes);
      zeros_.resize(most);
    }
    return zeros_.data();
  }

  const Batch& batch_;
  Block blocks_[2];
  Block *now_ = blocks_, *next_ = blocks_ + 1;
  int64_t at_ = 0;                           // in `now_`
  int64_t tile_, last_, tiles_, slice_ = 0;  // of the rows to be found next
  const Feature* feature_ = nullptr;
#if defined(__x86_64__)
  RowVectors vectors_;  // of the feature's rows
#endif
  int64_t access_ = 0, end_ = 0;
  int64_t unmapped_ = -1, unmapped_width_ = 0;  // the first access of a row that is not mapped
  std::vector<uint8_t> zeros_;
};

}  // namespace oper
