// torch.ops.oper.count and distinct: a batch's ids into counters, its bags by their lengths, and
// its distinct rows.
//
// A batch is a list of columns, each with its ids, its lengths (empty: one id a sample) and the
// table it indexes. Tables, or parts of large ones, are shared out by threads.

#include "oper/profiling/count.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/common/parallel.h"
#include "oper/profiling/bag_lengths.h"
#include "oper/profiling/distinct.h"

namespace oper {
namespace {

// Columns grouped by the table they index.
template <typename Id>
struct TableColumns {
  std::vector<IdColumn<Id>> columns;
  std::vector<int64_t> number;  // of each column, in the batch
  int64_t ids = 0;
};

template <typename Id>
IdColumn<Id> column_of(const at::Tensor& values, const at::Tensor& lengths, int64_t samples,
                       int64_t number) {
  OPER_CHECK_VALUE(values.dim() == 1 && values.is_contiguous(), "column ", number,
                   ": expected contiguous ids in one dimension, got shape ", values.sizes());
  IdColumn<Id> column{values.const_data_ptr<Id>(), values.numel(), nullptr};
  if (lengths.numel() == 0) {
    OPER_CHECK_VALUE(values.numel() == samples, "column ", number, ": expected ", samples,
                     " ids without lengths, one per sample, got ", values.numel());
    return column;
  }
  OPER_CHECK_TYPE(lengths.scalar_type() == at::kInt && lengths.is_contiguous(), "column ", number,
                  ": expected contiguous int32 lengths, got ", lengths.scalar_type());
  OPER_CHECK_VALUE(lengths.numel() == samples, "column ", number, ": expected ", samples,
                   " lengths, got ", lengths.numel());
  column.lengths = lengths.const_data_ptr<int32_t>();
  int64_t sum = 0;
  int32_t shortest = samples > 0 ? column.lengths[0] : 0;
  int32_t longest = 0;
  for (int64_t s = 0; s < samples; ++s) {
    sum += column.lengths[s];
    shortest = std::min(shortest, column.lengths[s]);
    longest = std::max(longest, column.lengths[s]);
  }
  OPER_CHECK_VALUE(shortest >= 0, "column ", number, ": a bag of ", shortest, " ids");
  OPER_CHECK_VALUE(sum == values.numel(), "column ", number, ": lengths sum to ", sum, ", and ",
                   values.numel(), " ids were given");
  column.shortest = shortest;
  column.longest = longest;
  return column;
}

template <typename Id>
std::vector<TableColumns<Id>> columns_of(const at::TensorList values, const at::TensorList lengths,
                                         const at::Tensor& table_of, int64_t tables,
                                         int64_t samples) {
  const auto size = static_cast<int64_t>(values.size());
  OPER_CHECK_VALUE(static_cast<int64_t>(lengths.size()) == size, size, " columns of ids and ",
                   lengths.size(), " of lengths");
  const int64_t* table = elements<int64_t>(table_of, size, "table_of");
  std::vector<TableColumns<Id>> result(tables);
  for (int64_t n = 0; n < size; ++n) {
    check_index(table[n], tables, "table_of", "tables");
    auto& mine = result[table[n]];
    mine.columns.push_back(column_of<Id>(values[n], lengths[n], samples, n));
    mine.number.push_back(n);
    mine.ids += values[n].numel();
  }
  return result;
}

// f(Id{}) with the ids' type, which all columns share.
template <typename F>
auto with_id_type(const at::TensorList values, const F& f) {
  const auto type = values.empty() ? at::kLong : values[0].scalar_type();
  for (const auto& ids : values)
    OPER_CHECK_TYPE(ids.scalar_type() == type, "ids: columns of ", type, " and of ",
                    ids.scalar_type());
  return with_index_type(type, "ids", f);
}

// Batches of fewer ids, about a millisecond's work, are not worth waiting for other threads.
constexpr int64_t kFewIds = 1 << 17;

struct Unit {
  int64_t table;
  RowPart part;
  int64_t ids;
};

// Tables as units of work; those with more ids than a thread's share are cut. Largest first.
template <typename Id>
std::vector<Unit> cut_units(const std::vector<TableColumns<Id>>& tables, int64_t threads) {
  int64_t total = 0;
  for (const auto& table : tables) total += table.ids;
  std::vector<Unit> units;
  for (size_t t = 0; t < tables.size(); ++t) {
    const int64_t ids = tables[t].ids;
    if (tables[t].columns.empty()) continue;
    int bits = 0;
    while ((total << bits) < threads * ids && (int64_t{1} << bits) < threads) ++bits;
    for (uint64_t index = 0; index < uint64_t{1} << bits; ++index)
      units.push_back({static_cast<int64_t>(t), {index, bits}, ids >> bits});
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& a, const Unit& b) { return a.ids > b.ids; });
  return units;
}

// What a unit found of its table's bags; of their lengths the first part of the table speaks alone.
struct UnitBags {
  std::vector<BagLength> lengths;
  int64_t distinct = 0;  // of the part's rows, summed over bags, where several columns have them
};

template <typename Id, typename Counter>
UnitBags run_unit(const Unit& unit, const TableColumns<Id>& mine, int64_t samples,
                  const TableCounters<Counter>& counters, SeenRows& seen, int64_t* bad) {
  UnitBags bags;
  // Every part of a table sees all its bags and ids, and one of them reports.
  const bool reports = unit.part.index == 0;
  if (reports) bags.lengths = count_bag_lengths(mine.columns, samples);
  if (mine.ids == 0) return bags;
  std::vector<BadIds> found(mine.columns.size());
  if (counters.samples_with_row) {
    const auto count = [&](auto several) {
      return count_samples<several>(mine.columns, samples, counters, unit.part, seen, found.data());
    };
    bags.distinct = mine.columns.size() > 1 ? count(std::true_type{}) : count(std::false_type{});
  } else {
    for (size_t c = 0; c < mine.columns.size(); ++c)
      found[c] = count_accesses(mine.columns[c], counters, unit.part);
    if (reports && mine.columns.size() > 1) bags.distinct = mine.ids;
  }
  for (size_t c = 0; reports && c < mine.columns.size(); ++c) {
    bad[2 * mine.number[c]] = found[c].first;
    bad[2 * mine.number[c] + 1] = found[c].count;
  }
  return bags;
}

// Where each table's counters are, checked against the memory they lie in.
template <typename Counter>
std::vector<TableCounters<Counter>> counters_of_tables(const at::Tensor& accesses,
                                                       const at::Tensor& samples_with_row,
                                                       const at::Tensor& offsets,
                                                       const at::Tensor& samples_with_row_start) {
  check_same_type(samples_with_row, "samples_with_row", accesses, "accesses");
  check_contiguous(samples_with_row, "samples_with_row");
  const int64_t tables = offsets.numel() - 1;
  check_size(tables, 0, kMostThings, "offsets: tables");
  const int64_t* first = elements<int64_t>(offsets, tables + 1, "offsets");
  const int64_t* start =
      elements<int64_t>(samples_with_row_start, tables, "samples_with_row_start");
  auto* a = static_cast<Counter*>(accesses.mutable_data_ptr());
  auto* c = static_cast<Counter*>(samples_with_row.mutable_data_ptr());
  std::vector<TableCounters<Counter>> result;
  for (int64_t t = 0; t < tables; ++t) {
    OPER_CHECK_VALUE(first[t] >= 0 && first[t] <= first[t + 1] && first[t + 1] <= accesses.numel(),
                     "offsets: table ", t, " is not within ", accesses.numel(), " counters");
    const int64_t rows = first[t + 1] - first[t];
    OPER_CHECK_VALUE(start[t] < 0 || start[t] <= samples_with_row.numel() - rows,
                     "samples_with_row_start: table ", t, " ends beyond ", samples_with_row.numel(),
                     " counters");
    result.push_back(
        {a + first[t], start[t] < 0 ? nullptr : c + start[t], static_cast<uint64_t>(rows)});
  }
  return result;
}

// Table, length and number of bags of each length that a table's bags have, [N, 3], and the rows of
// each table's bags, each once a bag, [T], of tables with several columns.
std::tuple<at::Tensor, at::Tensor> bag_tensors(const std::vector<Unit>& units,
                                               const std::vector<UnitBags>& found, int64_t tables) {
  int64_t size = 0;
  for (const auto& bags : found) size += static_cast<int64_t>(bags.lengths.size());
  at::Tensor pairs = at::empty({size, 3}, at::kLong);
  at::Tensor distinct = at::zeros({tables}, at::kLong);
  auto* next = pairs.data_ptr<int64_t>();
  auto* of_table = distinct.data_ptr<int64_t>();
  for (size_t n = 0; n < units.size(); ++n) {
    of_table[units[n].table] += found[n].distinct;
    for (const auto& [length, bags] : found[n].lengths) {
      *next++ = units[n].table;
      *next++ = length;
      *next++ = bags;
    }
  }
  return {pairs, distinct};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> count(
    const at::Tensor& accesses, const at::Tensor& samples_with_row, const at::Tensor& offsets,
    const at::Tensor& samples_with_row_start, const at::TensorList values,
    const at::TensorList lengths, const at::Tensor& table_of, int64_t samples) {
  at::Tensor bad = at::zeros({static_cast<int64_t>(values.size()), 2}, at::kLong);
  auto* bad_ids = bad.data_ptr<int64_t>();
  for (size_t n = 0; n < values.size(); ++n) bad_ids[2 * n] = -1;
  at::Tensor bag_lengths, distinct;
  with_counter_type(accesses, "accesses", [&](auto zero) {
    using Counter = decltype(zero);
    const auto counters =
        counters_of_tables<Counter>(accesses, samples_with_row, offsets, samples_with_row_start);
    with_id_type(values, [&](auto id) {
      const auto tables = columns_of<decltype(id)>(values, lengths, table_of,
                                                   static_cast<int64_t>(counters.size()), samples);
      int64_t ids = 0;
      for (const auto& column : values) ids += column.numel();
      const auto units = cut_units(tables, ids < kFewIds ? 1 : at::get_num_threads());
      std::vector<UnitBags> found(units.size());
      const auto work = [&](const auto& next) {
        SeenRows seen;
        for (int64_t n = next(); n >= 0; n = next()) {
          const int64_t t = units[n].table;
          found[n] = run_unit(units[n], tables[t], samples, counters[t], seen, bad_ids);
        }
      };
      const auto size = static_cast<int64_t>(units.size());
      if (ids < kFewIds) {
        int64_t n = 0;
        work([&] { return n < size ? n++ : -1; });
      } else {
        share_out(size, work);
      }
      std::tie(bag_lengths, distinct) =
          bag_tensors(units, found, static_cast<int64_t>(counters.size()));
    });
  });
  return {bad, bag_lengths, distinct};
}

std::tuple<at::Tensor, at::Tensor> distinct(const at::TensorList values,
                                            const at::TensorList lengths,
                                            const at::Tensor& table_of, int64_t tables,
                                            int64_t samples, int64_t ranks) {
  check_size(ranks, 1, kMostThings, "ranks");
  check_size(tables, 0, kMostThings, "tables");
  check_size(samples, 0, kMostRows, "samples");
  at::Tensor of_ranks = at::zeros({tables}, at::kLong);
  at::Tensor of_all = at::zeros({tables}, at::kLong);
  auto* ranks_rows = of_ranks.data_ptr<int64_t>();
  auto* all_rows = of_all.data_ptr<int64_t>();
  with_id_type(values, [&](auto id) {
    const auto columns = columns_of<decltype(id)>(values, lengths, table_of, tables, samples);
    share_out(tables, [&](const auto& next) {
      for (int64_t t = next(); t >= 0; t = next()) {
        const auto found = count_distinct(columns[t].columns, samples, ranks);
        ranks_rows[t] = found.of_ranks;
        all_rows[t] = found.of_all;
      }
    });
  });
  return {of_ranks, of_all};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "count(Tensor(a!) accesses, Tensor(b!) samples_with_row, Tensor offsets, Tensor "
      "samples_with_row_start,"
      " Tensor[] values, Tensor[] lengths, Tensor table_of, int samples) -> (Tensor bad, Tensor"
      " bag_lengths, Tensor distinct)");
  m.def(
      "distinct(Tensor[] values, Tensor[] lengths, Tensor table_of, int tables, int samples,"
      " int ranks) -> (Tensor of_ranks, Tensor of_all)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("count", count);
  m.impl("distinct", distinct);
}

}  // namespace oper
