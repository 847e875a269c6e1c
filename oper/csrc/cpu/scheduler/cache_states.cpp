// torch.classes.oper.BulkSynchronous and BoundedStaleness: the caches of all workers, a batch a
// call.
//
// A batch is looked up once: what comes back are the numbers of the distinct rows of its samples,
// to be given to the calls that score the samples and train them. They are those of this object,
// and batches are trained in the order in which they were looked up; both are checked.

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/scheduler/room.h"
#include "oper/scheduler/bounded_staleness.h"
#include "oper/scheduler/bulk_synchronous.h"
#include "oper/scheduler/grouping.h"

namespace oper {
namespace {

constexpr int64_t kMostWidths = 64;
constexpr int64_t kMostWeight = 1 << 20;  // what an update may count
constexpr int64_t kMostRounds = 1024;
constexpr double kSlowest = 1e12;  // times as slow as the fastest link

template <typename Caches>
Caches caches_of(int64_t workers, const at::Tensor& capacity, int64_t policy) {
  check_size(workers, 1, Caches::kMostWorkers, "workers");
  check_size(capacity.numel(), 1, kMostWidths, "capacity");
  check_size(policy, 0, static_cast<int64_t>(Policy::kEmark), "policy");
  const int64_t* const rows = elements<int64_t>(capacity, "capacity");
  for (int64_t n = 0; n < capacity.numel(); ++n) check_size(rows[n], 0, kMostRows, "capacity");
  return {static_cast<int>(workers), {rows, rows + capacity.numel()}, static_cast<Policy>(policy)};
}

// Addresses in order. ValueError where one is there twice.
std::vector<uint64_t> sorted(std::vector<uint64_t> addresses, const char* name) {
  std::sort(addresses.begin(), addresses.end());
  const auto twice = std::adjacent_find(addresses.begin(), addresses.end());
  OPER_CHECK_VALUE(twice == addresses.end(), name, ": ", twice == addresses.end() ? 0 : *twice,
                   " is there twice");
  return addresses;
}

std::vector<RowBytes> bytes_of(const at::Tensor& bytes, int64_t widths) {
  const auto* const given = structs<RowBytes>(bytes, "bytes");
  OPER_CHECK_VALUE(bytes.size(0) == widths, "bytes: expected those of ", widths, " widths, got ",
                   bytes.size(0));
  return {given, given + widths};
}

// What both kinds of caches offer to Python.
template <typename States>
class CacheStates : public torch::CustomClassHolder {
 public:
  template <typename... Arguments>
  CacheStates(int64_t workers, const at::Tensor& capacity, const at::Tensor& bytes, int64_t policy,
              Arguments... arguments)
      : states_(caches_of<typename States::Caches>(workers, capacity, policy),
                bytes_of(bytes, capacity.numel()), arguments...) {}

  // (rows int32 [R], offsets [samples + 1], positions [R]) of addresses [N] with offsets.
  std::tuple<at::Tensor, at::Tensor, at::Tensor> look_up(const at::Tensor& addresses,
                                                         const at::Tensor& offsets) {
    const int64_t samples = offsets.numel() - 1;
    const int64_t* const starts = elements<int64_t>(offsets, "offsets");
    check_offsets_from_zero(starts, samples, "offsets", "sample");
    const int64_t* const given = elements<int64_t>(addresses, starts[samples], "addresses");
    for (int64_t n = 0; n < starts[samples]; ++n)
      OPER_CHECK_INDEX(width_of(static_cast<uint64_t>(given[n])) < states_.caches().widths(),
                       "addresses: ", given[n], " is of a width that the caches do not have");
    at::Tensor numbers = at::empty({starts[samples]}, at::kInt);
    at::Tensor distinct = at::empty({samples + 1}, at::kLong);
    at::Tensor places = at::empty({starts[samples]}, at::kLong);
    static_assert(sizeof(RowNumber) == sizeof(int32_t));
    auto* const ends = distinct.data_ptr<int64_t>();
    states_.caches().look_up(given, starts, samples,
                             reinterpret_cast<RowNumber*>(numbers.data_ptr<int32_t>()),
                             places.data_ptr<int64_t>(), ends);
    numbers.resize_({ends[samples]});
    places.resize_({ends[samples]});
    const int32_t* const found = numbers.const_data_ptr<int32_t>();
    waiting_.push_back({numbers, {found, found + numbers.numel()}});
    return {numbers, distinct, places};
  }

