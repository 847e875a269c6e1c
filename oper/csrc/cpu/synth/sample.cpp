// torch.ops.oper: ranks drawn from a popularity law, their rows, and whole tables of counts.
//
// A law is given as (rows, exponent, step_ends, step_weights): bounded Zipf where there are no
// steps. Everything is a function of the keys given, for any number of threads.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cpu/common/arguments.h"
#include "cpu/common/parallel.h"
#include "oper/common/random.h"
#include "oper/synth/id_bijection.h"
#include "oper/synth/popularity.h"

namespace oper {
namespace {

using at::Tensor;

// Ranks counted as one piece of work. Part of the output: another size draws other numbers.
constexpr int64_t kBlock = 1 << 16;
constexpr int64_t kGrain = 1 << 14;
// Ranks to draw from, and samples to draw: sums of two stay integers of 64 bits.
constexpr int64_t kMostDrawn = int64_t{1} << 62;

template <typename Body>
void with_law(int64_t rows, double exponent, const Tensor& ends, const Tensor& weights, Body body) {
  check_size(rows, 1, kMostDrawn, "rows");
  if (ends.numel() == 0) {
    OPER_CHECK_VALUE(exponent >= 0 && exponent <= 1e3, "exponent: expected 0 to 1000, got ",
                     exponent);
    body(Zipf(rows, exponent));
  } else {
    OPER_CHECK_VALUE(ends.numel() == weights.numel(), "step_weights: expected ", ends.numel(),
                     ", one per step, got ", weights.numel());
    const int64_t* const end = elements<int64_t>(ends, "step_ends");
    const double* const weight = elements<double>(weights, "step_weights");
    double heaviest = 0;
    for (int64_t j = 0; j < ends.numel(); ++j) {
      OPER_CHECK_VALUE(end[j] >= (j ? end[j - 1] : 0), "step_ends: must ascend from 0 or more");
      OPER_CHECK_VALUE(weight[j] >= 0 && weight[j] <= 1e300, "step_weights: ", weight[j]);
      heaviest = std::max(heaviest, weight[j]);
    }
    OPER_CHECK_VALUE(heaviest > 0, "step_weights: all are 0");
    const Steps law(end, weight, ends.numel());
    OPER_CHECK_VALUE(law.rows() == rows, "steps of ", law.rows(), " rows for ", rows);
    body(law);
  }
}

Tensor draw_ranks(const Tensor& shares, int64_t rows, double exponent, const Tensor& step_ends,
                  const Tensor& step_weights) {
  const Tensor in = shares.contiguous();
  Tensor ranks = at::empty(in.sizes(), in.options().dtype(at::kLong));
  const double* share = elements<double>(in, "shares");
  int64_t* rank = ranks.mutable_data_ptr<int64_t>();
  with_law(rows, exponent, step_ends, step_weights, [&](const auto& law) {
    at::parallel_for(0, in.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) rank[i] = law.rank_at(share[i]);
    });
  });
  return ranks;
}

Placement placement_of(int64_t rows, int64_t order, int64_t key, bool moved) {
  // Beyond what tables have: labels are drawn by places among 2^52 rows.
  check_size(rows, 1, kMostDrawn, "rows");
  check_size(order, 0, static_cast<int64_t>(Order::kAge), "order");
  return {rows, static_cast<Order>(order), static_cast<uint64_t>(key), moved};
}

Tensor place_ranks(const Tensor& ranks, int64_t rows, int64_t order, int64_t key, bool moved) {
  const Tensor in = ranks.contiguous();
  const int64_t* rank = elements<int64_t>(in, "ranks");
  Tensor placed = at::empty_like(in);
  int64_t* row = placed.mutable_data_ptr<int64_t>();
  const Placement placement = placement_of(rows, order, key, moved);
  // A rank beyond the rows might never come back to them on its cycle.
  for (int64_t i = 0; i < in.numel(); ++i) check_index(rank[i], rows, "ranks", "rows");
  at::parallel_for(0, in.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row[i] = placement(rank[i]);
  });
  return placed;
}

// Adds to counts at scattered rows, each some time after it is known: waiting for the cache line
// would take longer than drawing the number.
template <typename Count>
class ScatteredAdds {
 public:
  explicit ScatteredAdds(Count* counts) : counts_(counts) {}
  ~ScatteredAdds() {
    for (int64_t i = std::max<int64_t>(0, added_ - kWaiting); i < added_; ++i) apply(i);
  }
  void add(int64_t row, int64_t count) {
    if (added_ >= kWaiting) apply(added_ - kWaiting);
    __builtin_prefetch(&counts_[row], 1);
    row_[added_ % kWaiting] = row;
    count_[added_ % kWaiting] = static_cast<Count>(count);
    ++added_;
  }

 private:
  static constexpr int64_t kWaiting = 32;
  void apply(int64_t i) { counts_[row_[i % kWaiting]] += count_[i % kWaiting]; }

  Count* counts_;
  int64_t row_[kWaiting] = {};
  Count count_[kWaiting] = {};
  int64_t added_ = 0;
};

