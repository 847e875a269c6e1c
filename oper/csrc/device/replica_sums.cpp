// torch.ops.oper.mark_replicas, unite_replicas, aggregate_rows, sum_slice, sum_buffers,
// gather_slices and mark_touched on a device. Rows, gradients, bitmaps and the numbers of them lie
// on the device: the caller vouches for them, and gives the number of rows that there is room for.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"
#include "device/arguments.h"
#include "device/library.h"
#include "device/replica_buckets.h"
#include "oper/step/gradient_layout.h"
#include "schemas.h"

namespace oper {
namespace {

// Bitmaps of all buckets, which kernels read as words.
const uint64_t* words_in(const at::Tensor& bitmap, int64_t size) {
  return reinterpret_cast<const uint64_t*>(elements<int64_t>(bitmap, size, "bitmaps"));
}

void mark_replicas(const at::Tensor& slots, const at::Tensor& before, at::IntArrayRef group,
                   at::TensorList replicas, at::IntArrayRef counts, at::Tensor& bitmap,
                   int64_t stream) {
  const c10::DeviceGuard guard(bitmap.device());
  const std::vector<Replicas> buckets = replicas_of(replicas, counts);
  check_one_each(group, buckets.size());
  MarkArguments a{};
  check_on(slots, bitmap, "slots");
  a.rows = elements<int64_t>(slots, "slots");
  check_on(before, bitmap, "before");
  a.before = elements<int64_t>(before, "before");
  words_in(bitmap, words_of_all(counts));
  a.bitmap = static_cast<unsigned long long*>(bitmap.mutable_data_ptr());
  for (const at::Tensor& of_bucket : replicas)
    if (of_bucket.numel() > 0) check_on(of_bucket, bitmap, "replicas");
  bitmap.zero_();
  each_launch(buckets, [&](int64_t first, int64_t word) {
    set_buckets(a, buckets, first, word);
    for (int64_t b = 0; b < a.buckets; ++b) {
      a.group[b] = group[first + b];
      if (a.count[b] > 0) check_index(a.group[b], before.numel() - 1, "group", "groups");
    }
    check_device(device_library().mark_replicas(&a, slots.numel(), stream_of(stream)),
                 "replicas could not be marked");
  });
}

// Slots [most_rows], and groups, whose gradients begin at a line for each bucket: elsewhere than on
// the processor, where nothing lies between them.
std::tuple<at::Tensor, at::Tensor> unite_replicas(at::TensorList bitmaps, at::TensorList replicas,
                                                  at::IntArrayRef counts, at::IntArrayRef dims,
                                                  int64_t most_rows, int64_t stream) {
  const std::vector<Replicas> buckets = replicas_of(replicas, counts);
  check_one_each(dims, buckets.size());
  const auto all = static_cast<int64_t>(buckets.size());
  check_size(all, 0, kMostBuckets, "counts: buckets");
  check_size(most_rows, 0, INT32_MAX, "most_rows");
  UnionArguments a{};
  a.ranks = static_cast<int64_t>(bitmaps.size());
  check_size(a.ranks, 1, kMostLists, "bitmaps");
  const c10::DeviceGuard guard(bitmaps[0].device());
  a.words = words_of_all(counts);
  for (int64_t rank = 0; rank < a.ranks; ++rank) {
    check_on(bitmaps[rank], bitmaps[0], "bitmaps");
    a.bitmaps[rank] = words_in(bitmaps[rank], a.words);
  }
  const auto wide = bitmaps[0].options();
  const at::Tensor united = at::empty({a.words}, wide);
  const at::Tensor in_tile = at::empty({a.words}, wide.dtype(at::kInt));
  const at::Tensor tile_begin = at::empty({(a.words + kTileWords - 1) / kTileWords + 1}, wide);
  a.united = static_cast<uint64_t*>(united.mutable_data_ptr());
  a.in_tile = in_tile.mutable_data_ptr<int32_t>();
  a.tile_begin = tile_begin.mutable_data_ptr<int64_t>();
  check_device(device_library().unite_words(&a, stream_of(stream)),
               "touched replicas could not be united");
  at::Tensor slots = at::empty({most_rows}, wide), groups = at::empty({2, all + 1}, wide);
  const at::Tensor before = at::zeros({all + 1}, wide);
  BucketDims layout{all, 1, {}};
  ListArguments list{};
  list.united = a.united;
  list.in_tile = a.in_tile;
  list.tile_begin = a.tile_begin;
  list.words = a.words;
  list.rows = slots.mutable_data_ptr<int64_t>();
  each_launch(buckets, [&](int64_t first, int64_t word) {
    set_buckets(list, buckets, first, word);
    list.before = before.mutable_data_ptr<int64_t>() + first;
    check_device(device_library().list_replicas(&list, stream_of(stream)),
                 "touched replicas could not be listed");
  });
  for (int64_t b = 0; b < all; ++b) {
    check_size(dims[b], 1, kMostThings, "dims");
    layout.dim[b] = static_cast<int32_t>(dims[b]);
  }
  if (all == 0) groups.zero_();
  if (all > 0)
    check_device(
        device_library().lay_out_gradients(&layout, before.const_data_ptr<int64_t>(),
                                           groups.mutable_data_ptr<int64_t>(), stream_of(stream)),
        "touched replicas could not be laid out");
  return {slots, groups};
}

void aggregate_rows(const at::Tensor& slots, const at::Tensor& groups, const at::Tensor& values,
                    at::IntArrayRef group, at::IntArrayRef counts, const at::Tensor& united,
                    const at::Tensor& united_groups, at::IntArrayRef dims, at::Tensor& out,
                    int64_t stream) {
  const c10::DeviceGuard guard(out.device());
  check_one_each(group, counts.size());
  check_one_each(dims, counts.size());
  check_on({{slots, "slots"},
            {groups, "groups"},
            {values, "values"},
            {united, "united"},
            {united_groups, "united_groups"}},
           out);
  const int64_t* const own = lines_of(groups, "groups");
  const int64_t* const all = lines_of(united_groups, counts.size(), "united_groups");
  const int64_t own_groups = groups.size(1) - 1, buckets = united_groups.size(1) - 1;
  check_size(slots.numel(), 0, INT32_MAX, "slots: elements");
  check_size(united.numel(), 0, INT32_MAX, "united: elements");
  const int64_t* const slot = elements<int64_t>(slots, "slots");
  const float* const value = elements<float>(values, "values");
  const int64_t* const united_slot = elements<int64_t>(united, "united");
  float* const to = writable_elements<float>(out, 0, "out");
  AggregateArguments a{};
  a.out = to;
  const auto start = [&] {
    check_device(device_library().aggregate_rows(&a, united.numel(), stream_of(stream)),
                 "gradients of replicas could not be aggregated");
    a.buckets = 0;
  };
  for (int64_t b = 0; b < buckets; ++b) {
    if (counts[b] == 0) continue;
    check_index(group[b], own_groups, "group", "groups");
    check_size(dims[b], 1, kMostThings, "dims");
    const int64_t* const before = own + group[b];
    a.own[a.buckets] = {slot, value, before, before + own_groups + 1};
    a.united[a.buckets] = {united_slot, to, all + b, all + b + buckets + 1};
    a.dim[a.buckets] = dims[b];
    a.wide[a.buckets] = dims[b] % 4 == 0 && is_wide(value) && is_wide(to);
    a.lanes[a.buckets] = lanes_for(a.wide[a.buckets] ? dims[b] / 4 : dims[b]);
    if (++a.buckets == kMostReplicaBuckets) start();
  }
  start();
}

// Buffers of the ranks, as long as `out`, of values that end where `groups` do.
SliceArguments slices_of(at::TensorList parts, const at::Tensor& groups, at::Tensor& out) {
  const int64_t* const lines = lines_of(groups, "groups");
  check_on(groups, out, "groups");
  SliceArguments a{};
  a.ranks = static_cast<int64_t>(parts.size());
  check_size(a.ranks, 1, kMostLists, "parts");
  a.groups = lines;
  a.buckets = groups.size(1) - 1;
  a.out = writable_elements<float>(out, 0, "out");
  OPER_CHECK_VALUE(out.numel() % kLineValues == 0 && is_wide(a.out),
                   "out: expected whole aligned lines of ", kLineValues, " values, got ",
                   out.numel(), " values");
  for (int64_t r = 0; r < a.ranks; ++r) {
    check_on(parts[r], out, "parts");
    a.parts[r] = elements<float>(parts[r], out.numel(), "parts");
    OPER_CHECK_VALUE(is_wide(a.parts[r]), "parts: must begin at multiples of 16 bytes");
  }
  return a;
}

// Adds slice `rank` of the ranks' buffers, into its place in `out`; what a step reads of others'
// buffers is added to `read`, bytes.
void sum_slice(at::TensorList parts, const at::Tensor& groups, const at::Tensor& dims, int64_t rank,
               at::Tensor& out, at::Tensor& read, int64_t stream) {
  const c10::DeviceGuard guard(out.device());
  SliceArguments a = slices_of(parts, groups, out);
  check_index(rank, a.ranks, "rank", "ranks");
  a.rank = rank;
  check_on(dims, out, "dims");
  a.dims = elements<int64_t>(dims, a.buckets, "dims");
  check_on(read, out, "read");
  a.read = writable_elements<int64_t>(read, 1, "read");
  check_device(device_library().sum_slice(&a, out.numel(), stream_of(stream)),
               "the replicas' gradients could not be summed");
}

// Copies each rank's slice from its buffer to its place in `out`.
void gather_slices(at::TensorList parts, const at::Tensor& groups, at::Tensor& out,
                   int64_t stream) {
  const c10::DeviceGuard guard(out.device());
  const SliceArguments a = slices_of(parts, groups, out);
  check_device(device_library().gather_slices(&a, out.numel(), stream_of(stream)),
               "the replicas' sums could not be gathered");
}

// Marks the replicas of a sum of all of them that any rank touched.
void mark_touched(const at::Tensor& values, const at::Tensor& groups, at::IntArrayRef counts,
                  at::IntArrayRef dims, at::Tensor& bitmap, int64_t stream) {
  const c10::DeviceGuard guard(bitmap.device());
  std::vector<Replicas> buckets;
  for (const int64_t count : counts) buckets.push_back({nullptr, count});
  check_one_each(dims, buckets.size());
  check_on(values, bitmap, "values");
  check_on(groups, bitmap, "groups");
  TouchedArguments a{};
  a.values = elements<float>(values, "values");
  a.groups = lines_of(groups, buckets.size(), "groups");
  a.all = static_cast<int64_t>(buckets.size());
  words_in(bitmap, words_of_all(counts));
  a.bitmap = static_cast<unsigned long long*>(bitmap.mutable_data_ptr());
  bitmap.zero_();
  each_launch(buckets, [&](int64_t first, int64_t word) {
    set_buckets(a, buckets, first, word);
    a.first = first;
    for (int64_t b = 0; b < a.buckets; ++b) {
      check_size(dims[first + b], 1, kMostThings, "dims");
      a.dim[b] = dims[first + b];
    }
    check_device(device_library().mark_touched(&a, stream_of(stream)),
                 "touched replicas could not be marked");
  });
}

void sum_buffers(at::TensorList parts, at::Tensor& out, int64_t stream) {
  const c10::DeviceGuard guard(out.device());
  BufferArguments a{};
  a.count = static_cast<int64_t>(parts.size());
  check_size(a.count, 1, kMostLists, "parts");
  a.values = out.numel();
  a.out = writable_elements<float>(out, 0, "out");
  for (int64_t n = 0; n < a.count; ++n) {
    check_on(parts[n], out, "parts");
    a.parts[n] = elements<float>(parts[n], a.values, "parts");
  }
  if (a.values > 0)
    check_device(device_library().sum_buffers(&a, stream_of(stream)),
                 "a sum of buffers could not be started");
}

}  // namespace
}  // namespace oper

