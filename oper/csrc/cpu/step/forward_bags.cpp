// torch.ops.oper.forward_bags, join_bags, add_bags, gather_bags and reused_tensor: a batch whose
// bags read rows of several nodes, taken apart and put together with the bags of others.

#include "oper/step/forward_bags.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/common/output_buffers.h"
#include "cpu/common/parallel.h"
#include "cpu/step/batch_arguments.h"
#include "schemas.h"

namespace oper {
namespace {

constexpr int64_t kBagsPerTask = 1 << 10;
constexpr int64_t kHeaderWords = 2;  // of a feature

// Which node each rank is of, as the kernels take it, and one more for addresses of no rank.
struct DestinationTable {
  std::vector<int32_t> of_rank;
  int32_t own;

  DestinationTable(at::IntArrayRef destination_of, int64_t destinations)
      : own(static_cast<int32_t>(destinations)) {
    const auto ranks = static_cast<int64_t>(destination_of.size());
    check_size(ranks, 0, kMostThings, "destination_of: ranks");
    check_size(destinations, 1, std::max<int64_t>(ranks, 1), "destinations");
    for (const int64_t to : destination_of) {
      OPER_CHECK_INDEX(to >= 0 && to <= destinations, "destination_of: ", to, " is none of ",
                       destinations, ", and not this rank's own node");
      of_rank.push_back(static_cast<int32_t>(to));
    }
    of_rank.push_back(own);
  }

  Destinations view() const { return {of_rank.data(), of_rank.size() - 1, own}; }

