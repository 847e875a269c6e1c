// Bags between nodes on a device: what a batch's bags read of which other node, and a batch without
// that and with the bags of others. What is sent: step/forward_bags.h.
//
// Accesses are sorted by where they go: by node and feature, their group, and by bag. A run of
// equal words (sort.cuh) is then what one bag reads of one node.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/search.cuh"
#include "oper/plan/address.h"

namespace oper {

constexpr int64_t kHeadWords = 2;  // of a feature, with which words for a node begin

__device__ __forceinline__ int64_t thread_number() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ int64_t bag_begin(const GivenBags& a, int64_t bag) {
  return a.offsets32 ? a.offsets32[bag] : a.offsets64 ? a.offsets64[bag] : bag;
}

// The rank whose row it is, or the number of ranks where it names none.
__device__ __forceinline__ int64_t rank_of(const NodesOfRanks& a, int64_t address) {
  const uint64_t field = static_cast<uint64_t>(address) >> kSlotBits;
  return field < static_cast<uint64_t>(a.ranks) ? static_cast<int64_t>(field) : a.ranks;
}

// A word of each access, and how many accesses each bag has.
__global__ void __launch_bounds__(256) list_forwarded(const __grid_constant__ ForwardArguments a) {
  const int64_t n = thread_number();
  if (n < a.given.bags)
    a.kept[n] = static_cast<int32_t>(bag_begin(a.given, n + 1) - bag_begin(a.given, n));
  if (n >= a.given.accesses) return;
  int64_t bag = n;
  if (a.given.offsets32) bag = last_at_most(a.given.offsets32, 0, a.given.bags, n);
  if (a.given.offsets64) bag = last_at_most(a.given.offsets64, 0, a.given.bags, n);
  const int64_t feature = a.feature_from[last_at_most(a.bounds, 0, a.bound_count, bag)];
  const int64_t node = a.nodes.node[rank_of(a.nodes, a.given.addresses[n])];
  const bool goes = feature >= 0 && node < a.nodes.others;
  const int64_t group = goes ? node * a.features + feature : a.layout.groups;
  a.words[n] = a.layout.word(group, goes ? bag : 0, a.numbers ? 0 : n);
  if (a.numbers) a.numbers[n] = static_cast<int32_t>(n);
}

// Bags before each group, and accesses.
__global__ void __launch_bounds__(256)
    count_forwarded(const int64_t* before, const int32_t* run_start, int64_t groups,
                    int64_t* counts) {
  const int64_t group = thread_number();
  if (group > groups) return;
  counts[group] = before[group];
  counts[groups + 1 + group] = run_start[before[group]];
}

// The words for each node, the places of its bags' sums, and the positions of weighted accesses;
// and what each bag keeps.
__global__ void __launch_bounds__(256) write_forwarded(const __grid_constant__ ParcelArguments a) {
  const int64_t n = thread_number(), groups = a.layout.groups;
  const int64_t head_words = kHeadWords * a.features;
  const auto group_at = [&](int64_t access) {
    return static_cast<int64_t>(a.words[access] >> a.layout.number_bits >> a.layout.slot_bits);
  };
  if (n < a.nodes.others * head_words) {
    const int64_t node = n / head_words, word = n % head_words;
    const int64_t* const of = a.counts + (word < a.features ? 0 : groups + 1);
    const int64_t group = node * a.features + word % a.features;
    a.parcels[node].words[word] = static_cast<int32_t>(of[group + 1] - of[group]);
  }
  if (n < a.runs) {
    const int64_t begin = a.run_start[n], length = a.run_start[n + 1] - begin;
    const int64_t group = group_at(begin), feature = group % a.features, bag = a.run_bag[n];
    const NodeParcel& parcel = a.parcels[group / a.features];
    parcel.words[head_words + n - parcel.first_bag] = static_cast<int32_t>(length);
    parcel.places[n - parcel.first_bag] = a.base[feature] + bag * a.stride[feature];
    atomicAdd(a.kept + bag, -static_cast<int32_t>(length));
  }
  if (n < a.accesses) {
    const NodeParcel& parcel = a.parcels[group_at(n) / a.features];
    const int64_t here = n - parcel.first_access, position = a.positions[n];
    const int64_t address = a.given.addresses[position];
    const int64_t code = a.code[rank_of(a.nodes, address)] | slot_of(address);
    int32_t* const codes = parcel.words + head_words + parcel.bags;
    codes[a.code_words * here] = static_cast<int32_t>(code);
    if (a.code_words == 2) codes[2 * here + 1] = static_cast<int32_t>(code >> 32);
    if (a.given.weighted) {
      auto* const weights = reinterpret_cast<float*>(codes + a.code_words * parcel.accesses);
      weights[here] = a.given.weights[position];
      parcel.positions[here] = static_cast<int32_t>(position);
    }
  }
}

// The client whose bags number `n` of those that came is among, by where each client's begin.
__device__ __forceinline__ const ClientParcel& client_at(const JoinArguments& a, int64_t n,
                                                         const int64_t* begins) {
  return a.clients[last_at_most(begins, 0, a.client_count, n)];
}

// Whether a feature forwards nothing, so that all of its accesses stay.
__device__ __forceinline__ bool stays(const JoinArguments& a, int64_t bag) {
  return a.features == 0 || a.stays[last_at_most(a.first_bag, 0, a.features, bag)];
}

// The length of each bag of the joined batch.
__global__ void __launch_bounds__(256) list_lengths(const __grid_constant__ JoinArguments a) {
  const int64_t n = thread_number(), own = a.given.bags;
  if (n == 0) a.lengths[0] = 0;
  if (n < own) {
    const int64_t length = bag_begin(a.given, n + 1) - bag_begin(a.given, n);
    a.lengths[n + 1] = stays(a, n) ? static_cast<int32_t>(length) : a.kept[n];
  } else if (n < own + a.bag_begins[a.client_count]) {
    const ClientParcel& client = client_at(a, n - own, a.bag_begins);
    a.lengths[n + 1] = client.lengths[n - own - client.first_bag];
  }
}

// The accesses that stay, a warp a bag.
__global__ void __launch_bounds__(256) keep_accesses(const __grid_constant__ JoinArguments a) {
  const int64_t bag = thread_number() / kWarpThreads;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  if (bag >= a.given.bags) return;
  const int64_t begin = bag_begin(a.given, bag), end = bag_begin(a.given, bag + 1);
  // Of lengths that do not fit nothing is touched that is not there.
  if (begin < 0 || end > a.given.accesses) return;
  int64_t to = a.offsets[bag];
  const int64_t last = a.offsets[bag + 1] < a.own ? a.offsets[bag + 1] : a.own;
  const bool all = stays(a, bag);
  for (int64_t first = begin; first < end; first += kWarpThreads) {
    const int64_t n = first + lane, address = n < end ? a.given.addresses[n] : 0;
    const bool is_here =
        n < end && (all || a.nodes.node[rank_of(a.nodes, address)] == a.nodes.others);
    const uint32_t those = __ballot_sync(0xFFFFFFFFu, is_here);
    const int64_t at = to + __builtin_popcount(those & ((1u << lane) - 1));
    if (is_here && at >= 0 && at < last) {
      a.addresses[at] = address;
      if (a.given.weighted) {
        a.weights[at] = a.given.weights[n];
        a.positions[at] = static_cast<int32_t>(n);
      }
    }
    to += __builtin_popcount(those);
  }
}

// The accesses that came.
__global__ void __launch_bounds__(256) take_received(const __grid_constant__ JoinArguments a) {
  const int64_t n = thread_number();
  if (n >= a.access_begins[a.client_count]) return;
  const ClientParcel& client = client_at(a, n, a.access_begins);
  const int64_t here = n - client.first_access;
  int64_t code = client.codes[a.code_words * here];
  if (a.code_words == 2)
    code = static_cast<int64_t>(client.codes[2 * here + 1]) << 32 |
           static_cast<uint32_t>(client.codes[2 * here]);
  // What came over a network may name no rank.
  int64_t place = code >> a.slot_bits;
  place = place < 0 ? 0 : place < a.field_count ? place : a.field_count - 1;
  const int64_t slot = code & ((int64_t{1} << a.slot_bits) - 1);
  a.addresses[a.own + n] = make_address(a.fields[place], slot);
  if (a.given.weighted) a.weights[a.own + n] = client.weights[here];
}

// A vector to or from each bag, a thread a value. kAdd: bags get theirs added, or else are read.
template <bool kAdd>
__global__ void __launch_bounds__(256) move_vectors(const __grid_constant__ VectorArguments a) {
  const int64_t n = thread_number();
  if (n >= a.first_value[a.features]) return;
  const int64_t feature = last_at_most(a.first_value, 0, a.features, n);
  const int64_t value = n - a.first_value[feature], dim = a.dim[feature];
  const int64_t place = a.places[a.first_bag[feature] + value / dim] + value % dim;
  if (kAdd)
    a.bags[place] += a.vectors[n];
  else
    a.vectors[n] = a.bags[place];
}

}  // namespace oper
