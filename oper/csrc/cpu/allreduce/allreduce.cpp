// torch.ops.oper.mark_replicas, unite_replicas, aggregate_rows, sum_buffers, touched_rows,
// take_rows, pack_rows, merge_messages, digest_rows: the replicas' gradients, made equal in shape
// on all ranks and summed (OPER, §5.3), and the check that their copies are equal.
//
// A rank's rows and gradients come whole, by groups (step/row_groups.h): `group` says which of them
// are each bucket's replicas. How many replicas there are to number, whether touched or not, is in
// `counts`: a bucket of none takes part with no rows, whatever its group has. `replicas` are their
// slots, ascending, or nothing where number n is slot n.

#include "oper/allreduce/gradient_buffers.h"
#include "oper/allreduce/row_digests.h"
#include "oper/allreduce/touched_bitmap.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <tuple>
#include <vector>

#include "cpu/allreduce/replica_arguments.h"
#include "cpu/common/arguments.h"
#include "cpu/step/row_groups.h"
#include "schemas.h"

namespace oper {
namespace {

// What a thread gets at least: less would not pay for waking it.
constexpr int64_t kFloatsPerTask = 1 << 15;
constexpr int64_t kWordsPerTask = 1 << 12;
constexpr int64_t kSlotsPerTask = 1 << 14;

// Rows and their gradients: whole tensors, by groups. The second line of a result's groups has no
// gaps, so that what ranks exchange of it are gradients and nothing else.
using Rows = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

// The words of a bitmap.
uint64_t* words(const at::Tensor& tensor, int64_t size, const char* name) {
  elements<int64_t>(tensor, size, name);
  return static_cast<uint64_t*>(tensor.data_ptr());
}

// The dims of buckets, one each.
void check_dims(at::IntArrayRef dims, size_t buckets) {
  OPER_CHECK_VALUE(dims.size() == buckets, "dims: expected ", buckets, ", one per bucket, got ",
                   dims.size());
  for (int64_t dim : dims) check_size(dim, 1, kMostThings, "dims");
}

// Places after another: rows before each bucket are in the first line of `groups`.
void lay_out(at::Tensor& groups, at::IntArrayRef dims) {
  const auto buckets = static_cast<int64_t>(dims.size());
  int64_t* const before = groups.mutable_data_ptr<int64_t>();
  int64_t* const value = before + buckets + 1;
  value[0] = 0;
  for (int64_t b = 0; b < buckets; ++b) {
    value[b + 1] = value[b] + product(before[b + 1] - before[b], dims[b], "rows");
    check_size(value[b + 1], 0, kMostRows, "rows: values");
  }
}

// The numbers of the set bits, bucket after bucket, and groups of them, a bucket each.
std::tuple<at::Tensor, at::Tensor> numbers_of(const uint64_t* bits,
                                              const std::vector<Replicas>& buckets,
                                              at::IntArrayRef dims) {
  struct Task {
    const uint64_t* words;
    int64_t size;
    int64_t first;  // the number of its first bit
  };
  std::vector<Task> tasks;
  std::vector<size_t> first_task;
  for (const Replicas& bucket : buckets) {
    first_task.push_back(tasks.size());
    const int64_t size = words_of(bucket.count);
    for (int64_t first = 0; first < size; first += kWordsPerTask)
      tasks.push_back({bits + first, std::min(kWordsPerTask, size - first), 64 * first});
    bits += size;
  }
  first_task.push_back(tasks.size());
  const auto each_task = [&](const auto& f) {
    at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) f(t, tasks[t]);
    });
  };
  std::vector<int64_t> before(tasks.size() + 1, 0);
  each_task([&](int64_t t, const Task& of) { before[t + 1] = count_bits(of.words, of.size); });
  std::partial_sum(before.begin(), before.end(), before.begin());
  at::Tensor numbers = at::empty({before.back()}, at::kLong);
  int64_t* const out = numbers.mutable_data_ptr<int64_t>();
  each_task(
      [&](int64_t t, const Task& of) { list_bits(of.words, of.size, of.first, out + before[t]); });
  at::Tensor groups = at::empty({2, static_cast<int64_t>(first_task.size())}, at::kLong);
  int64_t* const rows = groups.mutable_data_ptr<int64_t>();
  for (size_t b = 0; b < first_task.size(); ++b) rows[b] = before[first_task[b]];
  lay_out(groups, dims);
  return {numbers, groups};
}