  // The ranks of this node, where they follow each other and there is one other node.
  std::optional<OwnRange> own_range() const {
    const auto ranks = of_rank.end() - 1;
    const auto first = std::find(of_rank.begin(), ranks, own);
    const auto last = std::find_if(first, ranks, [&](int32_t to) { return to != own; });
    if (own != 1 || std::find(last, ranks, own) != ranks) return std::nullopt;
    const auto address = [&](auto rank) {
      return static_cast<uint64_t>(make_address(rank - of_rank.begin(), 0));
    };
    return OwnRange{address(first), address(last), address(ranks)};
  }
};

OPER_SIMD std::pair<int64_t, int64_t> count_bags(const Batch& batch, const Feature& feature,
                                                 const OwnRange& own, int32_t* kept) {
  return count_two_nodes(batch, feature, own, kept);
}

void check_codes(at::IntArrayRef places, int64_t slot_bits, int64_t code_words) {
  check_size(slot_bits, 0, kSlotBits, "slot_bits");
  check_size(code_words, 1, 2, "code_words");
  for (const int64_t place : places)
    check_size(place, 0, (int64_t{1} << (62 - slot_bits)) - 1, "places");
}

template <bool kWide, bool kWeighted>
void write_bags(const Batch& batch, const Feature& feature, const Destinations& to,
                const int32_t* kept, const Codes& codes, Parcel* parcels) {
  if (to.own == 1)
    return write_two_nodes<kWide, kWeighted>(batch, feature, to, kept, codes, *parcels);
  write_feature<kWide, kWeighted>(batch, feature, to, kept, codes, parcels);
}

// What a feature forwards.
void write_bags(const Batch& batch, const Feature& feature, const Destinations& to,
                const int32_t* kept, const Codes& codes, Parcel* parcels) {
  const bool wide = codes.words == 2;
  if (batch.weights)
    wide ? write_bags<true, true>(batch, feature, to, kept, codes, parcels)
         : write_bags<false, true>(batch, feature, to, kept, codes, parcels);
  else
    wide ? write_bags<true, false>(batch, feature, to, kept, codes, parcels)
         : write_bags<false, false>(batch, feature, to, kept, codes, parcels);
}

// A batch without rows to read: its accesses and bags, checked, and features that fit them.
Batch bags_of_features(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                       const std::optional<at::Tensor>& weights, const at::Tensor& features) {
  Batch batch{};
  batch.accesses = addresses.numel();
  check_size(batch.accesses, 0, std::numeric_limits<int32_t>::max(), "addresses: accesses");
  batch.addresses = elements<int64_t>(addresses, "addresses");
  if (offsets) {
    with_bag_offsets(*offsets, batch.accesses, [&](const auto* begins) {
      if constexpr (std::is_same_v<decltype(begins), const int32_t*>)
        batch.offsets32 = begins;
      else
        batch.offsets64 = begins;
    });
  }
  if (weights) batch.weights = elements<float>(*weights, batch.accesses, "weights");
  batch.features = structs<Feature>(features, "features");
  batch.feature_count = features.size(0);
  const int64_t bags = bags_of(addresses, offsets);
  for (int64_t f = 0; f < batch.feature_count; ++f) {
    const Feature& feature = batch.features[f];
    OPER_CHECK_VALUE(feature.bags >= 0 && feature.bags <= bags && feature.first_bag >= 0 &&
                         feature.first_bag <= bags - feature.bags,
                     "features: number ", f, " has bags beyond the ", bags, " there are");
  }
  return batch;
}

// f(feature) for each of `count` features, on all threads.
template <typename F>
void for_each_feature(int64_t count, const F& f) {
  share_out(count, [&](const auto& next) {
    for (int64_t n = next(); n >= 0; n = next()) f(n);
  });
}

// The words for each node, the places of its bags' sums in the output, and, of weighted bags, the
// positions of its accesses in the batch; of each bag how many accesses are kept; and of each node
// the bags and accesses of each feature, with which its words begin. Features are in an order that
// all ranks know.
using Parcels = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>,
                           std::vector<at::Tensor>, at::Tensor, at::Tensor>;

Parcels forward_bags(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                     const std::optional<at::Tensor>& weights, const at::Tensor& features,
                     at::IntArrayRef destination_of, int64_t destinations, at::IntArrayRef places,
                     int64_t slot_bits, int64_t code_words, int64_t) {
  const Batch batch = bags_of_features(addresses, offsets, weights, features);
  const DestinationTable table(destination_of, destinations);
  const Destinations to = table.view();
  check_codes(places, slot_bits, code_words);
  std::vector<int64_t> place_of = places.vec();
  place_of.push_back(0);  // of addresses that name no rank
  const Codes codes{place_of.data(), static_cast<int>(slot_bits), static_cast<int>(code_words)};
  OPER_CHECK_VALUE(places.size() == destination_of.size(), "places: expected ",
                   destination_of.size(), ", one per rank, got ", places.size());
  const int64_t count = batch.feature_count;
  at::Tensor kept = at::empty({bags_of(addresses, offsets)}, at::kInt);
  auto* const kept_of = kept.mutable_data_ptr<int32_t>();
  const std::optional<OwnRange> own_range = table.own_range();
  std::vector<Forwarded> found(count);
  for_each_feature(count, [&](int64_t f) {
    if (own_range) {
      const auto [bags, accesses] = count_bags(batch, batch.features[f], *own_range, kept_of);
      found[f] = {{bags, accesses}, {}};
    } else {
      found[f] = count_feature(batch, batch.features[f], to, kept_of);
    }
  });

  std::vector<at::Tensor> all_words, all_places, all_positions;
  std::vector<std::vector<Parcel>> parcels(count, std::vector<Parcel>(destinations));
  at::Tensor counts = at::empty({destinations, kHeaderWords * count}, at::kLong);
  auto* const counted = counts.mutable_data_ptr<int64_t>();
  for (int64_t d = 0; d < destinations; ++d) {
    int64_t bags = 0, accesses = 0;
    for (const Forwarded& of : found) bags += of[d].bags, accesses += of[d].accesses;
    const int64_t of_access = code_words + (weights ? 1 : 0);
    const int64_t size = kHeaderWords * count + bags + of_access * accesses;
    all_words.push_back(at::empty({size}, at::kInt));
    all_places.push_back(at::empty({bags}, at::kLong));
    if (weights) all_positions.push_back(at::empty({accesses}, at::kInt));
    auto* const words = all_words[d].mutable_data_ptr<int32_t>();
    int32_t* const lengths = words + kHeaderWords * count;
    int32_t* const first_code = lengths + bags;
    auto* const first_weight = reinterpret_cast<float*>(first_code + code_words * accesses);
    int64_t bag = 0, access = 0;
    int64_t* const of_node = counted + d * kHeaderWords * count;
    for (int64_t f = 0; f < count; ++f) {
      of_node[f] = found[f][d].bags;
      of_node[count + f] = found[f][d].accesses;
      words[f] = static_cast<int32_t>(of_node[f]);
      words[count + f] = static_cast<int32_t>(of_node[count + f]);
      parcels[f][d] = {lengths + bag, all_places[d].mutable_data_ptr<int64_t>() + bag,
                       first_code + code_words * access, weights ? first_weight + access : nullptr,
                       weights ? all_positions[d].mutable_data_ptr<int32_t>() + access : nullptr};
      bag += found[f][d].bags;
      access += found[f][d].accesses;
    }
  }
  for_each_feature(count, [&](int64_t f) {
    write_bags(batch, batch.features[f], to, kept_of, codes, parcels[f].data());
  });
  return {all_words, all_places, all_positions, kept, counts};
}

// What a client forwarded, of words that came over a network.
struct Received {
  const int32_t* lengths;
  const int32_t* codes;
  const float* weights;
  int64_t bags, accesses;
};

Received received_of(const at::Tensor& words, int64_t features, int64_t code_words, bool weighted) {
  const int32_t* const word =
      elements_at_least<int32_t>(words, kHeaderWords * features, "received");
  int64_t bags = 0, accesses = 0;
  for (int64_t f = 0; f < features; ++f) {
    OPER_CHECK_VALUE(word[f] >= 0 && word[features + f] >= word[f],
                     "received: fewer accesses than bags of feature ", f);
    bags += word[f];
    accesses += word[features + f];
  }
  const int64_t size = kHeaderWords * features + bags + (code_words + weighted) * accesses;
  OPER_CHECK_VALUE(words.numel() == size, "received: ", words.numel(), " words, and ", size,
                   " follow from their first ones");
  const int32_t* const lengths = word + kHeaderWords * features;
  const int32_t* length = lengths;
  for (int64_t f = 0; f < features; ++f) {
    int64_t sum = 0;
    for (int64_t bag = 0; bag < word[f]; ++bag, ++length) {
      OPER_CHECK_VALUE(*length > 0, "received: a bag of ", *length, " accesses");
      sum += *length;
    }
    OPER_CHECK_VALUE(sum == word[features + f], "received: the bags of feature ", f, " have ", sum,
                     " accesses, and ", word[features + f], " came");
  }
  const int32_t* const codes = lengths + bags;
  return {lengths, codes, reinterpret_cast<const float*>(codes + code_words * accesses), bags,
          accesses};
}

// Addresses, offsets of bags, weights if there are any, and of this rank's accesses their positions
// in the batch, if there are weights.
using JoinedBatch = std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>, at::Tensor>;

JoinedBatch join_bags(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                      const std::optional<at::Tensor>& weights, const at::Tensor& features,
                      at::IntArrayRef forwards, at::IntArrayRef destination_of,
                      int64_t destinations, const at::Tensor& kept, at::TensorList received,
                      int64_t forwarded_features, at::IntArrayRef fields, int64_t slot_bits,
                      int64_t code_words, const std::optional<at::Tensor>&, int64_t) {
  const Batch batch = bags_of_features(addresses, offsets, weights, features);
  const DestinationTable table(destination_of, destinations);
  const Destinations to = table.view();
  check_codes({}, slot_bits, code_words);
  const Codes codes{nullptr, static_cast<int>(slot_bits), static_cast<int>(code_words)};
  const int64_t count = batch.feature_count;
  OPER_CHECK_VALUE(static_cast<int64_t>(forwards.size()) == count, "forwards: expected ", count,
                   ", one per feature, got ", forwards.size());
  for (const int64_t number : forwards)
    OPER_CHECK_VALUE(number >= 0, "forwards: ", number, " accesses of a feature");
  const int32_t* const kept_of = elements<int32_t>(kept, bags_of(addresses, offsets), "kept");
  check_size(forwarded_features, 0, kMostThings, "forwarded_features");
  std::vector<Received> parts;
  for (const at::Tensor& words : received)
    parts.push_back(received_of(words, forwarded_features, code_words, weights.has_value()));

  std::vector<int64_t> left;  // of each feature's accesses
  int64_t own = 0, bags = 0;
  for (int64_t f = 0; f < count; ++f) {
    const Feature& feature = batch.features[f];
    const int64_t size =
        batch.first(feature.first_bag + feature.bags) - batch.first(feature.first_bag);
    left.push_back(size - forwards[f]);
    check_size(left[f], 0, size, "forwards: accesses left");
    own += left[f];
    bags += feature.bags;
  }
  int64_t all = own, all_bags = bags;
  for (const Received& part : parts) all += part.accesses, all_bags += part.bags;
  check_size(all, 0, std::numeric_limits<int32_t>::max(), "received: accesses");
  at::Tensor joined = pooled_tensor(all, at::kLong);
  at::Tensor ends = pooled_tensor(all_bags + 1, at::kInt);
  std::optional<at::Tensor> joined_weights;
  if (weights) joined_weights = pooled_tensor(all, at::kFloat);
  at::Tensor positions = at::empty({weights ? own : 0}, at::kInt);
  auto* const address = joined.mutable_data_ptr<int64_t>();
  auto* const offset = ends.mutable_data_ptr<int32_t>();
  auto* const weight = weights ? joined_weights->mutable_data_ptr<float>() : nullptr;
  auto* const position = weights ? positions.mutable_data_ptr<int32_t>() : nullptr;
  offset[0] = 0;

  std::vector<Joined> places;
  int64_t access = 0, bag = 1;
  for (int64_t f = 0; f < count; ++f) {
    places.push_back({address, offset + bag, weight, position, access, access + left[f]});
    access += left[f];
    bag += batch.features[f].bags;
  }
  std::vector<uint8_t> fits(count);
  for_each_feature(count, [&](int64_t f) {
    fits[f] =
        keep_feature(batch, batch.features[f], to, forwards[f] ? kept_of : nullptr, places[f]);
  });
  for (int64_t f = 0; f < count; ++f)
    OPER_CHECK_VALUE(fits[f], "kept: feature ", f, " does not forward ", forwards[f], " accesses");

  const int64_t slots = (int64_t{1} << slot_bits) - 1;
  for (const Received& part : parts) {
    int64_t end = access;
    for (int64_t b = 0; b < part.bags; ++b)
      offset[bag++] = static_cast<int32_t>(end += part.lengths[b]);
    std::atomic<bool> known{true};
    at::parallel_for(0, part.accesses, 16 * kBagsPerTask, [&](int64_t begin, int64_t last) {
      bool all_known = true;
      for (int64_t n = begin; n < last; ++n) {
        const int64_t code = codes.of_words(part.codes + n * code_words);
        const int64_t place = code >> slot_bits;
        const bool is_known = place >= 0 && place < static_cast<int64_t>(fields.size());
        all_known &= is_known;
        address[access + n] = make_address(is_known ? fields[place] : 0, code & slots);
      }
      if (weight) std::copy(part.weights + begin, part.weights + last, weight + access + begin);
      if (!all_known) known = false;
    });
    OPER_CHECK_INDEX(known, "received: a code of none of the ", fields.size(), " ranks here");
    access = end;
  }
  return {joined, ends, joined_weights, positions};
}

// Bags of which there are counts[f] of each feature, one after the other, with dims[f] values each.
struct BagVectors {
  const int64_t* place;
  std::vector<int64_t> first_bag{0}, first_value{0}, dim;

