// Bags between nodes: which accesses of a batch read rows of which node, and what is sent there.
//
// Ranks of a node read each other's rows by pointer. What a bag reads of another node is FORWARDED
// to a rank there, which takes it for a bag of its own batch, and one vector comes back. What is
// sent to a node are 32-bit words:
//
//     bags of each feature, then accesses of each feature; then, feature after feature,
//     the length of each bag; the code of each access; the weight of each access, if it has one
//
// Bags without accesses there are left out. A code is the owner's place among the ranks of its node
// and the slot, in one word where all of them fit, or in two.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "oper/plan/address.h"
#include "oper/step/row_stream.h"

namespace oper {

// To which node the rows of each rank are forwarded: number `own` says that they are not.
struct Destinations {
  const int32_t* of_rank;  // [ranks + 1]; the last is `own`, of addresses that name no rank
  uint64_t ranks;
  int32_t own;  // how many others there are

  // The rank whose row it is, or `ranks`.
  uint64_t rank_of(int64_t address) const {
    return std::min(static_cast<uint64_t>(address) >> kSlotBits, ranks);
  }
  int32_t of(int64_t address) const { return of_rank[rank_of(address)]; }
};

// Bags and accesses that go to a node, and the last bag that had any.
struct Tally {
  int64_t bags = 0, accesses = 0;
  int64_t last_bag = -1;
};

// What a feature forwards to each node, [own + 1]; the last is what it keeps.
using Forwarded = std::vector<Tally>;

// Where two nodes' ranks follow each other: addresses below `first`, and from `last` to `end`, are
// of the other node's rows.
struct OwnRange {
  uint64_t first, last, end;
};

// What count_feature finds where there is one other node, bag by bag. Returns the bags and accesses
// for it.
OPER_INLINE std::pair<int64_t, int64_t> count_two_nodes(const Batch& batch, const Feature& feature,
                                                        const OwnRange& own, int32_t* kept) {
  int64_t bags = 0, accesses = 0;
  for (int64_t i = feature.first_bag; i < feature.first_bag + feature.bags; ++i) {
    const int64_t begin = batch.first(i), length = batch.first(i + 1) - begin;
    const int64_t* const addresses = batch.addresses + begin;
    int64_t elsewhere = 0;
    for (int64_t n = 0; n < length; ++n) {
      const auto address = static_cast<uint64_t>(addresses[n]);
      elsewhere += (address < own.first) | (address - own.last < own.end - own.last);
    }
    kept[i] = static_cast<int32_t>(length - elsewhere);
    bags += elsewhere > 0;
    accesses += elsewhere;
  }
  return {bags, accesses};
}

// Also how many accesses of each bag are not forwarded, kept[bag of the batch].
inline Forwarded count_feature(const Batch& batch, const Feature& feature,
                               const Destinations& destinations, int32_t* kept) {
  Forwarded found(destinations.own + 1);
  Tally* const tally = found.data();
  const Tally& own = tally[destinations.own];
  for (int64_t i = feature.first_bag; i < feature.first_bag + feature.bags; ++i) {
    const int64_t before = own.accesses;
    for (int64_t n = batch.first(i); n < batch.first(i + 1); ++n) {
      Tally& of = tally[destinations.of(batch.addresses[n])];
      of.bags += of.last_bag != i;
      of.last_bag = i;
      ++of.accesses;
    }
    kept[i] = static_cast<int32_t>(own.accesses - before);
  }
  return found;
}

// Where a feature's bags and accesses for a node are written. What has no use is null.
struct Parcel {
  int32_t* lengths;
  int64_t* places;  // of each bag's sum in the output
  int32_t* codes;   // of the next access, as the other two
  float* weights;
  int32_t* positions;  // of each access in the batch
  int64_t bag = -1;    // the last one, and its number here
  int64_t number = -1;
};

struct Codes {
  const int64_t* place;  // of each rank among those of its node, and one more
  int slot_bits;
  int words;

