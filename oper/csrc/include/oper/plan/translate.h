// Row ids to addresses, by the arithmetic of oper/plan/layout.py.
//
// Ids come in no order, so each step would wait for memory. A batch of 64 goes through each step
// together instead: first all lines of the bitmap are fetched, then all codes, and by then the
// first ones have arrived. Where rows on all ranks have marks, their lines come first of all: most
// ids are theirs, and need no other. Kinds of rows are told apart without branches, which would be
// mispredicted. Divisions are by table constants, and done by multiplying with 2^64/d, rounded up:
// for x < 2^64/d (and here ids are below 2^40, d at most 2^16) the high half of the product is
// exactly x/d.
#pragma once

#include <cstdint>

#include "oper/common/simd.h"
#include "oper/common/struct_fields.h"
#include "oper/plan/bitmap.h"
#include "oper/plan/row_codes.h"

namespace oper {

// A table's part of the map.
struct TableMap {
  int64_t rows;
  int64_t first_line;   // in the bitmap
  int64_t origin;       // row - rank + origin is the step in the table's pattern, from its start
  int64_t period;       // of the pattern, at least 2
  uint64_t reciprocal;  // ceil(2^64 / period)
  int64_t pattern;      // first of the pattern's steps
  int64_t stripe_base;  // first of the table's stripe bases
  int64_t flat;         // first of the table's plain addresses, or -1 where it has none
  int64_t everywhere;   // of a row on all ranks: its address less such rows of all tables before it

  // Declared as TABLE_MAP in oper/plan/address_map.py.
  static std::string fields() {
    return Fields<TableMap>()
        .add("rows", &TableMap::rows)
        .add("first_line", &TableMap::first_line)
        .add("origin", &TableMap::origin)
        .add("period", &TableMap::period)
        .add("reciprocal", &TableMap::reciprocal)
        .add("pattern", &TableMap::pattern)
        .add("stripe_base", &TableMap::stripe_base)
        .add("flat", &TableMap::flat)
        .add("everywhere", &TableMap::everywhere)
        .text();
  }
};

// A step of a pattern of ranks: its rank, how often that occurs before it and in the whole pattern.
struct PatternStep {
  uint16_t owner;
  uint16_t before;
  uint32_t copies;

