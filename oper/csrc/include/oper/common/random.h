// Random numbers that depend on a key alone, so that results do not depend on the threads.

#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include "oper/common/simd.h"

namespace oper {

// The finaliser of SplitMix64 (Steele, Lea and Flood 2014): a bijection of 64-bit words.
OPER_HD inline uint64_t mix(uint64_t word) {
  word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9u;
  word = (word ^ (word >> 27)) * 0x94d049bb133111ebu;
  return word ^ (word >> 31);
}

// SplitMix64, a stream for each pair (key, index).
class Random {
 public:
  Random(uint64_t key, uint64_t index) : state_(mix(key + mix(index + kGolden))) {}

  // Uniform in (0, 1), a multiple of 2^-54.
  double uniform() {
    state_ += kGolden;
    return (static_cast<double>(mix(state_) >> 11) + 0.5) * 0x1p-53;
  }

  // Standard normal, by Box and Muller.
  double normal() {
    const double radius = std::sqrt(-2.0 * std::log(uniform()));
    return radius * std::cos(6.283185307179586 * uniform());
  }

 private:
  static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  uint64_t state_;
};

// log(k!) less the start of Stirling's series, (k + ½) log(k + 1) - (k + 1) + ½ log 2π.
inline double stirling_tail(double k) {
  const double x = k + 1;
  const double square = x * x;
  return (1.0 / 12 - (1.0 / 360 - 1.0 / 1260 / square) / square) / x;
}

// Binomial(trials, p) for trials · p >= 10 and p <= ½: transformed rejection with squeeze, BTRS
// of Hörmann, "The generation of binomial random variates", 1993.
inline int64_t binomial_by_rejection(Random& random, int64_t trials, double p) {
  const double n = static_cast<double>(trials);
  const double odds = p / (1 - p);
  const double deviation = std::sqrt(n * p * (1 - p));
  const double b = 1.15 + 2.53 * deviation;
  const double a = -0.0873 + 0.0248 * b + 0.01 * p;
  const double alpha = (2.83 + 5.1 / b) * deviation;
  const double mode = std::floor((n + 1) * p);
  while (true) {
    const double u = random.uniform() - 0.5;
    const double v = random.uniform();
    const double us = 0.5 - std::fabs(u);
    const double k = std::floor((2 * a / us + b) * u + n * p + 0.5);
    if (us >= 0.07 && v <= 0.92 - 4.2 / b) return static_cast<int64_t>(k);
    if (k < 0 || k > n) continue;
    const double log_ratio = (mode + 0.5) * std::log((mode + 1) / (odds * (n - mode + 1))) +
                             (n + 1) * std::log((n - mode + 1) / (n - k + 1)) +
                             (k + 0.5) * std::log(odds * (n - k + 1) / (k + 1)) +
                             stirling_tail(mode) + stirling_tail(n - mode) - stirling_tail(k) -
                             stirling_tail(n - k);
    if (std::log(v * alpha / (a / (us * us) + b)) <= log_ratio) return static_cast<int64_t>(k);
  }
}

// Binomial(trials, p) for trials · p < 10 and p <= ½, by inverting the distribution function.
inline int64_t binomial_by_inversion(Random& random, int64_t trials, double p) {
  const double n = static_cast<double>(trials);
  const double odds = p / (1 - p);
  // log(1 - p), by its series where p is small, as it is for almost all rows of a large table
  const double log_miss =
      p > 0x1p-10 ? std::log1p(-p) : -p * (1 + p * (0.5 + p * (1.0 / 3 + p * (0.25 + p / 5))));
  double chance = std::exp(n * log_miss);
  double u = random.uniform();
  int64_t k = 0;
  while (u > chance && k < trials) {
    u -= chance;
    chance *= odds * (n - static_cast<double>(k)) / static_cast<double>(k + 1);
    ++k;
    // Rounding can leave u above what remains of the whole tail.
    if (chance < 1e-300) break;
  }
  return k;
}

inline int64_t binomial(Random& random, int64_t trials, double p) {
  if (trials <= 0 || !(p > 0)) return 0;  // not a number: what is left of no weight
  if (p >= 1) return trials;
  if (p > 0.5) return trials - binomial(random, trials, 1 - p);
  return static_cast<double>(trials) * p < 10 ? binomial_by_inversion(random, trials, p)
                                              : binomial_by_rejection(random, trials, p);
}

}  // namespace oper