// Numbers of replicas become their slots.
void to_slots(at::Tensor& numbers, const at::Tensor& groups, const std::vector<Replicas>& buckets) {
  int64_t* const slot = numbers.mutable_data_ptr<int64_t>();
  const int64_t* const before = groups.const_data_ptr<int64_t>();
  for (size_t b = 0; b < buckets.size(); ++b)
    if (buckets[b].slots)
      at::parallel_for(before[b], before[b + 1], kSlotsPerTask, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) slot[n] = buckets[b].slots[slot[n]];
      });
}

// f(n, number) for the replicas at the slots of a group.
template <typename F>
void number_group(const int64_t* slots, int64_t size, const Replicas& replicas, size_t bucket,
                  const F& f) {
  const int64_t bad = number_slots(slots, size, replicas, f);
  OPER_CHECK_INDEX(bad < 0, "slot ", slots[bad], " of bucket ", bucket, ": none of its ",
                   replicas.count, " replicas, or not after the slot before");
}

// One bucket's lists into its part of a buffer, one row for each of `count` slots.
template <typename Slot, typename SlotOf>
void aggregate_bucket(const std::vector<SlotRows<Slot>>& lists, const SlotOf& slot_of,
                      int64_t count, int64_t dim, float* out) {
  std::atomic<int64_t> found{0};
  at::parallel_for(0, count, std::max<int64_t>(kFloatsPerTask / dim, 1),
                   [&](int64_t begin, int64_t end) {
                     found += aggregate(lists, slot_of, begin, end, dim, out + begin * dim);
                   });
  int64_t given = 0;
  for (const auto& list : lists) given += list.size;
  OPER_CHECK_VALUE(found == given, "slots: ", given - found,
                   " of them do not ascend or are not in the union");
}

void mark_replicas(const at::Tensor& slots, const at::Tensor& before, at::IntArrayRef group,
                   at::TensorList replicas, at::IntArrayRef counts, at::Tensor& bitmap,
                   int64_t /*stream*/) {
  const std::vector<Replicas> buckets = replicas_of(replicas, counts);
  check_one_each(group, buckets.size());
  const int64_t size = words_of_all(counts), last = before.numel() - 1;
  const int64_t* const slot = elements<int64_t>(slots, "slots");
  const int64_t* const rows = elements<int64_t>(before, "before");
  uint64_t* bits = words(bitmap, size, "bitmap");
  std::fill(bits, bits + size, 0);
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].count == 0) continue;
    check_index(group[b], last, "group", "groups");
    const int64_t begin = rows[group[b]], end = rows[group[b] + 1];
    OPER_CHECK_VALUE(0 <= begin && begin <= end && end <= slots.numel(), "before: rows ", begin,
                     " to ", end, " of ", slots.numel());
    number_group(slot + begin, end - begin, buckets[b], b,
                 [bits](int64_t, int64_t number) { set_bit(number, bits); });
    bits += words_of(buckets[b].count);
  }
}

std::tuple<at::Tensor, at::Tensor> unite_replicas(at::TensorList bitmaps, at::TensorList replicas,
                                                  at::IntArrayRef counts, at::IntArrayRef dims,
                                                  int64_t most_rows, int64_t /*stream*/) {
  const std::vector<Replicas> buckets = replicas_of(replicas, counts);
  check_dims(dims, buckets.size());
  const int64_t size = words_of_all(counts);
  at::Tensor united = at::zeros({size}, at::kLong);
  uint64_t* const bits = words(united, size, "bitmaps");
  for (const at::Tensor& bitmap : bitmaps) {
    const uint64_t* const each = words(bitmap, size, "bitmaps");
    for (int64_t w = 0; w < size; ++w) bits[w] |= each[w];
  }
  const uint64_t* last = bits;
  for (int64_t count : counts) {
    last += words_of(count);
    OPER_CHECK_INDEX(count % 64 == 0 || last[-1] >> (count % 64) == 0, "bitmaps: a bucket of ",
                     count, " replicas has bits beyond them");
  }
  auto [slots, groups] = numbers_of(bits, buckets, dims);
  check_size(slots.numel(), 0, most_rows, "bitmaps: replicas");
  to_slots(slots, groups, buckets);
  return {slots, groups};
}

