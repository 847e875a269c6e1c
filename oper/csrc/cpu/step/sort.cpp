// torch.ops.oper.sort_accesses and one_per_bag: which accesses of a batch read the same row (§5).
// `stream`, `report` and `bad_ids_too` are a device's (device/sort.cpp).

#include "oper/step/sort.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/common/output_buffers.h"
#include "cpu/step/batch_arguments.h"
#include "cpu/step/row_keys.h"
#include "schemas.h"

namespace oper {
namespace {

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

// Positions, run_start, run_slot and run_count.
using Runs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

// Keys for an access above which counting them all takes longer than sorting the accesses.
constexpr int64_t kKeysPerAccess = 2;

template <typename Access, typename Numbers>
Runs sort(const RowKeys& keys, const Numbers& numbers) {
  const int64_t chunks = keys.chunks();
  const int64_t n = keys.elements;
  const int bits = keys.number_bits;
  const Digits digits = Digits::of(keys.key_bits());
  const int64_t radix = digits.radix(), stride = digits.passes * radix;
  std::vector<uint32_t> counts(chunks * stride);
  const at::Tensor scratch = pooled_tensor(2 * n * sizeof(Access) / sizeof(int64_t), at::kLong);
  auto* from = static_cast<Access*>(scratch.mutable_data_ptr());
  auto* to = from + n;

  with_passes(digits.passes, [&](auto passes) {
    keys.for_each_chunk([&](int64_t chunk, int64_t first, int64_t last) {
      keys.for_each_piece(first, last, [&](const SortedSegment& s, int64_t begin, int64_t end) {
        build_accesses<passes>(keys.addresses, begin, end, keys.base_of(s), bits, digits,
                               numbers.from(begin), from + s.element + begin - s.begin,
                               counts.data() + chunk * stride);
      });
    });
  });
  bool moved = false;
  for (int pass = 0; pass < digits.passes; ++pass) {
    uint32_t* const places = counts.data() + pass * radix;
    // A pass moves elements between chunks, whose counts of it are then of no more use.
    if (moved && chunks > 1) {
      keys.for_each_chunk([&](int64_t chunk, int64_t first, int64_t last) {
        uint32_t* const mine = places + chunk * stride;
        std::fill_n(mine, radix, 0);
        count_digits(from + first, last - first, bits, digits, pass, mine);
      });
    }
    if (places_of_counts(places, chunks, stride, radix, n)) continue;
    keys.for_each_chunk([&](int64_t chunk, int64_t first, int64_t last) {
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
  keys.for_each_chunk([&](int64_t chunk, int64_t first, int64_t last) {
    first_run[chunk + 1] = find_runs(from, first, last, bits, position, found + first);
  });
  std::partial_sum(first_run.begin(), first_run.end(), first_run.begin());
  const int64_t runs = first_run.back();
  at::Tensor run_start = pooled_tensor(runs + 1, at::kInt);
  at::Tensor run_slot = pooled_tensor(runs, at::kLong);
  auto* const start = run_start.mutable_data_ptr<int32_t>();
  auto* const slot = run_slot.mutable_data_ptr<int64_t>();
  keys.for_each_chunk([&](int64_t chunk, int64_t first, int64_t) {
    for (int64_t run = first_run[chunk]; run < first_run[chunk + 1]; ++run) {
      start[run] = found[first + run - first_run[chunk]];
      slot[run] = static_cast<int64_t>(from[start[run]].key(bits));
    }
  });
  start[runs] = static_cast<int32_t>(n);

  at::Tensor run_count = at::empty({keys.buckets * keys.owner_codes() + 1}, at::kLong);
  keys.slots_of_keys(slot, runs, run_count.mutable_data_ptr<int64_t>());
  return {positions, run_start, run_slot, run_count};
}

// The runs, found with a counter for each key in each chunk.
template <typename Numbers>
Runs count(const RowKeys& keys, const Numbers& numbers) {
  const int64_t chunks = keys.chunks(), size = static_cast<int64_t>(keys.keys());
  const at::Tensor scratch = pooled_tensor(chunks * size, at::kInt);
  auto* const counts = reinterpret_cast<uint32_t*>(scratch.mutable_data_ptr());
  // f(counts of the chunk, segment, begin, end) for the pieces of all chunks.
  const auto of_pieces = [&](const auto& f) {
    keys.for_each_chunk([&](int64_t chunk, int64_t first, int64_t last) {
      keys.for_each_piece(first, last, [&](const SortedSegment& s, int64_t begin, int64_t end) {
        f(counts + chunk * size, s, begin, end);
      });
    });
  };
  std::fill_n(counts, chunks * size, 0);
  of_pieces([&](uint32_t* mine, const SortedSegment& s, int64_t begin, int64_t end) {
    count_keys(keys.addresses, begin, end, keys.base_of(s), mine);
  });
  int64_t runs = 0;
  for (int64_t key = 0; key < size; ++key) {
    uint32_t any = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) any |= counts[chunk * size + key];
    runs += any > 0;
  }
  at::Tensor run_start = pooled_tensor(runs + 1, at::kInt);
  // One more than there are: the place after the last is written, and left.
  at::Tensor run_slot = pooled_tensor(runs + 1, at::kLong).narrow(0, 0, runs);
  auto* const slot = run_slot.mutable_data_ptr<int64_t>();
  places_of_keys(counts, chunks, size, run_start.mutable_data_ptr<int32_t>(), slot);
  at::Tensor positions = pooled_tensor(keys.elements, at::kInt);
  auto* const sorted = positions.mutable_data_ptr<int32_t>();
  of_pieces([&](uint32_t* mine, const SortedSegment& s, int64_t begin, int64_t end) {
    place_accesses(keys.addresses, begin, end, keys.base_of(s), mine, numbers.from(begin), sorted);
  });
  at::Tensor run_count = at::empty({keys.buckets * keys.owner_codes() + 1}, at::kLong);
  keys.slots_of_keys(slot, runs, run_count.mutable_data_ptr<int64_t>());
  return {positions, run_start, run_slot, run_count};
}

// Accesses are called by their positions in the result.
struct Positions {
  auto from(int64_t) const {
    return [](int64_t position) { return position; };
  }
};

// Accesses are called by the bag that each is in.
template <typename Offset>
struct Bags {
  const Offset* begins;
  int64_t bags;

  // For positions from `first` on, ascending.
  auto from(int64_t first) const {
    const Offset* end = std::upper_bound(begins, begins + bags, static_cast<Offset>(first));
    return [begins = begins, end](int64_t position) mutable {
      while (position >= static_cast<int64_t>(*end)) ++end;
      return static_cast<int64_t>(end - begins) - 1;
    };
  }
};

template <typename Numbers>
Runs sort_by_row(const RowKeys& keys, const Numbers& numbers) {
  const auto most = static_cast<uint64_t>(kKeysPerAccess * keys.elements / keys.chunks());
  if (keys.elements > 0 && keys.keys() <= most) return count(keys, numbers);
  return keys.key_bits() + keys.number_bits <= 64 ? sort<NarrowAccess>(keys, numbers)
                                                  : sort<WideAccess>(keys, numbers);
}

Runs sort_accesses(const at::Tensor& addresses, const at::Tensor& segment_offset,
                   const at::Tensor& features, int64_t rank, int64_t ranks,
                   at::IntArrayRef bucket_slots, const std::optional<at::Tensor>& offsets,
                   int64_t /*stream*/, const std::optional<at::Tensor>& /*report*/,
                   bool /*bad_ids_too*/) {
  // How many slots a bucket has tells devices what keys there can be; here the addresses say which
  // there are, and shorter keys take fewer passes.
  const auto buckets = static_cast<int64_t>(bucket_slots.size());
  RowKeys keys = row_keys(addresses, segment_offset, features, rank, ranks, buckets);
  if (!offsets) return sort_by_row(keys, Positions{});
  const int64_t bags = offsets->numel() - 1;
  keys.number_bits = std::max(keys.number_bits, bit_width(static_cast<uint64_t>(bags)));
  Runs found;
  with_bag_offsets(*offsets, addresses.numel(), [&](const auto* begins) {
    using Offset = std::remove_const_t<std::remove_pointer_t<decltype(begins)>>;
    OPER_CHECK_VALUE(begins[0] == 0 && begins[bags] == addresses.numel(),
                     "offsets: the bags hold accesses ", begins[0], " to ", begins[bags],
                     ", and there are ", addresses.numel());
    found = sort_by_row(keys, Bags<Offset>{begins, bags});
  });
  return found;
}

bool one_per_bag(const at::Tensor& offsets) {
  OPER_CHECK_VALUE(offsets.dim() == 1, "offsets: expected one dimension, got shape ",
                   offsets.sizes());
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
  m.def(oper::schemas::kSortAccesses);
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("one_per_bag", one_per_bag);
  m.impl("sort_accesses", sort_accesses);
}

}  // namespace oper
