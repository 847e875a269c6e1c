// torch.ops.oper.forward_bags, join_bags, add_bags and gather_bags on a device. Descriptors of
// features, and all lists, are the host's, which waits once where it forwards bags: for how many go
// to each node. How many came, join_bags is told.

#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/step/batch_arguments.h"
#include "device/arguments.h"
#include "device/library.h"
#include "device/sort.h"
#include "oper/common/bits.h"
#include "oper/plan/address.h"
#include "schemas.h"

namespace oper {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();  // of what positions count
constexpr int64_t kHeads = 2;                                   // words of a feature

GivenBags given_bags(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                     const std::optional<at::Tensor>& weights) {
  GivenBags given{};
  given.addresses = elements<int64_t>(addresses, "addresses");
  given.accesses = addresses.numel();
  given.bags = bags_of(addresses, offsets);
  check_size(given.accesses, 0, kMost, "addresses");
  check_size(given.bags, 0, kMost, "offsets: bags");
  if (offsets) {
    check_on(*offsets, addresses, "offsets");
    set_offsets(*offsets, given);
  }
  if (weights) {
    check_on(*weights, addresses, "weights");
    given.weighted = 1;
    given.weights = elements<float>(*weights, given.accesses, "weights");
  }
  return given;
}

const Feature* features_of(const at::Tensor& features, int64_t bags) {
  const auto* const found = structs<Feature>(features, "features");
  for (int64_t f = 0; f < features.size(0); ++f)
    OPER_CHECK_VALUE(found[f].bags >= 0 && found[f].bags <= bags && found[f].first_bag >= 0 &&
                         found[f].first_bag <= bags - found[f].bags,
                     "features: number ", f, " has bags beyond the ", bags, " there are");
  return found;
}

// The node of each rank, and of addresses that name none.
std::vector<int64_t> nodes_of(at::IntArrayRef destination_of, int64_t destinations) {
  const auto ranks = static_cast<int64_t>(destination_of.size());
  check_size(ranks, 0, kMostThings, "destination_of: ranks");
  check_size(destinations, 1, std::max<int64_t>(ranks, 1), "destinations");
  std::vector<int64_t> node = destination_of.vec();
  for (const int64_t to : node) check_index(to, destinations + 1, "destination_of", "nodes");
  node.push_back(destinations);
  return node;
}

void check_codes(int64_t slot_bits, int64_t code_words) {
  check_size(slot_bits, 0, kSlotBits, "slot_bits");
  check_size(code_words, 1, 2, "code_words");
}

// The bags from which on a feature's are, and which it is; −1 for bags of none.
std::map<int64_t, int64_t> bounds_of(const Feature* features, int64_t count) {
  std::map<int64_t, int64_t> found;
  for (int64_t f = 0; f < count; ++f) {
    if (features[f].bags == 0) continue;
    found[features[f].first_bag] = f;
    found.try_emplace(features[f].first_bag + features[f].bags, -1);
  }
  found.try_emplace(0, -1);
  return found;
}

// Which accesses go to which node: sorted, with how many there are of each group on the device.
struct Forwarded {
  WordSort sort;
  at::Tensor counts;
};

Forwarded sort_forwarded(ForwardArguments& a, const at::TensorOptions& words, void* stream) {
  const int64_t accesses = a.given.accesses;
  a.layout.groups = a.nodes.others * a.features;
  a.layout.slot_bits = bits_for(a.given.bags);
  a.layout.number_bits = bits_for(accesses);
  const bool beside = a.layout.key_bits() + a.layout.number_bits > 64;
  if (beside) a.layout.number_bits = 0;
  WordSort sort(accesses, a.layout, beside, words);
  a.words = sort.words();
  a.numbers = sort.numbers();
  check_device(device_library().list_forwarded(&a, stream), "forwarding could not be started");
  sort.run(stream);
  at::Tensor counts = at::empty({2, a.layout.groups + 1}, words);
  check_device(
      device_library().count_forwarded(sort.before().const_data_ptr<int64_t>(),
                                       sort.run_start().const_data_ptr<int32_t>(), a.layout.groups,
                                       counts.mutable_data_ptr<int64_t>(), stream),
      "counting bags could not be started");
  return {sort, counts};
}

// The words for each node, the places of its bags' sums, the positions of weighted accesses; how
// many accesses each bag keeps; and of each node the bags and accesses of each feature, on the
// host.
using Parcels = std::tuple<std::vector<at::Tensor>, std::vector<at::Tensor>,
                           std::vector<at::Tensor>, at::Tensor, at::Tensor>;

Parcels forward_bags(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                     const std::optional<at::Tensor>& weights, const at::Tensor& features,
                     at::IntArrayRef destination_of, int64_t destinations, at::IntArrayRef places,
                     int64_t slot_bits, int64_t code_words, int64_t stream) {
  const c10::DeviceGuard guard(addresses.device());
  auto* const on = reinterpret_cast<void*>(stream);
  ForwardArguments a{};
  a.given = given_bags(addresses, offsets, weights);
  const Feature* const feature = features_of(features, a.given.bags);
  const int64_t count = features.size(0), accesses = a.given.accesses;
  check_size(count, 0, kMostThings / std::max<int64_t>(destinations, 1), "features");
  const std::vector<int64_t> node = nodes_of(destination_of, destinations);
  check_codes(slot_bits, code_words);
  OPER_CHECK_VALUE(places.size() == destination_of.size(), "places: expected ",
                   destination_of.size(), ", one per rank, got ", places.size());
  std::vector<int64_t> code, bound, feature_from, base, stride;
  for (const int64_t place : places) {
    check_size(place, 0, (int64_t{1} << (62 - slot_bits)) - 1, "places");
    code.push_back(place << slot_bits);
  }
  code.push_back(0);
  for (const auto& [first, of] : bounds_of(feature, count)) {
    bound.push_back(first);
    feature_from.push_back(of);
  }
  for (int64_t f = 0; f < count; ++f) {
    base.push_back(feature[f].out(-feature[f].first_bag));
    stride.push_back(feature[f].out_stride);
  }
  const auto words = addresses.options(), numbers = words.dtype(at::kInt);
  const at::Tensor listed = brought({node, code, bound, feature_from, base, stride}, words, stream);
  a.nodes = {listed.const_data_ptr<int64_t>(), static_cast<int64_t>(node.size()) - 1, destinations};
  const int64_t* const codes_there = a.nodes.node + node.size();
  a.bounds = codes_there + code.size();
  a.bound_count = static_cast<int64_t>(bound.size());
  a.feature_from = a.bounds + bound.size();
  const int64_t* const base_there = a.feature_from + bound.size();
  a.features = count;
  at::Tensor kept = at::empty({a.given.bags}, numbers);
  a.kept = kept.mutable_data_ptr<int32_t>();

  const int64_t groups = destinations * count, head = kHeads * count;
  std::optional<Forwarded> forwarded;
  at::Tensor counts = at::zeros({2, groups + 1}, at::kLong);
  if (accesses > 0 && groups > 0) {
    forwarded = sort_forwarded(a, words, on);
    counts = forwarded->counts.cpu();  // the host waits
  } else {
    kept.zero_();
  }
  const auto* const before = counts.const_data_ptr<int64_t>();  // each group, bags and accesses
  const int64_t* const accesses_before = before + groups + 1;
  at::Tensor of_nodes = at::empty({destinations, head}, at::kLong);
  auto* of_node = of_nodes.mutable_data_ptr<int64_t>();
  std::vector<at::Tensor> all_words, all_places, all_positions;
  std::vector<int64_t> parcels;
  for (int64_t d = 0; d < destinations; ++d) {
    const int64_t first = d * count, last = first + count;
    for (const int64_t* of : {before, accesses_before})
      for (int64_t g = first; g < last; ++g) *of_node++ = of[g + 1] - of[g];
    const int64_t bags = before[last] - before[first];
    const int64_t size = accesses_before[last] - accesses_before[first];
    const int64_t of_access = code_words + (weights ? 1 : 0);
    all_words.push_back(at::empty({head + bags + of_access * size}, numbers));
    all_places.push_back(at::empty({bags}, words));
    if (weights) all_positions.push_back(at::empty({size}, numbers));
    const NodeParcel parcel{all_words[d].mutable_data_ptr<int32_t>(),
                            all_places[d].mutable_data_ptr<int64_t>(),
                            weights ? all_positions[d].mutable_data_ptr<int32_t>() : nullptr,
                            before[first],
                            bags,
                            accesses_before[first],
                            size};
    append_words(parcels, parcel);
  }
  if (!forwarded) {
    for (const at::Tensor& of : all_words) of.zero_();  // heads
    return {all_words, all_places, all_positions, kept, of_nodes};
  }
  const at::Tensor parcels_there = brought({parcels}, words, stream);
  ParcelArguments p{};
  p.given = a.given;
  p.nodes = a.nodes;
  p.code = codes_there;
  p.code_words = code_words;
  p.base = base_there;
  p.stride = base_there + count;
  p.features = count;
  p.layout = a.layout;
  p.words = static_cast<const uint64_t*>(forwarded->sort.sorted_words().const_data_ptr());
  p.positions = forwarded->sort.positions().const_data_ptr<int32_t>();
  p.run_start = forwarded->sort.run_start().const_data_ptr<int32_t>();
  p.run_bag = forwarded->sort.run_slot().const_data_ptr<int64_t>();
  p.counts = forwarded->counts.const_data_ptr<int64_t>();
  p.runs = before[groups];
  p.accesses = accesses_before[groups];
  p.parcels = static_cast<const NodeParcel*>(parcels_there.const_data_ptr());
  p.kept = a.kept;
  check_device(device_library().write_forwarded(&p, on), "forwarding could not be started");
  return {all_words, all_places, all_positions, kept, of_nodes};
}

// Addresses, offsets of bags, weights if there are any, and of this rank's accesses their positions
// in the batch, if there are weights.
using JoinedBatch = std::tuple<at::Tensor, at::Tensor, std::optional<at::Tensor>, at::Tensor>;

// `heads` are the words that each client's begin with, [clients, 2 · forwarded_features] on the
// host.
JoinedBatch join_bags(const at::Tensor& addresses, const std::optional<at::Tensor>& offsets,
                      const std::optional<at::Tensor>& weights, const at::Tensor& features,
                      at::IntArrayRef forwards, at::IntArrayRef destination_of,
                      int64_t destinations, const at::Tensor& kept, at::TensorList received,
                      int64_t forwarded_features, at::IntArrayRef fields, int64_t slot_bits,
                      int64_t code_words, const std::optional<at::Tensor>& heads, int64_t stream) {
  const c10::DeviceGuard guard(addresses.device());
  JoinArguments a{};
  a.given = given_bags(addresses, offsets, weights);
  const Feature* const feature = features_of(features, a.given.bags);
  const std::vector<int64_t> node = nodes_of(destination_of, destinations);
  check_codes(slot_bits, code_words);
  check_on(kept, addresses, "kept");
  a.kept = elements<int32_t>(kept, a.given.bags, "kept");
  a.features = features.size(0);
  OPER_CHECK_VALUE(static_cast<int64_t>(forwards.size()) == a.features, "forwards: expected ",
                   a.features, ", one per feature, got ", forwards.size());
  check_size(forwarded_features, 0, kMostThings, "forwarded_features");
  OPER_CHECK_VALUE(!fields.empty() || received.empty(), "fields: expected at least one, got none");
  const auto clients = static_cast<int64_t>(received.size());
  const int64_t head = kHeads * forwarded_features;
  OPER_CHECK_VALUE(heads && heads->is_cpu(), "heads: expected them on the host, got ",
                   heads ? heads->device().str() : "none");
  const auto* of_client = elements<int64_t>(*heads, product(clients, head, "heads"), "heads");
  std::vector<int64_t> first_bag, stays;
  a.own = a.given.accesses;
  for (int64_t f = 0; f < a.features; ++f) {
    check_size(forwards[f], 0, a.own, "forwards");
    OPER_CHECK_VALUE(f == 0 || feature[f].first_bag >= first_bag.back(),
                     "features: not in the order of their bags");
    first_bag.push_back(feature[f].first_bag);
    stays.push_back(forwards[f] == 0);
    a.own -= forwards[f];
  }
  if (a.features > 0) first_bag[0] = 0;  // all bags are of one
  std::vector<int64_t> parcels, bag_begins{0}, access_begins{0};
  for (int64_t c = 0; c < clients; ++c, of_client += head) {
    check_on(received[c], addresses, "received");
    const auto* const words = elements<int32_t>(received[c], "received");
    int64_t bags = 0, accesses = 0;
    for (int64_t f = 0; f < forwarded_features; ++f) {
      const int64_t of_bags = of_client[f], of_accesses = of_client[forwarded_features + f];
      check_size(of_bags, 0, of_accesses, "received: bags");
      check_size(of_accesses, 0, kMost - accesses, "received: accesses");
      bags += of_bags;
      accesses += of_accesses;
    }
    const int64_t size = head + bags + (code_words + (weights ? 1 : 0)) * accesses;
    OPER_CHECK_VALUE(received[c].numel() == size, "received: ", received[c].numel(), " words, and ",
                     size, " follow from their first ones");
    const int32_t* const codes = words + head + bags;
    append_words(parcels,
                 ClientParcel{words + head, codes,
                              reinterpret_cast<const float*>(codes + code_words * accesses),
                              bag_begins.back(), access_begins.back()});
    bag_begins.push_back(bag_begins.back() + bags);
    access_begins.push_back(access_begins.back() + accesses);
  }
  const int64_t came = access_begins.back(), all_bags = a.given.bags + bag_begins.back();
  check_size(a.own + came, 0, kMost, "received: accesses");
  check_size(all_bags, 0, kMost, "received: bags");

  const auto words = addresses.options(), numbers = words.dtype(at::kInt);
  const at::Tensor listed =
      brought({node, first_bag, stays, parcels, bag_begins, access_begins, fields}, words, stream);
  a.nodes = {listed.const_data_ptr<int64_t>(), static_cast<int64_t>(node.size()) - 1, destinations};
  a.first_bag = a.nodes.node + node.size();
  a.stays = a.first_bag + a.features;
  a.clients = reinterpret_cast<const ClientParcel*>(a.stays + a.features);
  a.bag_begins = a.stays + a.features + parcels.size();
  a.access_begins = a.bag_begins + clients + 1;
  a.client_count = clients;
  a.fields = a.access_begins + clients + 1;
  a.field_count = static_cast<int64_t>(fields.size());
  a.slot_bits = slot_bits;
  a.code_words = code_words;
  at::Tensor lengths = at::empty({all_bags + 1}, numbers);
  a.lengths = lengths.mutable_data_ptr<int32_t>();
  auto* const on = reinterpret_cast<void*>(stream);
  check_device(device_library().list_lengths(&a, all_bags, on),
               "joining bags could not be started");
  at::Tensor ends = at::cumsum(lengths, 0, at::kInt);
  a.offsets = ends.const_data_ptr<int32_t>();
  at::Tensor joined = at::empty({a.own + came}, words);
  a.addresses = joined.mutable_data_ptr<int64_t>();
  std::optional<at::Tensor> joined_weights;
  at::Tensor positions = at::empty({weights ? a.own : 0}, numbers);
  if (weights) {
    joined_weights = at::empty({a.own + came}, words.dtype(at::kFloat));
    a.weights = joined_weights->mutable_data_ptr<float>();
    a.positions = positions.mutable_data_ptr<int32_t>();
  }
  check_device(device_library().join_accesses(&a, came, on), "joining bags could not be started");
  return {joined, ends, joined_weights, positions};
}

// Moves the vector of each of counts[f] bags of each feature, of dims[f] values.
void move_vectors(const at::Tensor& bags, const at::Tensor& places, at::IntArrayRef counts,
                  at::IntArrayRef dims, const at::Tensor& vectors, bool add, int64_t stream) {
  const c10::DeviceGuard guard(bags.device());
  check_on(places, bags, "places");
  check_on(vectors, bags, "vectors");
  OPER_CHECK_VALUE(counts.size() == dims.size(),
                   "counts, dims: expected equal numbers of them, got ", counts.size(), " and ",
                   dims.size());
  VectorArguments a{};
  a.places = elements<int64_t>(places, "places");
  a.bags = const_cast<float*>(elements<float>(bags, "bags"));
  a.vectors = const_cast<float*>(elements<float>(vectors, "vectors"));
  std::vector<int64_t> first_value, first_bag, dim;
  int64_t bag = 0, value = 0;
  for (size_t f = 0; f < counts.size(); ++f) {
    check_size(counts[f], 0, places.numel() - bag, "counts");
    check_size(dims[f], 0, kMostThings, "dims");
    if (counts[f] == 0 || dims[f] == 0) {
      bag += counts[f];
      continue;
    }
    first_value.push_back(value);
    first_bag.push_back(bag);
    dim.push_back(dims[f]);
    bag += counts[f];
    value += product(counts[f], dims[f], "counts");
  }
  OPER_CHECK_VALUE(bag == places.numel() && value == vectors.numel(), "counts: ", bag, " bags of ",
                   value, " values, and there are ", places.numel(), " of ", vectors.numel());
  if (value == 0) return;
  first_value.push_back(value);
  const at::Tensor listed = brought({first_value, first_bag, dim}, places.options(), stream);
  a.features = static_cast<int64_t>(dim.size());
  a.first_value = listed.const_data_ptr<int64_t>();
  a.first_bag = a.first_value + a.features + 1;
  a.dim = a.first_bag + a.features;
  check_device(device_library().move_vectors(&a, value, add, reinterpret_cast<void*>(stream)),
               "moving vectors could not be started");
}

void add_bags(at::Tensor& out, const at::Tensor& places, at::IntArrayRef counts,
              at::IntArrayRef dims, const at::Tensor& vectors, int64_t stream) {
  move_vectors(out, places, counts, dims, vectors, true, stream);
}

void gather_bags(const at::Tensor& values, const at::Tensor& places, at::IntArrayRef counts,
                 at::IntArrayRef dims, at::Tensor& vectors, int64_t stream) {
  move_vectors(values, places, counts, dims, vectors, false, stream);
}

}  // namespace
}  // namespace oper

TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("forward_bags", oper::forward_bags);
  m.impl("join_bags", oper::join_bags);
  m.impl("add_bags", oper::add_bags);
  m.impl("gather_bags", oper::gather_bags);
}

// For tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(oper::schemas::kForwardBags);
  m.def(oper::schemas::kJoinBags);
  m.def(oper::schemas::kAddBags);
  m.def(oper::schemas::kGatherBags);
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("forward_bags", oper::forward_bags);
  m.impl("join_bags", oper::join_bags);
  m.impl("add_bags", oper::add_bags);
  m.impl("gather_bags", oper::gather_bags);
}
