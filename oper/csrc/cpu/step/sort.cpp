// torch.ops.oper.sort_accesses and one_per_bag: which accesses of a batch read the same row (§5).

#include "oper/step/sort.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/common/output_buffers.h"
#include "cpu/step/feature_accesses.h"
#include "oper/common/bits.h"

namespace oper {
namespace {

constexpr int64_t kAccessesPerChunk = 1 << 15;

// What the sort is of: segments of accesses, and the key space of their rows.
struct SortTask {
  const int64_t* addresses;
  std::vector<SortedSegment> segments;
  int64_t elements = 0;
  int64_t rank, ranks, buckets;
  int position_bits = 0;
  std::vector<uint64_t> first_key;  // of each bucket and owner code, and the end
  std::vector<uint64_t> base;       // the same of each bucket and field code

  int64_t owner_codes() const { return ranks + 1; }
  int64_t field_codes() const { return ranks + 2; }
  int key_bits() const { return bit_width(std::max<uint64_t>(first_key.back(), 1) - 1); }

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
};

// f(chunk, first, last) on all threads.
template <typename F>
void for_each_chunk(int64_t chunks, int64_t elements, const F& f) {
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      f(chunk, elements * chunk / chunks, elements * (chunk + 1) / chunks);
  });
}

SortTask sort_task(const at::Tensor& addresses, const at::Tensor& segment_offset,
                   const at::Tensor& features, int64_t rank, int64_t ranks, int64_t buckets) {
  check_size(ranks, 1, kMostThings, "ranks");
  check_size(rank, 0, ranks - 1, "rank");
  check_size(buckets, 0, kMostThings / ranks, "buckets");
  TORCH_CHECK_VALUE(addresses.numel() <= std::numeric_limits<int32_t>::max(),
                    "addresses: ", addresses.numel(),
                    " accesses in a batch, and positions are of 32 bits");
  SortTask task;
  task.addresses = elements<int64_t>(addresses, "addresses");
  task.rank = rank;
  task.ranks = ranks;
  task.buckets = buckets;
  task.position_bits = bit_width(static_cast<uint64_t>(addresses.numel()));
  const Features view = features_of(features, segment_offset);
  TORCH_CHECK_VALUE(view.accesses() == addresses.numel(), "segment_offset: ends at ",
                    view.accesses(), ", and there are ", addresses.numel(), " addresses");
  for (int64_t f = 0; f < view.count; ++f) {
    const int64_t begin = view.begin(f), end = view.end(f);
    if (!view[f].has_gradient || begin == end) continue;
    TORCH_CHECK_INDEX(view[f].bucket >= 0 && view[f].bucket < buckets, "features: bucket ",
                      view[f].bucket, " of feature ", f, " is none of ", buckets);
    task.segments.push_back({begin, end, task.elements, view[f].bucket});
    task.elements += end - begin;
  }
  return task;
}

OPER_SIMD void extend_by(const int64_t* addresses, int64_t size, Extent& extent) {
  extend(addresses, size, extent);
}

// Lays out the key space: a bucket's replicas, then its rows at each rank.
void number_rows(SortTask& task, int64_t chunks) {
  std::vector<Extent> found(chunks * task.buckets);
  for_each_chunk(chunks, task.elements, [&](int64_t chunk, int64_t first, int64_t last) {
    task.for_each_piece(first, last, [&](const SortedSegment& s, int64_t begin, int64_t end) {
      extend_by(task.addresses + begin, end - begin, found[chunk * task.buckets + s.bucket]);
    });
  });
  uint64_t key = 0;
  for (int64_t bucket = 0; bucket < task.buckets; ++bucket) {
    int64_t slots = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const Extent& extent = found[chunk * task.buckets + bucket];
      TORCH_CHECK_INDEX(extent.field_code < static_cast<uint64_t>(task.field_codes()),
                        "addresses: one of bucket ", bucket, " names none of ", task.ranks,
                        " ranks");
      slots = std::max(slots, extent.slot + 1);
    }
    for (int64_t code = 0; code < task.owner_codes(); ++code) {
      task.first_key.push_back(key);
      TORCH_CHECK_VALUE(!__builtin_add_overflow(key, static_cast<uint64_t>(slots), &key),
                        "addresses: of more rows than 64 bits tell apart");
    }
    const auto first = task.first_key.end() - task.owner_codes();
    task.base.push_back(first[0]);
    task.base.push_back(first[1 + task.rank]);
    task.base.insert(task.base.end(), first + 1, task.first_key.end());
  }
  task.first_key.push_back(key);
}

// f(constant) with the number of passes as a constant.
template <typename F>
void with_passes(int passes, const F& f) {
  switch (passes) {
    case 0: return f(std::integral_constant<int, 0>{});
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    default: return f(std::integral_constant<int, 5>{});
  }
}

