// torch.ops.oper.number_rows: the rows that a batch reads, in the order of the sort, and for every
// access the number of its row.
//
// What summing gradients must know of a batch that reads few rows many times: each access is added
// to its row's sum, so nothing need be sorted. A row has a place among all that a batch may name,
// which is marked where the row is read.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/common/output_buffers.h"
#include "cpu/step/accesses_by_rank.h"
#include "cpu/step/row_keys.h"
#include "oper/common/simd.h"

namespace oper {
namespace {

constexpr int64_t kBlock = 4096;  // accesses that stay in the first cache between two passes

// The key of each access, which is marked; false where one names no row.
bool mark(const int64_t* addresses, int64_t size, const uint64_t* base, uint64_t field_codes,
          uint64_t slots, uint8_t* marks, int32_t* key) {
  uint64_t wrong = 0;
  for (int64_t n = 0; n < size; ++n) {
    const auto address = static_cast<uint64_t>(addresses[n]);
    const uint64_t code = field_code(address), slot = address & kSlotMask;
    const bool is_row = (addresses[n] >= 0) & (code < field_codes) & (slot < slots);
    wrong |= !is_row;
    const uint64_t found = is_row ? base[code] + slot : 0;
    marks[found] = 1;
    key[n] = static_cast<int32_t>(found);
  }
  return !wrong;
}

// 64 keys: which are marked, and how many before them are.
struct Line {
  uint64_t marks;
  int64_t before;
};

// Numbers the marked keys of `lines` lines; their keys to `row`. Returns how many there are.
int64_t number_marks(const uint8_t* marks, int64_t lines, Line* line, int64_t* row) {
  int64_t rows = 0;
  for (int64_t n = 0; n < lines; ++n) {
    line[n] = {0, rows};
    for (int byte = 0; byte < 64; byte += 8) {
      uint64_t eight;
      std::memcpy(&eight, marks + 64 * n + byte, 8);
      // Byte k is 0 or 1, and becomes bit k of the highest byte.
      line[n].marks |= eight * 0x0102040810204080 >> 56 << byte;
    }
    for (uint64_t rest = line[n].marks; rest; rest &= rest - 1)
      row[rows++] = 64 * n + __builtin_ctzll(rest);
  }
  return rows;
}

// Keys become the numbers of their rows.
OPER_SIMD void number_keys(const Line* lines, int64_t size, int32_t* key) {
  for (int64_t n = 0; n < size; ++n) {
    const Line& line = lines[key[n] >> 6];
    const uint64_t before = line.marks & ((uint64_t{1} << (key[n] & 63)) - 1);
    key[n] = static_cast<int32_t>(line.before + __builtin_popcountll(before));
  }
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
  const at::Tensor marks = at::zeros({64 * lines}, at::kByte);
  std::vector<Line> line(lines);
  at::Tensor rows = pooled_tensor(addresses.numel(), at::kInt);
  at::Tensor before = at::zeros({2, buckets * codes + 1}, at::kLong);
  auto* const mark_of = marks.mutable_data_ptr<uint8_t>();
  auto* const row_of = rows.mutable_data_ptr<int32_t>();
  auto* const rows_before = before.mutable_data_ptr<int64_t>();
  int64_t* const accesses_before = rows_before + buckets * codes + 1;
  if (keys.elements < rows.numel()) rows.fill_(-1);

  for (const SortedSegment& segment : keys.segments) {
    const auto slots = static_cast<uint64_t>(bucket_slots[segment.bucket]);
    for (int64_t begin = segment.begin; begin < segment.end; begin += kBlock) {
      const int64_t* const block = keys.addresses + begin;
      const int64_t length = std::min(kBlock, segment.end - begin);
      const bool good = slots > 0 && mark(block, length, keys.base_of(segment), keys.field_codes(),
                                          slots, mark_of, row_of + begin);
      TORCH_CHECK_INDEX(good, "addresses: one of bucket ", segment.bucket, " names none of ", ranks,
                        " ranks, or none of ", slots, " slots");
      count_by_rank(block, length, rank, ranks, accesses_before + segment.bucket * codes + 1);
    }
  }
  for (int64_t c = 0; c < buckets * codes; ++c) accesses_before[c + 1] += accesses_before[c];

  at::Tensor slots = pooled_tensor(std::min(size, keys.elements), at::kLong);
  auto* const slot = slots.mutable_data_ptr<int64_t>();
  const int64_t found = number_marks(mark_of, lines, line.data(), slot);
  for (const SortedSegment& segment : keys.segments)
    number_keys(line.data(), segment.end - segment.begin, row_of + segment.begin);
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
