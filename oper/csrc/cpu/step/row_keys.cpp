// The key space of a batch's rows.

#include "cpu/step/row_keys.h"

namespace oper {
namespace {

OPER_SIMD void extend_by(const int64_t* addresses, int64_t size, Extent& extent) {
  extend(addresses, size, extent);
}

// Lays out the key space as far as the largest slot of each bucket.
void lay_out(RowKeys& keys) {
  const int64_t chunks = keys.chunks();
  std::vector<Extent> found(chunks * keys.buckets);
  keys.for_each_chunk([&](int64_t chunk, int64_t first, int64_t last) {
    keys.for_each_piece(first, last, [&](const SortedSegment& s, int64_t begin, int64_t end) {
      extend_by(keys.addresses + begin, end - begin, found[chunk * keys.buckets + s.bucket]);
    });
  });
  for (int64_t bucket = 0; bucket < keys.buckets; ++bucket) {
    int64_t slots = 0;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const Extent& extent = found[chunk * keys.buckets + bucket];
      OPER_CHECK_INDEX(extent.field_code < static_cast<uint64_t>(keys.field_codes()),
                       "addresses: one of bucket ", bucket, " names none of ", keys.ranks,
                       " ranks");
      slots = std::max(slots, extent.slot + 1);
    }
    keys.add_bucket(slots);
  }
}

}  // namespace

void RowKeys::add_bucket(int64_t slots) {
  uint64_t key = keys();
  first_key.pop_back();
  for (int64_t code = 0; code < owner_codes(); ++code) {
    first_key.push_back(key);
    OPER_CHECK_VALUE(!__builtin_add_overflow(key, static_cast<uint64_t>(slots), &key),
                     "addresses: of more rows than 64 bits tell apart");
  }
  const auto first = first_key.end() - owner_codes();
  base.push_back(first[0]);
  base.push_back(first[1 + rank]);
  base.insert(base.end(), first + 1, first_key.end());
  first_key.push_back(key);
}

RowKeys segments_of_rows(const at::Tensor& addresses, const at::Tensor& segment_offset,
                         const at::Tensor& features, int64_t rank, int64_t ranks, int64_t buckets) {
  check_size(ranks, 1, kMostThings, "ranks");
  check_size(rank, 0, ranks - 1, "rank");
  check_size(buckets, 0, kMostThings / ranks, "buckets");
  OPER_CHECK_VALUE(addresses.numel() <= std::numeric_limits<int32_t>::max(),
                   "addresses: ", addresses.numel(),
                   " accesses in a batch, and positions are of 32 bits");
  RowKeys keys;
  keys.addresses = elements<int64_t>(addresses, "addresses");
  keys.rank = rank;
  keys.ranks = ranks;
  keys.buckets = buckets;
  keys.number_bits = bit_width(static_cast<uint64_t>(addresses.numel()));
  const Features view = features_of(features, segment_offset);
  OPER_CHECK_VALUE(view.accesses() == addresses.numel(), "segment_offset: ends at ",
                   view.accesses(), ", and there are ", addresses.numel(), " addresses");
  for (int64_t f = 0; f < view.count; ++f) {
    const int64_t begin = view.begin(f), end = view.end(f);
    if (!view[f].has_gradient || begin == end) continue;
    OPER_CHECK_INDEX(view[f].bucket >= 0 && view[f].bucket < buckets, "features: bucket ",
                     view[f].bucket, " of feature ", f, " is none of ", buckets);
    keys.segments.push_back({begin, end, keys.elements, view[f].bucket});
    keys.elements += end - begin;
  }
  return keys;
}

RowKeys row_keys(const at::Tensor& addresses, const at::Tensor& segment_offset,
                 const at::Tensor& features, int64_t rank, int64_t ranks, int64_t buckets) {
  RowKeys keys = segments_of_rows(addresses, segment_offset, features, rank, ranks, buckets);
  lay_out(keys);
  return keys;
}

}  // namespace oper
