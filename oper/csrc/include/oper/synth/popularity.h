// Popularity laws of a table's rows by rank, the hottest first: bounded Zipf and step functions.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

namespace oper {

// Rank r = 0 .. rows-1 has weight (r + 1)^-z.
//
// Sums of weights are added up one by one over the first ranks and follow from the Euler-Maclaurin
// formula at half integers, x = r + ½, beyond them:
//   Σ_{k=a+1}^{b} k^-z = [I(x) + z/24 x^(-z-1)] from a+½ to b+½,   I(x) = ∫_1^x t^-z dt.
// Its next term is below 1e-11 of one weight there, and the formula can be inverted in closed form.
class Zipf {
 public:
  Zipf(int64_t rows, double exponent)
      : rows_(rows),
        z_(exponent),
        cumulative_(std::min(rows, kHead) + 1, 0.0) {
    for (size_t k = 1; k < cumulative_.size(); ++k)
      cumulative_[k] = cumulative_[k - 1] + std::pow(static_cast<double>(k), -z_);
    total_ = mass_below(rows);
  }

  int64_t rows() const { return rows_; }

  // The weights of ranks begin, begin + 1 … in turn: each from the one before, times
  // (1 + 1/k)^-z by its series, as long as that is exact and its rounding has not added up.
  class Weights {
   public:
    Weights(double exponent, int64_t begin) : z_(exponent), k_(begin + 1) {}
    double next() {
      if (k_ < kHead || k_ % 256 == 0 || weight_ == 0) {
        weight_ = std::pow(static_cast<double>(k_), -z_);
      } else {
        const double e = 1.0 / static_cast<double>(k_ - 1);
        const double inner = 1 - (z_ + 2) / 3 * e * (1 - (z_ + 3) / 4 * e);
        weight_ *= 1 - z_ * e * (1 - (z_ + 1) / 2 * e * inner);
      }
      ++k_;
      return weight_;
    }

   private:
    double z_;
    int64_t k_;
    double weight_ = 0;
  };
  Weights weights_from(int64_t begin) const { return {z_, begin}; }

  // Sum of the weights of ranks begin .. end-1.
  double mass(int64_t begin, int64_t end) const {
    if (begin >= kHead) return primitive(half(end)) - primitive(half(begin));
    return mass_below(end) - mass_below(begin);
  }

  // The rank at which the cumulative share of the weights, from the hottest on, passes `share`.
  int64_t rank_at(double share) const {
    const double target = share * total_;
    if (target < cumulative_.back() || rows_ <= kHead) {
      const auto above = std::upper_bound(cumulative_.begin() + 1, cumulative_.end(), target);
      return std::min<int64_t>(above - cumulative_.begin() - 1, rows_ - 1);
    }
    const double x = inverse_integral(target - cumulative_.back() + primitive(half(kHead)));
    const double ranks_below = x - z_ / (24 * x) - 0.5;  // the correction term, by one Newton step
    return std::clamp(static_cast<int64_t>(ranks_below), kHead, rows_ - 1);
  }

 private:
  static constexpr int64_t kHead = 1024;

  static double half(int64_t ranks) { return static_cast<double>(ranks) + 0.5; }

  double integral(double x) const {
    return z_ == 1 ? std::log(x) : std::expm1((1 - z_) * std::log(x)) / (1 - z_);
  }
  double inverse_integral(double y) const {
    return z_ == 1 ? std::exp(y) : std::exp(std::log1p((1 - z_) * y) / (1 - z_));
  }
  double primitive(double x) const { return integral(x) + z_ / 24 * std::pow(x, -z_ - 1); }

  double mass_below(int64_t end) const {
    if (end <= kHead) return cumulative_[end];
    return cumulative_.back() + primitive(half(end)) - primitive(half(kHead));
  }

  int64_t rows_;
  double z_;
  std::vector<double> cumulative_;  // [k]: sum of the first k weights
  double total_;
};

// Ranks ends[j-1] .. ends[j]-1 have weight weights[j] each (ends[-1] = 0).
class Steps {
 public:
  Steps(const int64_t* ends, const double* weights, int64_t steps)
      : ends_(ends, ends + steps),
        weights_(weights, weights + steps),
        cumulative_(steps) {
    double sum = 0;
    for (int64_t j = 0; j < steps; ++j) {
      sum += static_cast<double>(ends_[j] - begin_of(j)) * weights_[j];
      cumulative_[j] = sum;
    }
  }

  int64_t rows() const { return ends_.back(); }

  // The weights of ranks begin, begin + 1 … in turn.
  class Weights {
   public:
    Weights(const Steps& law, int64_t begin) : law_(law), step_(law.step_of(begin)), rank_(begin) {}
    double next() {
      while (rank_ >= law_.ends_[step_]) ++step_;
      ++rank_;
      return law_.weights_[step_];
    }

   private:
    const Steps& law_;
    int64_t step_, rank_;
  };
  Weights weights_from(int64_t begin) const { return {*this, begin}; }

  double mass(int64_t begin, int64_t end) const { return mass_below(end) - mass_below(begin); }

  int64_t rank_at(double share) const {
    const double target = share * cumulative_.back();
    const auto above = std::upper_bound(cumulative_.begin(), cumulative_.end(), target);
    const int64_t j =
        std::min<int64_t>(above - cumulative_.begin(), static_cast<int64_t>(ends_.size()) - 1);
    const double inside = target - (j ? cumulative_[j - 1] : 0.0);
    const int64_t rank = begin_of(j) + static_cast<int64_t>(inside / weights_[j]);
    // A step of weight 0 divides by it, and one without ranks has no last one.
    return std::min({std::max(rank, begin_of(j)), std::max(ends_[j] - 1, begin_of(j)), rows() - 1});
  }

 private:
  int64_t begin_of(int64_t j) const { return j ? ends_[j - 1] : 0; }
  int64_t step_of(int64_t rank) const {
    return std::upper_bound(ends_.begin(), ends_.end(), rank) - ends_.begin();
  }
  double mass_below(int64_t end) const {
    if (end >= rows()) return cumulative_.back();
    const int64_t j = step_of(end);
    return (j ? cumulative_[j - 1] : 0.0) + static_cast<double>(end - begin_of(j)) * weights_[j];
  }

  std::vector<int64_t> ends_;
  std::vector<double> weights_;
  std::vector<double> cumulative_;
};

}  // namespace oper