  // (addresses [R], copies [R]): the rows that are cached, and by how many workers.
  std::tuple<at::Tensor, at::Tensor> cached() const {
    std::vector<int64_t> addresses, copies;
    const auto& caches = states_.caches();
    caches.for_each_cached([&](RowNumber row) {
      addresses.push_back(static_cast<int64_t>(caches.address(row)));
      copies.push_back(__builtin_popcountll(caches.cached(row)));
    });
    const auto size = static_cast<int64_t>(addresses.size());
    at::Tensor rows = at::empty({size}, at::kLong), counts = at::empty({size}, at::kLong);
    std::copy(addresses.begin(), addresses.end(), rows.data_ptr<int64_t>());
    std::copy(copies.begin(), copies.end(), counts.data_ptr<int64_t>());
    return {rows, counts};
  }

  at::Tensor latest_rows(const at::Tensor& rows, const at::Tensor& offsets) const {
    const int64_t samples = check_batch(rows, offsets);
    at::Tensor scores = at::empty({samples, states_.caches().workers()}, at::kDouble);
    states_.latest_rows(rows.const_data_ptr<int32_t>(), offsets.const_data_ptr<int64_t>(), samples,
                        scores.template data_ptr<double>());
    return scores;
  }

  at::Tensor expected_costs(const at::Tensor& rows, const at::Tensor& offsets,
                            const at::Tensor& seconds_per_byte) const {
    const int64_t samples = check_batch(rows, offsets);
    const double* const seconds =
        elements<double>(seconds_per_byte, states_.caches().workers(), "seconds_per_byte");
    at::Tensor costs = at::empty({samples, states_.caches().workers()}, at::kDouble);
    states_.expected_costs(rows.const_data_ptr<int32_t>(), offsets.const_data_ptr<int64_t>(),
                           samples, seconds, costs.template data_ptr<double>());
    return costs;
  }

  // The worker of each sample [samples], room[w] of them at the most by worker w, after so many
  // rounds that bring samples together that share rows.
  at::Tensor group(const at::Tensor& rows, const at::Tensor& offsets,
                   const at::Tensor& seconds_per_byte, const at::Tensor& room, int64_t rounds) {
    const int64_t samples = check_batch(rows, offsets);
    check_size(rounds, 1, kMostRounds, "rounds");
    const int workers = states_.caches().workers();
    static_assert(Grouping::kMostWorkers >= States::Caches::kMostWorkers);
    // In units of the fastest link's, so that they are neither too large nor too small for floats.
    const double* const given = elements<double>(seconds_per_byte, workers, "seconds_per_byte");
    for (int w = 0; w < workers; ++w)
      OPER_CHECK_VALUE(given[w] > 0 && std::isfinite(given[w]),
                       "seconds_per_byte: all must be finite, and above 0");
    const double fastest = *std::min_element(given, given + workers);
    std::vector<double> seconds(workers);
    for (int w = 0; w < workers; ++w) seconds[w] = std::min(given[w] / fastest, kSlowest);
    const std::vector<int64_t> most = checked_room(room, workers, samples);
    const auto cost_of = [&](int32_t row) {
      return states_.row_cost(static_cast<RowNumber>(row), seconds.data());
    };
    places_.resize(states_.caches().rows());
    at::Tensor grouped = at::empty({samples}, at::kLong);
    Grouping(rows.const_data_ptr<int32_t>(), offsets.const_data_ptr<int64_t>(), samples, cost_of,
             seconds.data(), workers, places_)
        .assign(most, rounds, grouped.data_ptr<int64_t>());
    return grouped;
  }

  // What each worker transmitted, [M, fields of Transmissions].
  at::Tensor train(const at::Tensor& rows, const at::Tensor& offsets,
                   const at::Tensor& assignment) {
    at::Tensor moved = read(rows, offsets, assignment);
    moved += update();
    return moved;
  }

  // The first half of it: what is transmitted before the batch is trained.
  at::Tensor read(const at::Tensor& rows, const at::Tensor& offsets, const at::Tensor& assignment) {
    const int64_t samples = check_batch(rows, offsets);
    OPER_CHECK_VALUE(!waiting_.empty() && waiting_.front().rows.is_same(rows),
                     "rows: not those of the next batch that was looked up");
    const int64_t* const workers = elements<int64_t>(assignment, samples, "assignment");
    for (int64_t s = 0; s < samples; ++s)
      check_index(workers[s], states_.caches().workers(), "assignment", "workers");
    const int32_t* const numbers = rows.const_data_ptr<int32_t>();
    const int64_t* const starts = offsets.const_data_ptr<int64_t>();
    end();
    states_.begin(numbers, starts, samples, workers);
    check_fits();
    at::Tensor moved = none_moved();
    states_.read(transmissions(moved));
    waiting_.erase(waiting_.begin());
    reading_ = true;
    return moved;
  }

  // The second half: the batch that was read is trained.
  at::Tensor update() {
    OPER_CHECK_VALUE(reading_, "update: no batch was read since the last one");
    reading_ = false;
    at::Tensor moved = none_moved();
    states_.update(transmissions(moved));
    return moved;
  }