void aggregate_rows(const at::Tensor& slots, const at::Tensor& groups, const at::Tensor& values,
                    at::IntArrayRef group, at::IntArrayRef counts, const at::Tensor& united,
                    const at::Tensor& united_groups, at::IntArrayRef dims, at::Tensor& out,
                    int64_t /*stream*/) {
  check_one_each(group, counts.size());
  check_dims(dims, counts.size());
  const int64_t* const slot = elements<int64_t>(slots, "slots");
  const float* const from = elements<float>(values, "values");
  const int64_t* const united_slot = elements<int64_t>(united, "united");
  float* const to = writable_elements<float>(out, 0, "out");
  for (size_t b = 0; b < counts.size(); ++b) {
    if (counts[b] == 0) continue;
    const RowGroup own =
        row_group(groups, group[b], group[b] + 1, dims[b], slots.numel(), values.numel());
    const auto bucket = static_cast<int64_t>(b);
    const RowGroup all =
        row_group(united_groups, bucket, bucket + 1, dims[b], united.numel(), out.numel());
    const std::vector<SlotRows<int64_t>> list{{slot + own.begin, from + own.value, own.rows()}};
    const int64_t* const wanted = united_slot + all.begin;
    aggregate_bucket(
        list, [wanted](int64_t j) { return wanted[j]; }, all.rows(), dims[b], to + all.value);
  }
}

void sum_parts(at::TensorList parts, at::Tensor& out, int64_t) {
  OPER_CHECK_VALUE(!parts.empty(), "parts: expected at least one, got none");
  const int64_t size = out.numel();
  float* const to = writable_elements<float>(out, size, "out");
  std::vector<const float*> from;
  for (const at::Tensor& part : parts) {
    from.push_back(elements<float>(part, size, "parts"));
  }
  at::parallel_for(0, size, kFloatsPerTask, [&](int64_t begin, int64_t end) {
    std::vector<const float*> here;
    for (const float* part : from) here.push_back(part + begin);
    sum_buffers(here, end - begin, to + begin);
  });
}

// The numbers of the rows that are not padding, among all rows of all buckets.
at::Tensor touched_rows(const at::Tensor& groups, const at::Tensor& values, at::IntArrayRef dims) {
  check_dims(dims, dims.size());
  const auto buckets = static_cast<int64_t>(dims.size());
  int64_t rows = 0;
  for (int64_t b = 0; b < buckets; ++b)
    rows = std::max(rows, row_group(groups, b, b + 1, dims[b], kMostRows, values.numel()).end);
  const float* const from = elements<float>(values, "values");
  std::vector<uint64_t> bits(words_of(rows), 0);
  for (int64_t b = 0; b < buckets; ++b) {
    const RowGroup of = row_group(groups, b, b + 1, dims[b], kMostRows, values.numel());
    const int64_t dim = dims[b];
    // Tasks of whole words, of which the first and the last may be other buckets' as well.
    at::parallel_for(
        of.begin / 64, words_of(of.end), std::max<int64_t>(kFloatsPerTask / dim / 64, 1),
        [&](int64_t begin, int64_t end) {
          for (int64_t w = begin; w < end; ++w)
            for (int64_t j = std::max(64 * w, of.begin); j < std::min(64 * (w + 1), of.end); ++j)
              bits[w] |= uint64_t{!is_padding(from + of.value + (j - of.begin) * dim, dim)}
                         << (j % 64);
        });
  }
  return std::get<0>(numbers_of(bits.data(), {{nullptr, rows}}, {1}));
}