  BagVectors(const at::Tensor& places, at::IntArrayRef counts, at::IntArrayRef dims,
             int64_t elements_there, int64_t values)
      : place(elements<int64_t>(places, "places")),
        dim(dims.vec()) {
    OPER_CHECK_VALUE(counts.size() == dims.size(),
                     "counts, dims: expected equal numbers of them, got ", counts.size(), " and ",
                     dims.size());
    for (size_t f = 0; f < counts.size(); ++f) {
      check_size(counts[f], 0, places.numel() - first_bag.back(), "counts");
      check_size(dims[f], 0, kMostThings, "dims");
      first_bag.push_back(first_bag.back() + counts[f]);
      first_value.push_back(first_value.back() + product(counts[f], dims[f], "counts"));
      for (int64_t b = first_bag[f]; b < first_bag[f + 1]; ++b)
        OPER_CHECK_INDEX(place[b] >= 0 && place[b] <= elements_there - dims[f],
                         "places: ", place[b], " is no place of ", dims[f], " values in ",
                         elements_there);
    }
    OPER_CHECK_VALUE(first_bag.back() == places.numel() && first_value.back() == values,
                     "counts: ", first_bag.back(), " bags of ", first_value.back(),
                     " values, and there are ", places.numel(), " of ", values);
  }

