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
#include <initializer_list>
#include <limits>

namespace oper {

// ln 2 in two parts: multiples of the first by exponents are exact.
constexpr double kLn2High = 0x1.62e42feep-1;
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kInverseLn2 = 0x1.71547652b82fep+0;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNoNumber = std::numeric_limits<double>::quiet_NaN();

// The value of a function (below) at any x.
template <class Function>
inline double value_of(double x) {
  return Function::is_plain(x) ? Function::plain(x) : Function::rest(x);
}

// 2^exponent, of a normal number, for a whole exponent: the sum's last bits are the exponent.
inline double power_of_two(double exponent) {
  const double sum = (exponent + 1023.0) + 0x1.8p52;
  uint64_t bits;
  std::memcpy(&bits, &sum, sizeof bits);
  bits <<= 52;
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// x * 2^exponent, for exponents of -2000 to 2000; rounded twice at most where it is subnormal.
inline double scaled(double x, double exponent) {
  for (; exponent > 1000.0; exponent -= 1000.0) x *= power_of_two(1000.0);
  for (; exponent < -1000.0; exponent += 1000.0) x *= power_of_two(-1000.0);
  return x * power_of_two(exponent);
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
  double exponent;
  double rest;
};
inline Reduced reduced(double x) {
  const double k = std::floor(x * kInverseLn2 + 0.5);
  return {k, (x - k * kLn2High) - k * kLn2Low};
}

// Each function has a plain range, whose formula has no branches, so that loops over it become
// vectors, and which may be computed (to no use) of any number; the rest is rare.
struct Exp {
  static bool is_plain(double x) { return -690.0 <= x && x <= 690.0; }
  static double plain(double x) {
    const Reduced of = reduced(x);
    return (1.0 + expm1_near_zero(of.rest)) * power_of_two(of.exponent);
  }
  static double rest(double x) {
    if (x != x) return x;
    if (x > 710.0) return kInfinity;
    if (x < -746.0) return 0.0;
    const Reduced of = reduced(x);
    return scaled(1.0 + expm1_near_zero(of.rest), of.exponent);
  }
};

struct Expm1 {
  static bool is_plain(double x) { return -40.0 <= x && x <= 40.0; }
  static double plain(double x) {
    const Reduced of = reduced(x);
    const double power = power_of_two(of.exponent);
    const double found = power * expm1_near_zero(of.rest) + (power - 1.0);
    return x == 0.0 ? x : found;  // with the sign of a zero
  }
  static double rest(double x) {
    if (x < -40.0) return -1.0;
    return value_of<Exp>(x);
  }
};

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

// A number above 0 as (1 + part) 2^exponent, where part is what log1p_less_argument takes.
struct Factors {
  double exponent;
  double part;
};
inline Factors factors(double u) {  // u is normal
  uint64_t bits;
  std::memcpy(&bits, &u, sizeof bits);
  const int exponent = static_cast<int>(bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffffULL) | (uint64_t{1023} << 52);
  double mantissa;
  std::memcpy(&mantissa, &bits, sizeof mantissa);
  const bool upper = mantissa > 1.4142135623730951;
  return {static_cast<double>(exponent + upper), (upper ? 0.5 * mantissa : mantissa) - 1.0};
}

// The logarithm of the number, plus c, which is small beside 1.
inline double log_and(Factors of, double c) {
  const double k = of.exponent, f = of.part;
  return k * kLn2High + (f + (log1p_less_argument(f) + (k * kLn2Low + c)));
}

struct Log {
  static bool is_plain(double x) { return 0x1p-1022 <= x && x < kInfinity; }
  static double plain(double x) { return log_and(factors(x), 0.0); }
  static double rest(double x) {
    if (x != x || x == kInfinity) return x;
    if (x < 0.0) return kNoNumber;
    if (x == 0.0) return -kInfinity;
    return log_and(factors(x * 0x1p54), 0.0) - 54.0 * (kLn2High + kLn2Low);
  }
};

struct Log1p {
  static bool is_plain(double x) { return -1.0 < x && x < kInfinity; }
  static double plain(double x) {
    const double u = 1.0 + x;
    // What rounding lost of 1 + x.
    const double lost = x >= 1.0 ? 1.0 - (u - x) : x - (u - 1.0);
    const bool near = -0.29 < x && x < 0.41;
    const Factors of = factors(u);
    const double found =
        log_and({near ? 0.0 : of.exponent, near ? x : of.part}, near ? 0.0 : lost / u);
    return x == 0.0 ? x : found;  // with the sign of a zero
  }
  static double rest(double x) {
    if (x != x || x == kInfinity) return x;
    return x == -1.0 ? -kInfinity : kNoNumber;
  }
};

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
  const double of_large = (x - 0.5) * value_of<Log>(x) - x + kHalfLogTwoPi + sum * inverse;
  return of_large - value_of<Log>(product);
}

}  // namespace oper