// Some of all rows of all buckets, by number, ascending.
Rows take_rows(const at::Tensor& slots, const at::Tensor& groups, const at::Tensor& values,
               const at::Tensor& rows, at::IntArrayRef dims) {
  const auto buckets = static_cast<int64_t>(dims.size());
  check_dims(dims, dims.size());
  const int64_t* const slot = elements<int64_t>(slots, "slots");
  const float* const from = elements<float>(values, "values");
  const int64_t* const row = elements<int64_t>(rows, "rows");
  const int64_t taken = rows.numel();
  std::vector<RowGroup> of;
  for (int64_t b = 0; b < buckets; ++b) {
    of.push_back(row_group(groups, b, b + 1, dims[b], slots.numel(), values.numel()));
    OPER_CHECK_VALUE(of[b].begin == (b == 0 ? 0 : of[b - 1].end), "groups: not one after another");
  }
  const int64_t all = buckets == 0 ? 0 : of.back().end;
  bool ascending = taken == 0 || (row[0] >= 0 && row[taken - 1] < all);
  for (int64_t n = 1; n < taken; ++n) ascending &= row[n - 1] < row[n];
  OPER_CHECK_VALUE(ascending, "rows: must ascend from 0 or more to less than ", all);
  at::Tensor taken_slots = at::empty({taken}, at::kLong);
  at::Tensor taken_groups = at::empty({2, buckets + 1}, at::kLong);
  int64_t* const before = taken_groups.mutable_data_ptr<int64_t>();
  before[0] = 0;
  for (int64_t b = 0; b < buckets; ++b)
    before[b + 1] = std::lower_bound(row + before[b], row + taken, of[b].end) - row;
  lay_out(taken_groups, dims);
  at::Tensor taken_values = at::empty({before[2 * buckets + 1]}, at::kFloat);
  int64_t* const to_slot = taken_slots.mutable_data_ptr<int64_t>();
  float* const to = taken_values.mutable_data_ptr<float>();
  for (int64_t b = 0; b < buckets; ++b) {
    const int64_t dim = dims[b], first = before[b], value = before[buckets + 1 + b];
    at::parallel_for(first, before[b + 1], std::max<int64_t>(kFloatsPerTask / dim, 1),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t n = begin; n < end; ++n) {
                         to_slot[n] = slot[row[n]];
                         std::copy_n(from + of[b].value + (row[n] - of[b].begin) * dim, dim,
                                     to + value + (n - first) * dim);
                       }
                     });
  }
  return {taken_slots, taken_groups, taken_values};
}

// A message of one rank: for each bucket the numbers of its replicas as int32, then their
// gradients, in words of 4 bytes without gaps.
int64_t pack_rows(const at::Tensor& slots, const at::Tensor& groups, const at::Tensor& values,
                  at::IntArrayRef group, at::TensorList replicas, at::IntArrayRef counts,
                  at::IntArrayRef dims, at::Tensor& message) {
  const std::vector<Replicas> buckets = replicas_of(replicas, counts);
  check_one_each(group, buckets.size());
  check_dims(dims, buckets.size());
  const int64_t* const slot = elements<int64_t>(slots, "slots");
  const float* const from = elements<float>(values, "values");
  std::vector<RowGroup> of;
  int64_t size = 0;
  for (size_t b = 0; b < buckets.size(); ++b) {
    check_size(buckets[b].count, 0, int64_t{1} << 31, "count that int32 can number");
    of.push_back(buckets[b].count == 0 ? RowGroup{}
                                       : row_group(groups, group[b], group[b] + 1, dims[b],
                                                   slots.numel(), values.numel()));
    size += of[b].rows() * (1 + dims[b]);
  }
  float* to = writable_elements<float>(message, size, "message");
  for (size_t b = 0; b < buckets.size(); ++b) {
    number_group(slot + of[b].begin, of[b].rows(), buckets[b], b, [to](int64_t n, int64_t number) {
      const auto small = static_cast<int32_t>(number);
      std::memcpy(to + n, &small, sizeof(small));
    });
    to += of[b].rows();
    const float* const gradients = from + of[b].value;
    const int64_t count = of[b].rows() * dims[b];
    at::parallel_for(0, count, kFloatsPerTask, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, gradients + begin, (end - begin) * sizeof(float));
    });
    to += count;
  }
  return size;
}