  // f(place, value, dim) for each bag, on all threads.
  template <typename F>
  void for_each(const F& f) const {
    for (size_t n = 0; n < dim.size(); ++n) {
      at::parallel_for(first_bag[n], first_bag[n + 1], kBagsPerTask,
                       [&](int64_t begin, int64_t end) {
                         for (int64_t b = begin; b < end; ++b)
                           f(place[b], first_value[n] + (b - first_bag[n]) * dim[n], dim[n]);
                       });
    }
  }
};

OPER_SIMD void add_vector(const float* from, int64_t dim, float* to) {
#pragma GCC ivdep
  for (int64_t d = 0; d < dim; ++d) to[d] += from[d];
}

void add_bags(at::Tensor& out, const at::Tensor& places, at::IntArrayRef counts,
              at::IntArrayRef dims, const at::Tensor& vectors, int64_t) {
  float* const to = writable_elements<float>(out, 0, "out");
  const float* const from = elements<float>(vectors, "vectors");
  const BagVectors bags(places, counts, dims, out.numel(), vectors.numel());
  bags.for_each([&](int64_t place, int64_t value, int64_t dim) {
    add_vector(from + value, dim, to + place);
  });
}

void gather_bags(const at::Tensor& values, const at::Tensor& places, at::IntArrayRef counts,
                 at::IntArrayRef dims, at::Tensor& vectors, int64_t) {
  const float* const from = elements<float>(values, "values");
  float* const to = writable_elements<float>(vectors, 0, "vectors");
  const BagVectors bags(places, counts, dims, values.numel(), vectors.numel());
  bags.for_each([&](int64_t place, int64_t value, int64_t dim) {
    std::memcpy(to + value, from + place, dim * sizeof(float));
  });
}

// An uninitialised tensor, in memory that is kept from step to step.
at::Tensor reused_tensor(int64_t elements, at::ScalarType dtype) {
  check_size(elements, 0, kMostRows, "elements");
  return pooled_tensor(elements, dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kForwardBags);
  m.def(oper::schemas::kJoinBags);
  m.def(oper::schemas::kAddBags);
  m.def(oper::schemas::kGatherBags);
  m.def("reused_tensor(int elements, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("forward_bags", forward_bags);
  m.impl("join_bags", join_bags);
  m.impl("add_bags", add_bags);
  m.impl("gather_bags", gather_bags);
}

// It takes no tensor from which a backend could be told.
TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) { m.impl("reused_tensor", reused_tensor); }

}  // namespace oper
