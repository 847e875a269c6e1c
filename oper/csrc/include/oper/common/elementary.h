// Exponentials and logarithms with the same bits on every processor.
//
// The C library and NumPy choose a version by the processor at run time, and the versions differ in
// the last bit; a plan may then differ too. These functions use additions, multiplications and
// divisions alone, each rounded by itself (no contraction, see setup.py), in a fixed order. Series
// are cut off below half a unit in the last place; tests/base/test_portable_math.py states the
// errors.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace oper {

// ln 2 in two parts: multiples of the first by exponents are exact.
constexpr double kLn2High = 0x1.62e42feep-1;
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kInverseLn2 = 0x1.71547652b82fep+0;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

// x * 2^exponent, for exponents of -2000 to 2000; rounded twice at most where it is subnormal.
inline double scaled(double x, int exponent) {
  const auto power = [](int e) {  // 2^e, of a normal number
    const uint64_t bits = static_cast<uint64_t>(e + 1023) << 52;
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  };
  for (; exponent > 1000; exponent -= 1000) x *= power(1000);
  for (; exponent < -1000; exponent += 1000) x *= power(-1000);
  return x * power(exponent);
}

// e^r - 1 for |r| <= ln(2) / 2, by its Taylor series.
inline double expm1_near_zero(double r) {
  double sum = 1.0 / 6227020800.0;  // 1 / 13!
  for (const double factorial : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0,
                                 720.0, 120.0, 24.0, 6.0, 2.0}) {
    sum = sum * r + 1.0 / factorial;
  }
  return r + r * r * sum;
}

// The exponent k and the rest r with x = k ln 2 + r, |r| <= ln(2) / 2, for |x| < 800.
struct Reduced {
  int exponent;
  double rest;
};
inline Reduced reduced(double x) {
  const double k = std::floor(x * kInverseLn2 + 0.5);
  return {static_cast<int>(k), (x - k * kLn2High) - k * kLn2Low};
}

inline double portable_exp(double x) {
  if (x != x) return x;
  if (x > 710.0) return kInfinity;
  if (x < -746.0) return 0.0;
  const Reduced of = reduced(x);
  return scaled(1.0 + expm1_near_zero(of.rest), of.exponent);
}

inline double portable_expm1(double x) {
  if (x != x || x == 0.0) return x;
  if (x > 710.0) return kInfinity;
  if (x < -40.0) return -1.0;
  const Reduced of = reduced(x);
  if (of.exponent == 0) return expm1_near_zero(of.rest);
  if (of.exponent > 60) return portable_exp(x);
  const double power = scaled(1.0, of.exponent);
  return power * expm1_near_zero(of.rest) + (power - 1.0);
}

// log(1 + f) - f for -0.3 < f < 0.42, from log(1 + f) = 2 artanh(s), s = f / (2 + f): the logarithm
// is f - (f²/2 - s (f²/2 + R)), where R = 2 (s²/3 + s⁴/5 + …).
inline double log1p_less_argument(double f) {
  const double s = f / (2.0 + f), z = s * s, half_square = 0.5 * f * f;
  double sum = 2.0 / 27.0;
  for (const double odd : {25.0, 23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0}) {
    sum = sum * z + 2.0 / odd;
  }
  return s * (half_square + sum * z) - half_square;
}

// log(u) + c, where c is small beside 1, for a normal u.
inline double log_and(double u, double c) {
  uint64_t bits;
  std::memcpy(&bits, &u, sizeof bits);
  int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffULL) | (uint64_t{1023} << 52);
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof mantissa);
  if (mantissa > 1.4142135623730951) {
    mantissa *= 0.5;
    ++exponent;
  }
  const double f = mantissa - 1.0, k = exponent;
  return k * kLn2High + (f + (log1p_less_argument(f) + (k * kLn2Low + c)));
}

inline double portable_log(double x) {
  if (x != x || x == kInfinity) return x;
  if (x < 0.0) return kNoNumber;
  if (x == 0.0) return -kInfinity;
  if (x < 0x1p-1022) return log_and(x * 0x1p54, 0.0) - 54.0 * (kLn2High + kLn2Low);
  return log_and(x, 0.0);
}

inline double portable_log1p(double x) {
  if (x != x || x == kInfinity || x == 0.0) return x;
  if (x < -1.0) return kNoNumber;
  if (x == -1.0) return -kInfinity;
  if (-0.29 < x && x < 0.41) return x + log1p_less_argument(x);
  const double u = 1.0 + x;
  // What rounding lost of 1 + x.
  const double lost = x >= 1.0 ? 1.0 - (u - x) : x - (u - 1.0);
  return log_and(u, lost / u);
}

// The logarithm of the gamma function for x > 0: Stirling's series from 16 on, and below by
// Γ(x) = Γ(x + n) / (x (x + 1) … (x + n - 1)). Abramowitz and Stegun, 6.1.40.
inline double portable_log_gamma(double x) {
  if (x != x || x == kInfinity) return x;
  if (!(x > 0.0)) return x == 0.0 ? kInfinity : kNoNumber;
  double product = 1.0;
  for (; x < 16.0; x += 1.0) product *= x;
  const double inverse = 1.0 / x, z = inverse * inverse;
  double sum = -1.0 / 360360.0 * 691.0;
  for (const double term : {1.0 / 1188.0, -1.0 / 1680.0, 1.0 / 1260.0, -1.0 / 360.0, 1.0 / 12.0}) {
    sum = sum * z + term;
  }
  constexpr double kHalfLogTwoPi = 0.91893853320467274178;
  const double of_large = (x - 0.5) * portable_log(x) - x + kHalfLogTwoPi + sum * inverse;
  return of_large - portable_log(product);
}

}  // namespace oper