Rows merge_messages(at::TensorList messages, const at::Tensor& counts, at::TensorList replicas,
                    at::IntArrayRef replica_counts, at::IntArrayRef dims) {
  const std::vector<Replicas> of = replicas_of(replicas, replica_counts);
  const size_t buckets = of.size(), ranks = messages.size();
  check_dims(dims, buckets);
  const int64_t* const count =
      elements<int64_t>(counts, static_cast<int64_t>(ranks * buckets), "counts");
  std::vector<SlotRows<int32_t>> lists;  // [ranks, buckets], of numbers
  for (size_t r = 0; r < ranks; ++r) {
    int64_t size = 0;
    for (size_t b = 0; b < buckets; ++b) {
      check_size(count[r * buckets + b], 0, messages[r].numel(), "counts");
      size += count[r * buckets + b] * (1 + dims[b]);
    }
    const float* from = elements_at_least<float>(messages[r], size, "messages");
    for (size_t b = 0; b < buckets; ++b) {
      const int64_t n = count[r * buckets + b];
      lists.push_back({reinterpret_cast<const int32_t*>(from), from + n, n});
      from += n * (1 + dims[b]);
    }
  }
  std::vector<uint64_t> bits(words_of_all(replica_counts), 0);
  uint64_t* of_bucket = bits.data();
  for (size_t b = 0; b < buckets; ++b) {
    for (size_t l = b; l < lists.size(); l += buckets)
      for (int64_t n = 0; n < lists[l].size; ++n) {
        check_index(lists[l].slot[n], of[b].count, "messages: number", "replicas");
        set_bit(lists[l].slot[n], of_bucket);
      }
    of_bucket += words_of(of[b].count);
  }
  auto [slots, groups] = numbers_of(bits.data(), of, dims);
  const int64_t* const before = groups.const_data_ptr<int64_t>();
  const int64_t* const value = before + buckets + 1;
  at::Tensor values = at::empty({value[buckets]}, at::kFloat);
  for (size_t b = 0; b < buckets; ++b) {
    std::vector<SlotRows<int32_t>> of_ranks;
    for (size_t r = 0; r < ranks; ++r) of_ranks.push_back(lists[r * buckets + b]);
    const int64_t* const number = slots.const_data_ptr<int64_t>() + before[b];
    aggregate_bucket(
        of_ranks, [number](int64_t j) { return number[j]; }, before[b + 1] - before[b], dims[b],
        values.mutable_data_ptr<float>() + value[b]);
  }
  to_slots(slots, groups, of);
  return {slots, groups, values};
}

at::Tensor digest_rows(const at::Tensor& rows, int64_t block) {
  OPER_CHECK_VALUE(rows.scalar_type() == at::kByte && rows.dim() == 2 && rows.is_contiguous(),
                   "rows: expected contiguous uint8 [rows, bytes], got ", rows.scalar_type(), " ",
                   rows.sizes());
  OPER_CHECK_VALUE(block > 0, "block: expected at least one row, got ", block);
  const int64_t count = rows.size(0), bytes = rows.size(1);
  block = std::min(block, std::max<int64_t>(count, 1));
  const uint8_t* const from = rows.const_data_ptr<uint8_t>();
  at::Tensor digests = at::empty({(count + block - 1) / block}, at::kLong);
  int64_t* const out = digests.mutable_data_ptr<int64_t>();
  at::parallel_for(0, digests.numel(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t first = n * block, size = std::min(block, count - first) * bytes;
      out[n] = static_cast<int64_t>(digest(from + first * bytes, size, 0));
    }
  });
  return digests;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kMarkReplicas);
  m.def(oper::schemas::kUniteReplicas);
  m.def(oper::schemas::kAggregateRows);
  m.def(oper::schemas::kSumBuffers);
  m.def("touched_rows(Tensor groups, Tensor values, int[] dims) -> Tensor rows");
  m.def(
      "take_rows(Tensor slots, Tensor groups, Tensor values, Tensor rows, int[] dims)"
      " -> (Tensor slots, Tensor groups, Tensor values)");
  m.def(
      "pack_rows(Tensor slots, Tensor groups, Tensor values, int[] group, Tensor[] replicas,"
      " int[] counts, int[] dims, Tensor(a!) message) -> int");
  m.def(
      "merge_messages(Tensor[] messages, Tensor counts, Tensor[] replicas, int[] replica_counts,"
      " int[] dims) -> (Tensor slots, Tensor groups, Tensor values)");
  m.def("digest_rows(Tensor rows, int block) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("mark_replicas", mark_replicas);
  m.impl("unite_replicas", unite_replicas);
  m.impl("aggregate_rows", aggregate_rows);
  m.impl("sum_buffers", sum_parts);
  m.impl("touched_rows", touched_rows);
  m.impl("take_rows", take_rows);
  m.impl("pack_rows", pack_rows);
  m.impl("merge_messages", merge_messages);
  m.impl("digest_rows", digest_rows);
}

}  // namespace oper