  // Instead of it: the batch that was read is not trained.
  void end() {
    if (reading_) states_.end();
    reading_ = false;
  }

  // The tier gets what it lacks of the rows at these addresses, and trains them by itself.
  at::Tensor settle(const at::Tensor& addresses) {
    at::Tensor moved = none_moved();
    const int64_t* const given = elements<int64_t>(addresses, "addresses");
    for (int64_t n = 0; n < addresses.numel(); ++n) {
      const RowNumber row = states_.caches().find(static_cast<uint64_t>(given[n]));
      if (row != RowIndex::kNone) states_.settle(row, transmissions(moved));
    }
    return moved;
  }

  // The rows at the addresses `from` [N] are at `to` from now on. The tier gets what it lacks of
  // them; copies stay as they are.
  at::Tensor move(const at::Tensor& from, const at::Tensor& to) {
    const int64_t size = from.numel();
    const int64_t* const given = elements<int64_t>(from, "from");
    const int64_t* const places = elements<int64_t>(to, size, "to");
    auto& caches = states_.caches();
    std::vector<RowNumber> rows;
    std::vector<uint64_t> before, after;
    for (int64_t n = 0; n < size; ++n) {
      const auto address = static_cast<uint64_t>(given[n]);
      const auto place = static_cast<uint64_t>(places[n]);
      OPER_CHECK_INDEX(width_of(place) == width_of(address), "to: ", places[n],
                       " is of another width than the row at ", given[n]);
      const RowNumber row = caches.find(address);
      if (row == RowIndex::kNone) continue;
      rows.push_back(row);
      before.push_back(address);
      after.push_back(place);
    }
    const std::vector<uint64_t> leaving = sorted(before, "from");
    for (const uint64_t place : sorted(after, "to"))
      OPER_CHECK_VALUE(caches.find(place) == RowIndex::kNone ||
                           std::binary_search(leaving.begin(), leaving.end(), place),
                       "to: ", place, " is the address of a row that stays");
    at::Tensor moved = none_moved();
    for (const RowNumber row : rows) states_.flush(row, transmissions(moved));
    caches.rename(before.data(), after.data(), rows.size());
    return moved;
  }

  // The numbers of the rows at these addresses, -1 of those that are not known.
  at::Tensor numbers(const at::Tensor& addresses) const {
    const int64_t* const given = elements<int64_t>(addresses, "addresses");
    at::Tensor found = at::empty({addresses.numel()}, at::kLong);
    for (int64_t n = 0; n < addresses.numel(); ++n) {
      const RowNumber row = states_.caches().find(static_cast<uint64_t>(given[n]));
      found.data_ptr<int64_t>()[n] = row == RowIndex::kNone ? -1 : int64_t{row};
    }
    return found;
  }

  // Write down the moves from now on, to be taken by `moves`, [moves, fields of Move].
  void record() { states_.moves().record(); }
  at::Tensor moves() {
    const std::vector<Move> taken = states_.moves().take();
    at::Tensor found = at::empty({static_cast<int64_t>(taken.size()), kMoveFields}, at::kLong);
    std::copy(taken.begin(), taken.end(), reinterpret_cast<Move*>(found.data_ptr<int64_t>()));
    return found;
  }

  // The width of each row.
  at::Tensor widths_of(const at::Tensor& rows) const {
    check_rows(rows);
    at::Tensor widths = at::empty({rows.numel()}, at::kLong);
    const int32_t* const numbers = rows.const_data_ptr<int32_t>();
    for (int64_t n = 0; n < rows.numel(); ++n)
      widths.data_ptr<int64_t>()[n] = states_.caches().width(numbers[n]);
    return widths;
  }

  at::Tensor flush() {
    at::Tensor moved = none_moved();
    states_.flush(transmissions(moved));
    return moved;
  }

 private:
  at::Tensor none_moved() const {
    return at::zeros({states_.caches().workers(), kTransmissionFields}, at::kLong);
  }

  static Transmissions* transmissions(at::Tensor& moved) {
    return reinterpret_cast<Transmissions*>(moved.data_ptr<int64_t>());
  }

  void check_rows(const at::Tensor& rows) const {
    const int32_t* const numbers = elements<int32_t>(rows, "rows");
    // Rows of a batch that waits, or of its first samples, are known. Others are looked at one by
    // one.
    for (const Waiting& batch : waiting_)
      if (batch.rows.template const_data_ptr<int32_t>() == numbers &&
          rows.numel() <= static_cast<int64_t>(batch.numbers.size()) &&
          std::equal(numbers, numbers + rows.numel(), batch.numbers.begin()))
        return;
    const auto& caches = states_.caches();
    for (int64_t n = 0; n < rows.numel(); ++n) {
      check_index(numbers[n], caches.rows(), "rows", "rows");
      OPER_CHECK_VALUE(caches.known(numbers[n]), "rows: of a batch that was trained, and of which ",
                       numbers[n], " is forgotten");
    }
  }