  int64_t of(int64_t address, uint64_t rank) const {
    return place[rank] << slot_bits | slot_of(address);
  }
  int64_t of_words(const int32_t* from) const {
    if (words == 1) return *from;
    int64_t code;
    std::memcpy(&code, from, sizeof(code));
    return code;
  }
};

// Writes what a feature forwards to each node.
template <bool kWide, bool kWeighted>
OPER_INLINE void write_feature(const Batch& batch, const Feature& feature,
                               const Destinations& destinations, const int32_t* kept,
                               const Codes& codes, Parcel* parcels) {
  for (int64_t i = 0; i < feature.bags; ++i) {
    const int64_t begin = batch.first(feature.first_bag + i);
    const int64_t end = batch.first(feature.first_bag + i + 1);
    if (end - begin == kept[feature.first_bag + i]) continue;
    for (int64_t n = begin; n < end; ++n) {
      const int64_t address = batch.addresses[n];
      const uint64_t rank = destinations.rank_of(address);
      const int32_t to = destinations.of_rank[rank];
      if (to == destinations.own) continue;
      Parcel& parcel = parcels[to];
      const int64_t is_new = parcel.bag != i;
      parcel.bag = i;
      parcel.number += is_new;
      int32_t& length = parcel.lengths[parcel.number];
      length = is_new ? 1 : length + 1;
      parcel.places[parcel.number] = feature.out(i);
      const int64_t code = codes.of(address, rank);
      if (kWide)
        std::memcpy(parcel.codes, &code, sizeof(code));
      else
        *parcel.codes = static_cast<int32_t>(code);
      parcel.codes += kWide ? 2 : 1;
      if (kWeighted) {
        *parcel.weights++ = batch.weights[n];
        *parcel.positions++ = static_cast<int32_t>(n);
      }
    }
  }
}

// What write_feature does where there is one other node. Of a bag it is known how many accesses go
// there, so that each is written and the next one takes its place where it stays: nothing is
// guessed.
template <bool kWide, bool kWeighted>
OPER_INLINE void write_two_nodes(const Batch& batch, const Feature& feature,
                                 const Destinations& destinations, const int32_t* kept,
                                 const Codes& codes, Parcel parcel) {
  const int32_t* const stays = destinations.of_rank;  // 0 or 1
  int32_t* words = parcel.codes;
  for (int64_t i = 0; i < feature.bags; ++i) {
    int64_t n = batch.first(feature.first_bag + i);
    const int64_t end = batch.first(feature.first_bag + i + 1);
    const int64_t count = end - n - kept[feature.first_bag + i];
    if (count == 0) continue;
    *parcel.lengths++ = static_cast<int32_t>(count);
    *parcel.places++ = feature.out(i);
    for (int64_t written = 0; written < count; ++n) {
      const int64_t address = batch.addresses[n];
      const uint64_t rank = destinations.rank_of(address);
      const int64_t code = codes.of(address, rank);
      if (kWide)
        std::memcpy(words + 2 * written, &code, sizeof(code));
      else
        words[written] = static_cast<int32_t>(code);
      if (kWeighted) {
        parcel.weights[written] = batch.weights[n];
        parcel.positions[written] = static_cast<int32_t>(n);
      }
      written += 1 - stays[rank];
    }
    words += kWide ? 2 * count : count;
    if (kWeighted) parcel.weights += count, parcel.positions += count;
  }
}

// Where the accesses of a feature are written in a joined batch: from number `at` to `end`.
struct Joined {
  int64_t* addresses;
  int32_t* offsets;  // the end of each of its bags
  float* weights;    // null, as the positions, where there are none
  int32_t* positions;
  int64_t at, end;
};

// Accesses [begin, end) as they are.
OPER_INLINE void keep_all(const Batch& batch, int64_t begin, int64_t end, Joined& to) {
  const int64_t size = end - begin;
  std::memcpy(to.addresses + to.at, batch.addresses + begin, size * sizeof(int64_t));
  if (to.weights) {
    std::memcpy(to.weights + to.at, batch.weights + begin, size * sizeof(float));
    for (int64_t n = 0; n < size; ++n) to.positions[to.at + n] = static_cast<int32_t>(begin + n);
  }
  to.at += size;
}

// The bags of a feature without the accesses that it forwards; `kept` is null where it does not
// forward any. False where they are not as many as there is room for.
OPER_INLINE bool keep_feature(const Batch& batch, const Feature& feature,
                              const Destinations& destinations, const int32_t* kept, Joined to) {
  const int64_t last = feature.first_bag + feature.bags;
  int64_t copied = batch.first(feature.first_bag);  // up to here
  int64_t end = to.at;
  for (int64_t i = feature.first_bag; i < last; ++i) {
    const int64_t begin = batch.first(i), length = batch.first(i + 1) - begin;
    const int64_t left = kept ? kept[i] : length;
    end += left;
    if (left < 0 || left > length || end > to.end) return false;
    *to.offsets++ = static_cast<int32_t>(end);
    if (left == length) continue;
    keep_all(batch, copied, begin, to);
    copied = begin + length;
    int64_t at = to.at;
    // As in write_two_nodes: one that is not kept is written over.
    for (int64_t n = begin; n < copied && at < end; ++n) {
      const int64_t address = batch.addresses[n];
      to.addresses[at] = address;
      if (to.weights) {
        to.weights[at] = batch.weights[n];
        to.positions[at] = static_cast<int32_t>(n);
      }
      at += destinations.of(address) == destinations.own;
    }
    to.at = at;
    if (at != end) return false;
  }
  keep_all(batch, copied, batch.first(last), to);
  return to.at == to.end;
}

}  // namespace oper