// The processor has other operators instead: it knows sizes, so slices are views for sum_buffers,
// and touched_rows lists the rows.
TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kSumSlice);
  m.def(oper::schemas::kGatherSlices);
  m.def(oper::schemas::kMarkTouched);
}
TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("mark_replicas", oper::mark_replicas);
  m.impl("unite_replicas", oper::unite_replicas);
  m.impl("aggregate_rows", oper::aggregate_rows);
  m.impl("sum_slice", oper::sum_slice);
  m.impl("sum_buffers", oper::sum_buffers);
  m.impl("gather_slices", oper::gather_slices);
  m.impl("mark_touched", oper::mark_touched);
}

// The same for tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(oper::schemas::kMarkReplicas);
  m.def(oper::schemas::kUniteReplicas);
  m.def(oper::schemas::kAggregateRows);
  m.def(oper::schemas::kSumSlice);
  m.def(oper::schemas::kSumBuffers);
  m.def(oper::schemas::kGatherSlices);
  m.def(oper::schemas::kMarkTouched);
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("mark_replicas", oper::mark_replicas);
  m.impl("unite_replicas", oper::unite_replicas);
  m.impl("aggregate_rows", oper::aggregate_rows);
  m.impl("sum_slice", oper::sum_slice);
  m.impl("sum_buffers", oper::sum_buffers);
  m.impl("gather_slices", oper::gather_slices);
  m.impl("mark_touched", oper::mark_touched);
}
