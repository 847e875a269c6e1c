// torch.ops.oper.number_rows: the rows that a batch reads, in the order of the sort, and for every
// access the number of its row.
//
// What summing gradients must know of a batch that reads few rows many times: each access is added
// to its row's sum, so nothing need be sorted. A row has a place among all that a batch may name,
// its key, which is marked where the row is read.

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/common/output_buffers.h"
#include "cpu/step/row_keys.h"
#include "oper/common/simd.h"
#include "oper/plan/address_vectors.h"

namespace oper {
namespace {

// Accesses that stay in the first cache between two passes.
constexpr int64_t kNumberedBlock = 4096;

// The keys of a bucket's rows: those of each field code begin at base [codes].
struct BucketKeys {
  const uint64_t* base;
  uint64_t codes, slots;
};

// The keys of some accesses; false where one names no row.
bool find_keys(const BucketKeys& of, const int64_t* addresses, int64_t size, int32_t* key) {
  uint64_t wrong = 0;
  for (int64_t n = 0; n < size; ++n) {
    const auto address = static_cast<uint64_t>(addresses[n]);
    const uint64_t code = field_code(address), slot = address & kSlotMask;
    const bool is_row = (addresses[n] >= 0) & (code < of.codes) & (slot < of.slots);
    wrong |= !is_row;
    key[n] = static_cast<int32_t>(is_row ? of.base[code] + slot : 0);
  }
  return !wrong;
}

#if defined(__x86_64__)
// The same where vectors hold the bases.
OPER_AVX2_ADDRESSES bool find_keys_avx2(const BucketKeys& of, const int64_t* addresses,
                                        int64_t size, int32_t* key) {
  alignas(32) uint32_t base[kMostVectorCodes] = {}, most[3][8];
  std::copy_n(of.base, of.codes, base);
  const __m256i bases = _mm256_load_si256(reinterpret_cast<const __m256i*>(base));
  __m256i rest = _mm256_setzero_si256(), slots = rest, codes = rest;
  int64_t n = 0;
  for (; n + 8 <= size; n += 8) {
    const EightAddresses eight = eight_addresses(addresses + n);
    rest = _mm256_or_si256(rest, eight.rest);
    slots = _mm256_max_epu32(slots, eight.slot);
    codes = _mm256_max_epu32(codes, eight.code);
    const __m256i found =
        _mm256_add_epi32(eight.slot, _mm256_permutevar8x32_epi32(bases, eight.code));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(key + n),
                        _mm256_permute4x64_epi64(found, 0xD8));  // 0 to 7
  }
  _mm256_store_si256(reinterpret_cast<__m256i*>(most[0]), rest);
  _mm256_store_si256(reinterpret_cast<__m256i*>(most[1]), slots);
  _mm256_store_si256(reinterpret_cast<__m256i*>(most[2]), codes);
  bool good = find_keys(of, addresses + n, size - n, key + n);
  for (int lane = 0; lane < 8 && n > 0; ++lane)
    good &= most[0][lane] == 0 && most[1][lane] < of.slots && most[2][lane] < of.codes;
  return good;
}
#endif

bool find_any_keys(const BucketKeys& of, const int64_t* addresses, int64_t size, int32_t* key) {
#if defined(__x86_64__)
  if (kAddressVectors && of.codes <= kMostVectorCodes)
    return find_keys_avx2(of, addresses, size, key);
#endif
  return find_keys(of, addresses, size, key);
}

OPER_SIMD int64_t count_from(const int32_t* key, int64_t size, int32_t first) {
  int32_t count = 0;
  for (int64_t n = 0; n < size; ++n) count += key[n] >= first;
  return count;
}

// Adds to counts [codes] the keys that are of each owner code, which begin at first [codes].
void count_numbered_keys(const int32_t* key, int64_t size, const uint64_t* first, int64_t codes,
                         int64_t* counts) {
  int64_t from = size;
  for (int64_t code = 0; code < codes; ++code) {
    const int64_t next =
        code + 1 < codes ? count_from(key, size, static_cast<int32_t>(first[code + 1])) : 0;
    counts[code] += from - next;
    from = next;
  }
}

// Numbers the marked keys of `lines` lines of 64; their keys to `row`. A line has so many rows
// `before` it, and a row's mark becomes how many of its line are before the row. Returns how many
// rows there are.
int64_t number_marks(uint8_t* marks, int64_t lines, int32_t* before, int64_t* row) {
  int64_t rows = 0;
  for (int64_t n = 0; n < lines; ++n) {
    uint64_t marked = 0;
    for (int byte = 0; byte < 64; byte += 8) {
      uint64_t eight;
      std::memcpy(&eight, marks + 64 * n + byte, 8);
      // Byte k is 0 or 1, and becomes bit k of the highest byte.
      marked |= eight * 0x0102040810204080 >> 56 << byte;
    }
    before[n] = static_cast<int32_t>(rows);
    for (; marked; marked &= marked - 1) {
      const int64_t key = 64 * n + __builtin_ctzll(marked);
      marks[key] = static_cast<uint8_t>(rows - before[n]);
      row[rows++] = key;
    }
  }
  return rows;
}

// Rows [N] of the accesses, slots of the rows [R], and the rows and accesses before those of each
// bucket and owner, [2, buckets · owner codes + 1].
using Numbered = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Numbered number_rows(const at::Tensor& addresses, const at::Tensor& segment_offset,
                     const at::Tensor& features, int64_t rank, int64_t ranks,
                     at::IntArrayRef bucket_slots) {
  const auto buckets = static_cast<int64_t>(bucket_slots.size());
  RowKeys keys = segments_of_rows(addresses, segment_offset, features, rank, ranks, buckets);
  for (const int64_t slots : bucket_slots) {
    check_size(slots, 0, kMostRows, "bucket_slots");
    keys.add_bucket(slots);
  }
  const auto size = static_cast<int64_t>(keys.keys());
  check_size(size, 0, std::numeric_limits<int32_t>::max(), "bucket_slots: rows of all ranks");
  const int64_t lines = (size + 63) / 64, codes = keys.owner_codes();
  const at::Tensor marks = pooled_tensor(64 * lines, at::kByte);
  std::vector<int32_t> lines_before(lines);
  at::Tensor rows = pooled_tensor(addresses.numel(), at::kInt);
  at::Tensor before = at::zeros({2, buckets * codes + 1}, at::kLong);
  auto* const mark_of = marks.mutable_data_ptr<uint8_t>();
  auto* const row_of = rows.mutable_data_ptr<int32_t>();
  auto* const rows_before = before.mutable_data_ptr<int64_t>();
  int64_t* const accesses_before = rows_before + buckets * codes + 1;
  if (keys.elements < rows.numel()) rows.fill_(-1);
  std::fill_n(mark_of, 64 * lines, uint8_t{0});

  for (const SortedSegment& segment : keys.segments) {
    const BucketKeys of{keys.base_of(segment), static_cast<uint64_t>(keys.field_codes()),
                        static_cast<uint64_t>(bucket_slots[segment.bucket])};
    const int64_t group = segment.bucket * codes;
    for (int64_t begin = segment.begin; begin < segment.end; begin += kNumberedBlock) {
      int32_t* const key = row_of + begin;
      const int64_t length = std::min(kNumberedBlock, segment.end - begin);
      OPER_CHECK_INDEX(find_any_keys(of, keys.addresses + begin, length, key),
                       "addresses: one of bucket ", segment.bucket, " names none of ", ranks,
                       " ranks, or none of ", of.slots, " slots");
      for (int64_t n = 0; n < length; ++n) mark_of[key[n]] = 1;
      count_numbered_keys(key, length, keys.first_key.data() + group, codes,
                          accesses_before + group + 1);
    }
  }
  for (int64_t c = 0; c < buckets * codes; ++c) accesses_before[c + 1] += accesses_before[c];

  at::Tensor slots = pooled_tensor(std::min(size, keys.elements), at::kLong);
  auto* const slot = slots.mutable_data_ptr<int64_t>();
  const int64_t found = number_marks(mark_of, lines, lines_before.data(), slot);
  for (const SortedSegment& segment : keys.segments) {
    for (int64_t n = segment.begin; n < segment.end; ++n)
      row_of[n] = lines_before[row_of[n] >> 6] + mark_of[row_of[n]];
  }
  keys.slots_of_keys(slot, found, rows_before);
  return {rows, slots.narrow(0, 0, found), before};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.set_python_module("oper.runtime.step.sort");  // the shapes, which depend on data
  m.def(
      "number_rows(Tensor addresses, Tensor segment_offset, Tensor features, int rank, int ranks,"
      " int[] bucket_slots) -> (Tensor rows, Tensor slots, Tensor before)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) { m.impl("number_rows", number_rows); }

}  // namespace oper
