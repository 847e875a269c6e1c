// torch.ops.oper.mark_slots, unite_slots, aggregate_rows, sum_buffers, touched_rows, pack_rows,
// merge_messages, digest_rows: the replicas' gradients, made equal in shape on all ranks and summed
// (OPER, §5.3), and the check that their copies are equal.

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

#include "cpu/common/arguments.h"

namespace oper {
namespace {

// What a thread gets at least: less would not pay for waking it.
constexpr int64_t kFloatsPerTask = 1 << 15;
constexpr int64_t kWordsPerTask = 1 << 12;
// Replicas of a bucket: a bitmap of more takes over 2 GiB, and their rows more than any machine
// has.
constexpr int64_t kMostReplicas = int64_t{1} << 34;

// The words of a bitmap.
uint64_t* words(const at::Tensor& tensor, int64_t size, const char* name) {
  elements<int64_t>(tensor, size, name);
  return static_cast<uint64_t*>(tensor.data_ptr());
}

int64_t words_of_all(at::IntArrayRef rows) {
  int64_t sum = 0;
  for (int64_t r : rows) {
    check_size(r, 0, kMostReplicas, "rows");
    sum += words_of(r);
  }
  return sum;
}

template <typename Slot>
void mark(const std::vector<SlotRows<Slot>>& lists, at::IntArrayRef rows, uint64_t* bits) {
  for (size_t b = 0; b < rows.size(); ++b) {
    for (size_t l = b; l < lists.size(); l += rows.size()) {
      const int64_t bad = set_bits(lists[l].slot, lists[l].size, rows[b], bits);
      TORCH_CHECK_INDEX(bad < 0, "slot ", lists[l].slot[bad], " of bucket ", b, ": it has ",
                        rows[b], " replicas");
    }
    bits += words_of(rows[b]);
  }
}

// The slots of each bucket whose bits are set.
std::vector<at::Tensor> slots_of(const uint64_t* bits, at::IntArrayRef rows) {
  std::vector<at::Tensor> slots;
  for (int64_t r : rows) {
    const int64_t size = words_of(r), tasks = (size + kWordsPerTask - 1) / kWordsPerTask;
    std::vector<int64_t> before(tasks + 1, 0);
    const auto each_task = [&](const auto& f) {
      at::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          f(t, kWordsPerTask * t, std::min(kWordsPerTask, size - kWordsPerTask * t));
      });
    };
    each_task(
        [&](int64_t t, int64_t first, int64_t n) { before[t + 1] = count_bits(bits + first, n); });
    std::partial_sum(before.begin(), before.end(), before.begin());
    slots.push_back(at::empty({before[tasks]}, at::kLong));
    int64_t* const out = slots.back().mutable_data_ptr<int64_t>();
    each_task([&](int64_t t, int64_t first, int64_t n) {
      list_bits(bits + first, n, 64 * first, out + before[t]);
    });
    bits += size;
  }
  return slots;
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
  TORCH_CHECK_VALUE(found == given, "slots: ", given - found,
                    " of them do not ascend or are not in the union");
}

SlotRows<int64_t> slot_rows(const at::Tensor& slots, const at::Tensor& grads) {
  TORCH_CHECK_VALUE(grads.dim() == 2 && grads.size(0) == slots.numel() && grads.size(1) > 0,
                    "grads: [", slots.numel(), ", dim] was needed, and ", grads.sizes(), " given");
  return {elements<int64_t>(slots, "slots"), elements<float>(grads, "grads"), slots.numel()};
}

void mark_slots(at::TensorList slots, at::IntArrayRef rows, at::Tensor& bitmap) {
  TORCH_CHECK_VALUE(slots.size() == rows.size(), "slots: one list a bucket was needed");
  const int64_t size = words_of_all(rows);
  uint64_t* const bits = words(bitmap, size, "bitmap");
  std::fill(bits, bits + size, 0);
  std::vector<SlotRows<int64_t>> lists;
  for (const at::Tensor& s : slots)
    lists.push_back({elements<int64_t>(s, "slots"), nullptr, s.numel()});
  mark(lists, rows, bits);
}