  int64_t check_batch(const at::Tensor& rows, const at::Tensor& offsets) const {
    check_rows(rows);
    const int64_t samples = offsets.numel() - 1;
    const int64_t* const starts = elements<int64_t>(offsets, "offsets");
    check_offsets_from_zero(starts, samples, "offsets", "sample");
    OPER_CHECK_VALUE(starts[samples] == rows.numel(), "offsets: end at ", starts[samples],
                     ", and there are ", rows.numel(), " rows");
    return samples;
  }

  // ValueError where the rows that a worker trains do not fit its cache.
  void check_fits() {
    auto& caches = states_.caches();
    const int64_t widths = caches.widths();
    const auto& needed = caches.needed();
    for (int64_t n = 0; n < static_cast<int64_t>(needed.size()); ++n) {
      if (needed[n] <= caches.capacity(static_cast<int>(n % widths))) continue;
      caches.abandon();
      OPER_CHECK_VALUE(false, "rows: more than a worker's cache holds");
    }
  }

  // A batch that was looked up: what Python got, and may have changed since, and what it was.
  struct Waiting {
    at::Tensor rows;
    std::vector<int32_t> numbers;
  };

  States states_;
  std::vector<Waiting> waiting_;
  bool reading_ = false;          // a batch that is not trained yet
  std::vector<uint32_t> places_;  // for grouping
};

// What records of caches take, [4]: a row's, each worker's copy of it, the number of a row, and the
// order in which a worker's rows leave, for each that it caches.
at::Tensor record_bytes(bool bounded, int64_t policy) {
  check_size(policy, 0, static_cast<int64_t>(Policy::kEmark), "policy");
  const auto order = static_cast<Policy>(policy);
  const auto of = [&](auto* none) {
    using Caches = std::remove_pointer_t<decltype(none)>;
    at::Tensor bytes = at::empty({4}, at::kLong);
    auto* const found = bytes.data_ptr<int64_t>();
    found[0] = Caches::bytes_of_row();
    found[1] = Caches::bytes_of_copy(order);
    found[2] = RowIndex::bytes_of_number();
    found[3] = Caches::bytes_of_order(order);
    return bytes;
  };
  return bounded ? of(static_cast<BoundedStaleness::Caches*>(nullptr))
                 : of(static_cast<BulkSynchronous::Caches*>(nullptr));
}

using BulkSynchronousCaches = CacheStates<BulkSynchronous>;
using BoundedStalenessCaches = CacheStates<BoundedStaleness>;

template <typename Class>
void define(torch::class_<Class>& c) {
  c.def("look_up", &Class::look_up)
      .def("cached", &Class::cached)
      .def("latest_rows", &Class::latest_rows)
      .def("expected_costs", &Class::expected_costs)
      .def("group", &Class::group)
      .def("train", &Class::train)
      .def("read", &Class::read)
      .def("update", &Class::update)
      .def("settle", &Class::settle)
      .def("move", &Class::move)
      .def("numbers", &Class::numbers)
      .def("record", &Class::record)
      .def("moves", &Class::moves)
      .def("widths_of", &Class::widths_of)
      .def("flush", &Class::flush);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  auto bulk = m.class_<BulkSynchronousCaches>("BulkSynchronous");
  bulk.def(torch::init([](int64_t workers, const at::Tensor& capacity, const at::Tensor& bytes,
                          int64_t policy, int64_t pushes) {
    check_size(pushes, 0, static_cast<int64_t>(Pushes::kPeer), "pushes");
    return c10::make_intrusive<BulkSynchronousCaches>(workers, capacity, bytes, policy,
                                                      static_cast<Pushes>(pushes));
  }));
  define(bulk);
  auto bounded = m.class_<BoundedStalenessCaches>("BoundedStaleness");
  bounded.def(torch::init([](int64_t workers, const at::Tensor& capacity, const at::Tensor& bytes,
                             int64_t policy, int64_t staleness, bool exact, int64_t batch_weight) {
    check_size(staleness, 0, kMostBytes, "staleness");
    check_size(batch_weight, 0, kMostWeight, "batch_weight");
    return c10::make_intrusive<BoundedStalenessCaches>(workers, capacity, bytes, policy, staleness,
                                                       exact, batch_weight);
  }));
  define(bounded);
  m.def("cache_record_bytes(bool bounded, int policy) -> Tensor", record_bytes);
}

}  // namespace oper