  // Declared as PATTERN_STEP in oper/plan/address_map.py.
  static std::string fields() {
    return Fields<PatternStep>()
        .add("owner", &PatternStep::owner)
        .add("before", &PatternStep::before)
        .add("copies", &PatternStep::copies)
        .text();
  }
};

template <typename Code>
struct MapView {
  const TableMap* tables;
  const Line* lines;
  const Line* stripe_lines;  // that number striped rows; null where `lines` do
  const Line* everywhere;    // mark listed rows on all ranks; null where all listed ones have codes
  const Code* codes;         // of the other listed rows
  RowCodes row_codes;
  const int64_t* group_base;   // packed addresses
  const int64_t* stripe_base;  // the same, of step 0 of the pattern's first turn
  const PatternStep* steps;    // of all patterns
  const int64_t* flat;         // plain addresses of rows, table by table
};

OPER_HD inline uint64_t high_product(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

// 448 is 64 · 7: of a quotient by 64, the seventh is a line's number.
constexpr uint64_t kSeventh = ~uint64_t{0} / kWordsPerLine + 1;

// A bit of a bitmap.
struct BitPlace {
  int64_t line;
  uint32_t position;

  OPER_HD static BitPlace of(uint64_t bit) {
    const uint64_t line = high_product(bit / 64, kSeventh);
    return {static_cast<int64_t>(line), static_cast<uint32_t>(bit - line * kRowsPerLine)};
  }
};

// The address of one row, which must be in range: a thread of a device for each id.
template <typename Code>
OPER_HD inline int64_t translate_one(const MapView<Code>& map, const TableMap& table, int64_t id) {
  if (table.flat >= 0) return map.flat[table.flat + id];
  const BitPlace row = BitPlace::of(static_cast<uint64_t>(id));
  const int64_t at = table.first_line + row.line;
  int64_t before = 0;
  if (map.everywhere) {
    const Line& mark = map.everywhere[at];
    before = mark.rank(row.position);
    if (mark.test(row.position)) return table.everywhere + before;
  }
  const Line& line = map.lines[at];
  if (line.test(row.position)) {
    const uint64_t code = map.codes[line.rank(row.position) - before];
    return map.group_base[map.row_codes.group(code)] +
           static_cast<int64_t>(map.row_codes.position(code));
  }
  const Line* const numbering = map.stripe_lines ? map.stripe_lines : map.lines;
  const int64_t listed = numbering[at].rank(row.position);
  const uint64_t c = static_cast<uint64_t>(id - listed + table.origin);
  const uint64_t turn = high_product(c, table.reciprocal);
  const PatternStep& step =
      map.steps[table.pattern +
                static_cast<int64_t>(c - turn * static_cast<uint64_t>(table.period))];
  return map.stripe_base[table.stripe_base + step.owner] +
         static_cast<int64_t>(turn * step.copies + step.before);
}

// Translate `size` ids of one table; returns the index of the first that is out of range, or -1.
// kMarked: map.everywhere is not null.
template <bool kMarked, typename Id, typename Code>
inline __attribute__((always_inline)) int64_t translate_body(const MapView<Code>& map,
                                                             const TableMap& table, const Id* ids,
                                                             int64_t size, int64_t* out) {
  constexpr int64_t kBatch = 64;
  const uint64_t rows = static_cast<uint64_t>(table.rows);
  const RowCodes row_codes = map.row_codes;
  const Line* const lines = map.lines + table.first_line;
  const Line* const everywhere = kMarked ? map.everywhere + table.first_line : nullptr;
  const Line* const stripe_lines = map.stripe_lines ? map.stripe_lines + table.first_line : nullptr;
  const PatternStep* const steps = map.steps + table.pattern;
  const int64_t* const stripe_base = map.stripe_base + table.stripe_base;

  uint32_t line[kBatch], position[kBatch];
  int64_t rank[kBatch];
  int64_t unmarked_rank[kBatch];  // marks before the row, then listed rows without a mark before it
  const int64_t* const code_number = kMarked ? unmarked_rank : rank;
  uint8_t rest[kBatch], listed[kBatch], striped[kBatch];
  for (int64_t begin = 0; begin < size; begin += kBatch) {
    const int64_t batch = size - begin < kBatch ? size - begin : kBatch;
    const Id* const in = ids + begin;
    int64_t* const to = out + begin;

    uint64_t bad = 0;
    for (int64_t n = 0; n < batch; ++n) {
      uint64_t id = static_cast<uint64_t>(static_cast<int64_t>(in[n]));
      bad |= id >= rows;
      id = id < rows ? id : 0;
      const BitPlace at = BitPlace::of(id);
      line[n] = static_cast<uint32_t>(at.line);
      position[n] = at.position;
      __builtin_prefetch((kMarked ? everywhere : lines) + at.line);
    }
    if (bad) {
      for (int64_t n = 0; n < batch; ++n)
        if (static_cast<uint64_t>(static_cast<int64_t>(in[n])) >= rows) return begin + n;
    }

    int64_t rest_size = batch;
    if (kMarked) {
      rest_size = 0;
      for (int64_t n = 0; n < batch; ++n) {
        const Line& at = everywhere[line[n]];
        unmarked_rank[n] = at.rank(position[n]);
        to[n] = table.everywhere + unmarked_rank[n];
        rest[rest_size] = static_cast<uint8_t>(n);
        rest_size += !at.test(position[n]);
      }
      for (int64_t k = 0; k < rest_size; ++k) __builtin_prefetch(lines + line[rest[k]]);
    }

    int64_t listed_size = 0, striped_size = 0;
    for (int64_t k = 0; k < rest_size; ++k) {
      const int64_t n = kMarked ? rest[k] : k;
      const Line& at = lines[line[n]];
      rank[n] = at.rank(position[n]);
      if (kMarked) unmarked_rank[n] = rank[n] - unmarked_rank[n];
      const bool bit = at.test(position[n]);
      // Harmless where the row is not listed.
      __builtin_prefetch(map.codes + code_number[n]);
      listed[listed_size] = striped[striped_size] = static_cast<uint8_t>(n);
      listed_size += bit;
      striped_size += !bit;
    }

    if (stripe_lines) {
      for (int64_t k = 0; k < striped_size; ++k)
        __builtin_prefetch(stripe_lines + line[striped[k]]);
      for (int64_t k = 0; k < striped_size; ++k) {
        const int n = striped[k];
        rank[n] = stripe_lines[line[n]].rank(position[n]);
      }
    }
    for (int64_t k = 0; k < striped_size; ++k) {
      const int n = striped[k];
      const uint64_t c =
          static_cast<uint64_t>(static_cast<int64_t>(in[n]) - rank[n] + table.origin);
      const uint64_t turn = high_product(c, table.reciprocal);
      const PatternStep step = steps[c - turn * static_cast<uint64_t>(table.period)];
      to[n] = stripe_base[step.owner] + static_cast<int64_t>(turn * step.copies + step.before);
    }
    for (int64_t k = 0; k < listed_size; ++k) {
      const int n = listed[k];
      const uint64_t code = map.codes[code_number[n]];
      to[n] =
          map.group_base[row_codes.group(code)] + static_cast<int64_t>(row_codes.position(code));
    }
  }
  return -1;
}

// Counting bits is one instruction on any x86-64 since 2008, which the baseline leaves out.
#if defined(__x86_64__) && defined(__GNUC__)
template <bool kMarked, typename Id, typename Code>
__attribute__((target("popcnt"))) int64_t translate_popcnt(const MapView<Code>& map,
                                                           const TableMap& table, const Id* ids,
                                                           int64_t size, int64_t* out) {
  return translate_body<kMarked>(map, table, ids, size, out);
}
#endif

// Addresses of ids from a plain array of one address a row.
template <typename Id>
int64_t translate_flat(const int64_t* addresses, int64_t rows, const Id* ids, int64_t size,
                       int64_t* out) {
  constexpr int64_t kBatch = 64;
  const auto out_of_range = [rows](Id id) {
    return static_cast<uint64_t>(static_cast<int64_t>(id)) >= static_cast<uint64_t>(rows);
  };
  for (int64_t begin = 0; begin < size; begin += kBatch) {
    const int64_t end = size - begin < kBatch ? size : begin + kBatch;
    bool bad = false;
    for (int64_t n = begin; n < end; ++n) bad |= out_of_range(ids[n]);
    if (bad) {
      for (int64_t n = begin; n < end; ++n)
        if (out_of_range(ids[n])) return n;
    }
    for (int64_t n = begin; n < end; ++n) out[n] = addresses[ids[n]];
  }
  return -1;
}

template <bool kMarked, typename Id, typename Code>
int64_t translate_compact(const MapView<Code>& map, const TableMap& table, const Id* ids,
                          int64_t size, int64_t* out) {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool popcnt = __builtin_cpu_supports("popcnt");
  if (popcnt) return translate_popcnt<kMarked>(map, table, ids, size, out);
#endif
  return translate_body<kMarked>(map, table, ids, size, out);
}

template <typename Id, typename Code>
int64_t translate_table(const MapView<Code>& map, const TableMap& table, const Id* ids,
                        int64_t size, int64_t* out) {
  if (table.flat >= 0) return translate_flat(map.flat + table.flat, table.rows, ids, size, out);
  return map.everywhere ? translate_compact<true>(map, table, ids, size, out)
                        : translate_compact<false>(map, table, ids, size, out);
}

}  // namespace oper