std::vector<at::Tensor> unite_slots(at::TensorList bitmaps, at::IntArrayRef rows) {
  const int64_t size = words_of_all(rows);
  at::Tensor united = at::zeros({size}, at::kLong);
  uint64_t* const bits = words(united, size, "bitmaps");
  for (const at::Tensor& bitmap : bitmaps) {
    const uint64_t* const each = words(bitmap, size, "bitmaps");
    for (int64_t w = 0; w < size; ++w) bits[w] |= each[w];
  }
  const uint64_t* last = bits;
  for (int64_t r : rows) {
    last += words_of(r);
    TORCH_CHECK_INDEX(r % 64 == 0 || last[-1] >> (r % 64) == 0, "bitmaps: a bucket of ", r,
                      " replicas has bits beyond them");
  }
  return slots_of(bits, rows);
}

void aggregate_rows(at::TensorList slots, at::TensorList grads, at::TensorList united,
                    at::IntArrayRef rows, at::Tensor& out) {
  TORCH_CHECK_VALUE(slots.size() == rows.size() && grads.size() == rows.size() &&
                        (united.empty() || united.size() == rows.size()),
                    "slots, grads, united: one tensor a bucket was needed");
  words_of_all(rows);
  int64_t size = 0;
  for (size_t b = 0; b < rows.size(); ++b) {
    slot_rows(slots[b], grads[b]);  // checks that they are [slots, dim]
    const int64_t dim = grads[b].size(1);
    check_size(dim, 1, kMostThings, "grads: dim");
    size += product(united.empty() ? rows[b] : united[b].numel(), dim, "out");
    check_size(size, 0, kMostRows, "out: elements");
  }
  float* to = writable_elements<float>(out, size, "out");
  for (size_t b = 0; b < rows.size(); ++b) {
    const int64_t dim = grads[b].size(-1);
    const std::vector<SlotRows<int64_t>> list{slot_rows(slots[b], grads[b])};
    const int64_t count = united.empty() ? rows[b] : united[b].numel();
    if (united.empty()) {
      aggregate_bucket(list, [](int64_t j) { return j; }, count, dim, to);
    } else {
      const int64_t* const slot = elements<int64_t>(united[b], count, "united");
      aggregate_bucket(list, [slot](int64_t j) { return slot[j]; }, count, dim, to);
    }
    to += count * dim;
  }
}

void sum_parts(at::TensorList parts, at::Tensor& out) {
  TORCH_CHECK_VALUE(!parts.empty(), "parts: at least one was needed");
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

at::Tensor touched_rows(const at::Tensor& rows) {
  TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(1) > 0, "rows: [rows, dim] was needed");
  const int64_t count = rows.size(0), dim = rows.size(1);
  const float* const from = elements<float>(rows, "rows");
  at::Tensor bitmap = at::zeros({words_of(count)}, at::kLong);
  uint64_t* const bits = words(bitmap, bitmap.numel(), "bitmap");
  at::parallel_for(0, bitmap.numel(), std::max<int64_t>(kFloatsPerTask / dim / 64, 1),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t w = begin; w < end; ++w)
                       for (int64_t j = 64 * w; j < std::min(64 * (w + 1), count); ++j)
                         bits[w] |= uint64_t{!is_padding(from + j * dim, dim)} << (j % 64);
                   });
  return slots_of(bits, {count})[0];
}