using Runs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <typename Access>
Runs sort(const SortTask& task, int64_t chunks) {
  const int64_t n = task.elements;
  const int bits = task.position_bits;
  const Digits digits = Digits::of(task.key_bits());
  const int64_t radix = digits.radix(), stride = digits.passes * radix;
  std::vector<uint32_t> counts(chunks * stride);
  const at::Tensor scratch = pooled_tensor(2 * n * sizeof(Access) / sizeof(int64_t), at::kLong);
  auto* from = static_cast<Access*>(scratch.mutable_data_ptr());
  auto* to = from + n;

  with_passes(digits.passes, [&](auto passes) {
    for_each_chunk(chunks, n, [&](int64_t chunk, int64_t first, int64_t last) {
      task.for_each_piece(first, last, [&](const SortedSegment& s, int64_t begin, int64_t end) {
        build_accesses<passes>(task.addresses, begin, end,
                               task.base.data() + s.bucket * task.field_codes(), bits, digits,
                               from + s.element + begin - s.begin, counts.data() + chunk * stride);
      });
    });
  });
  bool moved = false;
  for (int pass = 0; pass < digits.passes; ++pass) {
    uint32_t* const places = counts.data() + pass * radix;
    // A pass moves elements between chunks, whose counts of it are then of no more use.
    if (moved && chunks > 1) {
      for_each_chunk(chunks, n, [&](int64_t chunk, int64_t first, int64_t last) {
        uint32_t* const mine = places + chunk * stride;
        std::fill_n(mine, radix, 0);
        count_digits(from + first, last - first, bits, digits, pass, mine);
      });
    }
    if (places_of_counts(places, chunks, stride, radix, n)) continue;
    for_each_chunk(chunks, n, [&](int64_t chunk, int64_t first, int64_t last) {
      scatter_pass(from + first, last - first, bits, digits, pass, places + chunk * stride, to);
    });
    std::swap(from, to);
    moved = true;
  }

  // The other half of the scratch is free for where runs start, until their number is known.
  auto* const found = reinterpret_cast<int32_t*>(to);
  std::vector<int64_t> first_run(chunks + 1);
  at::Tensor positions = pooled_tensor(n, at::kInt);
  auto* const position = positions.mutable_data_ptr<int32_t>();
  for_each_chunk(chunks, n, [&](int64_t chunk, int64_t first, int64_t last) {
    first_run[chunk + 1] = find_runs(from, first, last, bits, position, found + first);
  });
  std::partial_sum(first_run.begin(), first_run.end(), first_run.begin());
  const int64_t runs = first_run.back();
  at::Tensor run_start = pooled_tensor(runs + 1, at::kInt);
  at::Tensor run_slot = pooled_tensor(runs, at::kLong);
  auto* const start = run_start.mutable_data_ptr<int32_t>();
  auto* const slot = run_slot.mutable_data_ptr<int64_t>();
  for_each_chunk(chunks, n, [&](int64_t chunk, int64_t first, int64_t) {
    for (int64_t run = first_run[chunk]; run < first_run[chunk + 1]; ++run) {
      start[run] = found[first + run - first_run[chunk]];
      slot[run] = static_cast<int64_t>(from[start[run]].key(bits));
    }
  });
  start[runs] = static_cast<int32_t>(n);

  // Keys ascend: those of a bucket and owner code are a range, and become slots in it.
  at::Tensor run_count = at::empty({task.buckets * task.owner_codes() + 1}, at::kLong);
  auto* const count = run_count.mutable_data_ptr<int64_t>();
  count[0] = 0;
  for (int64_t c = 0; c < task.buckets * task.owner_codes(); ++c) {
    const auto first = static_cast<int64_t>(task.first_key[c]);
    const auto last = static_cast<int64_t>(task.first_key[c + 1]);
    count[c + 1] = std::lower_bound(slot + count[c], slot + runs, last) - slot;
    for (int64_t run = count[c]; run < count[c + 1]; ++run) slot[run] -= first;
  }
  return {positions, run_start, run_slot, run_count};
}

Runs sort_accesses(const at::Tensor& addresses, const at::Tensor& segment_offset,
                   const at::Tensor& features, int64_t rank, int64_t ranks, int64_t buckets) {
  SortTask task = sort_task(addresses, segment_offset, features, rank, ranks, buckets);
  const int64_t chunks =
      std::clamp<int64_t>(task.elements / kAccessesPerChunk, 1, at::get_num_threads());
  number_rows(task, chunks);
  return task.key_bits() + task.position_bits <= 64 ? sort<NarrowAccess>(task, chunks)
                                                    : sort<WideAccess>(task, chunks);
}

bool one_per_bag(const at::Tensor& offsets) {
  TORCH_CHECK_VALUE(offsets.dim() == 1, "offsets: one dimension was needed");
  return with_index_type(offsets.scalar_type(), "offsets", [&](auto zero) {
    using Offset = decltype(zero);
    const auto* const at = elements<Offset>(offsets, "offsets");
    constexpr int64_t kBlock = 1024;
    for (int64_t begin = 0; begin < offsets.numel(); begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, offsets.numel());
      Offset differ = 0;
      for (int64_t n = begin; n < end; ++n) differ |= at[n] ^ static_cast<Offset>(n);
      if (differ) return false;
    }
    return true;
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("one_per_bag(Tensor offsets) -> bool");
  m.set_python_module("oper.runtime.step.sort");  // the shapes, which depend on data
  m.def(
      "sort_accesses(Tensor addresses, Tensor segment_offset, Tensor features,"
      " int rank, int ranks, int buckets)"
      " -> (Tensor positions, Tensor run_start, Tensor run_slot, Tensor run_count)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("one_per_bag", one_per_bag);
  m.impl("sort_accesses", sort_accesses);
}

}  // namespace oper