// Adds to counts[row] a multinomial sample of `accesses`, exact in sum, by conditional binomials:
// first blocks of ranks among each other, then the ranks of each block.
template <typename Count, typename Law>
void add_counts(Count* counts, const Law& law, const Placement& placement, int64_t accesses,
                uint64_t key) {
  const int64_t rows = law.rows();
  const int64_t blocks = (rows + kBlock - 1) / kBlock;
  std::vector<double> block_mass(blocks);
  std::vector<int64_t> block_accesses(blocks);
  double mass = 0;
  for (int64_t block = blocks - 1; block >= 0; --block) {  // the small ones first: less rounding
    block_mass[block] = law.mass(block * kBlock, std::min(rows, (block + 1) * kBlock));
    mass += block_mass[block];
  }
  Random random(key, blocks);
  for (int64_t block = 0; block < blocks; ++block) {
    const double share = block + 1 == blocks ? 1.0 : block_mass[block] / mass;
    block_accesses[block] = binomial(random, accesses, share);
    mass -= block_mass[block];
    accesses -= block_accesses[block];
  }
  share_out(blocks, [&](const auto& next) {
    for (int64_t block; (block = next()) >= 0;) {
      Random random(key, block);
      ScatteredAdds<Count> adds(counts);
      const int64_t end = std::min(rows, (block + 1) * kBlock);
      int64_t left = block_accesses[block];
      double mass = block_mass[block];
      auto weights = law.weights_from(block * kBlock);
      for (int64_t rank = block * kBlock; rank < end && left > 0; ++rank) {
        const double weight = weights.next();
        const int64_t count = binomial(random, left, rank + 1 == end ? 1.0 : weight / mass);
        mass -= weight;
        left -= count;
        if (count) adds.add(placement(rank), count);
      }
    }
  });
}

Tensor& draw_counts(Tensor& counts, int64_t accesses, double exponent, const Tensor& step_ends,
                    const Tensor& step_weights, int64_t order, int64_t key, bool moved,
                    int64_t stream) {
  check_size(accesses, 0, std::numeric_limits<int64_t>::max(), "accesses");
  const Placement placement = placement_of(counts.numel(), order, key, moved);
  with_law(counts.numel(), exponent, step_ends, step_weights, [&](const auto& law) {
    with_counter_type(counts, "counts", [&](auto zero) {
      add_counts(counts.mutable_data_ptr<decltype(zero)>(), law, placement, accesses, stream);
    });
  });
  return counts;
}

// How many of `samples` bags hold a row with `accesses` accesses, each slot of a bag as likely as
// any other. `slots` slots a bag; 0: bags of random length, so that accesses fall independently.
int64_t draw_samples_with_row(Random& random, int64_t accesses, int64_t samples, int64_t slots) {
  constexpr int64_t kOneByOne = 64;
  if (accesses <= 1) return accesses;
  const double bags = static_cast<double>(samples);
  if (accesses <= kOneByOne) {
    int64_t bags_hit = 1;
    for (int64_t placed = 1; placed < accesses; ++placed) {
      const double chance_again =
          slots ? static_cast<double>(bags_hit * slots - placed) / (bags * slots - placed)
                : bags_hit / bags;
      bags_hit += random.uniform() >= chance_again;
    }
    return bags_hit;
  }
  // Beyond, the number is close to normal. With c = accesses per bag and a = accesses per slot, a
  // bag is missed with chance q = (1 - a)^slots (e^-c where bags have any length).
  const double c = static_cast<double>(accesses) / bags;
  const double a = slots ? std::min(1.0, c / slots) : 0.0;
  const double q = slots ? std::pow(1 - a, slots) : std::exp(-c);
  const double variance = a < 1 ? bags * (q * (1 - q) - q * q * c / (1 - a)) : 0.0;
  const double drawn = bags * (1 - q) + std::sqrt(std::max(0.0, variance)) * random.normal();
  const int64_t least = slots ? (accesses + slots - 1) / slots : 1;
  return std::clamp(static_cast<int64_t>(std::llround(drawn)), least, std::min(accesses, samples));
}

Tensor& samples_with_row_of(Tensor& samples_with_row, const Tensor& counts, int64_t samples,
                            int64_t slots, int64_t key) {
  check_same_type(samples_with_row, "samples_with_row", counts, "counts");
  check_contiguous(samples_with_row, "samples_with_row");
  check_size(samples, 1, kMostDrawn, "samples");
  check_size(slots, 0, kMostRows, "slots");
  OPER_CHECK_VALUE(samples_with_row.numel() == counts.numel(), "samples_with_row: expected ",
                   counts.numel(), " counters, got ", samples_with_row.numel());
  with_counter_type(counts, "counts", [&](auto zero) {
    const auto* const in = counts.const_data_ptr<decltype(zero)>();
    auto* const out = samples_with_row.mutable_data_ptr<decltype(zero)>();
    at::parallel_for(0, counts.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        Random random(key, row);
        out[row] = draw_samples_with_row(random, static_cast<int64_t>(in[row]), samples, slots);
      }
    });
  });
  return samples_with_row;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(
      "draw_ranks(Tensor shares, int rows, float exponent, Tensor step_ends, Tensor step_weights) "
      "-> Tensor");
  m.def("place_ranks(Tensor ranks, int rows, int order, int key, bool moved) -> Tensor");
  m.def(
      "draw_counts(Tensor(a!) counts, int accesses, float exponent, Tensor step_ends, "
      "Tensor step_weights, int order, int key, bool moved, int stream) -> Tensor(a!)");
  m.def(
      "samples_with_row_of(Tensor(a!) samples_with_row, Tensor counts, int samples, int slots, int "
      "key) "
      "-> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(oper, CPU, m) {
  m.impl("draw_ranks", draw_ranks);
  m.impl("place_ranks", place_ranks);
  m.impl("draw_counts", draw_counts);
  m.impl("samples_with_row_of", samples_with_row_of);
}

}  // namespace oper