// A message of one rank: for each bucket its slots as int32, then their gradients, in words of 4
// bytes without gaps.
int64_t pack_rows(at::TensorList slots, at::TensorList grads, at::Tensor& message) {
  TORCH_CHECK_VALUE(slots.size() == grads.size(), "grads: one tensor a bucket was needed");
  int64_t size = 0;
  for (size_t b = 0; b < slots.size(); ++b) size += slots[b].numel() + grads[b].numel();
  float* to = writable_elements<float>(message, size, "message");
  for (size_t b = 0; b < slots.size(); ++b) {
    const SlotRows<int64_t> list = slot_rows(slots[b], grads[b]);
    for (int64_t n = 0; n < list.size; ++n) {
      const auto slot = static_cast<int32_t>(list.slot[n]);
      TORCH_CHECK_INDEX(slot == list.slot[n], "slot ", list.slot[n], ": 2^31 is the most");
      std::memcpy(to + n, &slot, sizeof(slot));
    }
    to += list.size;
    const float* const from = list.row;
    at::parallel_for(0, grads[b].numel(), kFloatsPerTask, [&](int64_t begin, int64_t end) {
      std::memcpy(to + begin, from + begin, (end - begin) * sizeof(float));
    });
    to += grads[b].numel();
  }
  return size;
}

std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>> merge_messages(
    at::TensorList messages, const at::Tensor& counts, at::IntArrayRef rows, at::IntArrayRef dims) {
  const size_t buckets = rows.size(), ranks = messages.size();
  TORCH_CHECK_VALUE(dims.size() == buckets, "dims: one a bucket was needed");
  for (int64_t dim : dims) check_size(dim, 1, kMostThings, "dims");
  const int64_t* const count = elements<int64_t>(counts, ranks * buckets, "counts");
  std::vector<SlotRows<int32_t>> lists;  // [ranks, buckets]
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
  std::vector<uint64_t> bits(words_of_all(rows), 0);
  mark(lists, rows, bits.data());
  std::vector<at::Tensor> slots = slots_of(bits.data(), rows), grads;
  for (size_t b = 0; b < buckets; ++b) {
    std::vector<SlotRows<int32_t>> of_bucket;
    for (size_t r = 0; r < ranks; ++r) of_bucket.push_back(lists[r * buckets + b]);
    const int64_t* const slot = slots[b].const_data_ptr<int64_t>();
    grads.push_back(at::empty({slots[b].numel(), dims[b]}, at::kFloat));
    aggregate_bucket(
        of_bucket, [slot](int64_t j) { return slot[j]; }, slots[b].numel(), dims[b],
        grads.back().mutable_data_ptr<float>());
  }
  return {std::move(slots), std::move(grads)};
}

at::Tensor digest_rows(const at::Tensor& rows, int64_t block) {
  TORCH_CHECK_VALUE(rows.scalar_type() == at::kByte && rows.dim() == 2 && rows.is_contiguous(),
                    "rows: contiguous uint8 [rows, bytes] was needed");
  TORCH_CHECK_VALUE(block > 0, "block: at least one row was needed");
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
  m.def("mark_slots(Tensor[] slots, int[] rows, Tensor(a!) bitmap) -> ()");
  m.def("unite_slots(Tensor[] bitmaps, int[] rows) -> Tensor[]");
  m.def(
      "aggregate_rows(Tensor[] slots, Tensor[] grads, Tensor[] united, int[] rows, Tensor(a!) out)"
      " -> ()");
  m.def("sum_buffers(Tensor[] parts, Tensor(a!) out) -> ()");
  m.def("touched_rows(Tensor rows) -> Tensor");
  m.def("pack_rows(Tensor[] slots, Tensor[] grads, Tensor(a!) message) -> int");
  m.def(
      "merge_messages(Tensor[] messages, Tensor counts, int[] rows, int[] dims)"
      " -> (Tensor[] slots, Tensor[] grads)");
  m.def("digest_rows(Tensor rows, int block) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("mark_slots", mark_slots);
  m.impl("unite_slots", unite_slots);
  m.impl("aggregate_rows", aggregate_rows);
  m.impl("sum_buffers", sum_parts);
  m.impl("touched_rows", touched_rows);
  m.impl("pack_rows", pack_rows);
  m.impl("merge_messages", merge_messages);
  m.impl("digest_rows", digest_rows);
}

}  // namespace oper
