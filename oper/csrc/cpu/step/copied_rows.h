// The arguments of copy_rows: pieces of a list of slots, each of rows of one arena that are copied
// to one place.
#pragma once

#include <cstdint>
#include <optional>

#include "cpu/common/arguments.h"

namespace oper {

// Rows in the slots [first, first + count) of the list, one after another to `out`.
struct CopiedRows {
  int64_t first, count;
  const uint8_t* arena;
  int64_t row_bytes;
  uint8_t* out;
  int64_t called;  // the target of the first; that of each next is one more
};

template <typename F>
void for_copied_rows(const at::Tensor& slots, at::IntArrayRef firsts, at::IntArrayRef counts,
                     at::IntArrayRef arenas, at::IntArrayRef row_bytes, at::Tensor& out,
                     at::IntArrayRef places, const std::optional<at::Tensor>& targets,
                     at::IntArrayRef called, const F& f) {
  const size_t pieces = counts.size();
  OPER_CHECK_VALUE(firsts.size() == pieces && arenas.size() == pieces &&
                       row_bytes.size() == pieces && places.size() == pieces &&
                       called.size() == (targets ? pieces : 0),
                   "firsts, counts, arenas, row_bytes, places, called: expected equal numbers of "
                   "them, got ",
                   firsts.size(), ", ", pieces, ", ", arenas.size(), ", ", row_bytes.size(), ", ",
                   places.size(), " and ", called.size());
  auto* const to = writable_elements<uint8_t>(out, 0, "out");
  const int64_t most = slots.numel();
  if (targets) elements_at_least<int64_t>(*targets, 0, "targets");
  for (size_t n = 0; n < pieces; ++n) {
    check_size(firsts[n], 0, most, "firsts");
    check_size(counts[n], 0, most - firsts[n], "counts");
    if (targets) check_size(firsts[n] + counts[n], 0, targets->numel(), "targets: rows");
    check_size(row_bytes[n], 1, kMostRows, "row_bytes");
    check_size(places[n], 0, out.numel(), "places");
    check_size(product(counts[n], row_bytes[n], "counts"), 0, out.numel() - places[n],
               "out: bytes");
    const auto* const arena = reinterpret_cast<const uint8_t*>(arenas[n]);
    OPER_CHECK_VALUE(arena || counts[n] == 0, "arenas: one is not mapped here");
    f(CopiedRows{firsts[n], counts[n], arena, row_bytes[n], to + places[n],
                 targets ? called[n] : 0});
  }
}

}  // namespace oper
