// Rows of a table as they are stored.
//
// A row is `dim` values of fp32, fp16 or bf16, or `dim` bytes q followed by an fp32 scale and an
// fp32 bias, whose values are scale·q + bias, as FBGEMM lays its row-wise 8-bit tables out. All
// arithmetic is in fp32. Conversions are written so that compilers turn loops over them into
// vectors of the width that the function is compiled for.
#pragma once

#include <cstdint>
#include <cstring>

#include "oper/common/simd.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace oper {

// Declared as DTYPE_CODE in oper/runtime/tables/kernel_structs.py.
enum RowType : int64_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kInt8 = 3 };

constexpr int64_t kInt8ExtraBytes = 8;  // the scale and the bias of an int8 row

// Bytes that a row of a type takes at least.
OPER_HD inline int64_t bytes_of_row(int64_t type, int64_t dim) {
  return type == kFloat32 ? 4 * dim : type == kInt8 ? dim + kInt8ExtraBytes : 2 * dim;
}

OPER_HD inline float float_of_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

OPER_HD inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// An fp16 with its exponent in fp32's place is too small by 2^112, subnormal or not.
OPER_HD inline float float_of_half(uint16_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));  // one instruction, where the lines below are six
#else
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7FFF) << 13;
  const uint32_t finite = bits_of_float(float_of_bits(shifted) * 0x1p112f);
  const uint32_t magnitude = shifted >= 0x0F800000 ? shifted | 0x7F800000 : finite;
  return float_of_bits(magnitude | static_cast<uint32_t>(half & 0x8000) << 16);
#endif
}

// To the nearest, ties to even. Adding 0.5 leaves a subnormal result in the last bits.
OPER_HD inline uint16_t half_of_float(float value) {
  const uint32_t bits = bits_of_float(value), magnitude = bits & 0x7FFFFFFF;
  const uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13;
  const uint32_t beyond = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
  const uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  return static_cast<uint16_t>((magnitude >= 0x47800000 ? beyond : finite) | (bits >> 16 & 0x8000));
}

OPER_HD inline float float_of_bfloat(uint16_t bfloat) {
  return float_of_bits(static_cast<uint32_t>(bfloat) << 16);
}

OPER_HD inline uint16_t bfloat_of_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}

// The values of one row of each type: constructed from its pointer and dim, then indexed.
struct Float32Row {
  using Value = float;
  const Value* values;
  Float32Row(const uint8_t* row, int64_t) : values(reinterpret_cast<const Value*>(row)) {}
  float operator[](int64_t d) const { return values[d]; }
};

struct Float16Row {
  using Value = uint16_t;
  const Value* values;
  static OPER_HD float to_float(Value value) { return float_of_half(value); }
  Float16Row(const uint8_t* row, int64_t) : values(reinterpret_cast<const Value*>(row)) {}
  float operator[](int64_t d) const { return to_float(values[d]); }
};

struct BFloat16Row {
  using Value = uint16_t;
  const Value* values;
  static OPER_HD float to_float(Value value) { return float_of_bfloat(value); }
  BFloat16Row(const uint8_t* row, int64_t) : values(reinterpret_cast<const Value*>(row)) {}
  float operator[](int64_t d) const { return to_float(values[d]); }
};

struct Int8Row {
  using Value = uint8_t;
  const Value* values;
  float scale, bias;
  Int8Row(const uint8_t* row, int64_t dim) : values(row) {
    std::memcpy(&scale, row + dim, sizeof(scale));
    std::memcpy(&bias, row + dim + sizeof(scale), sizeof(bias));
  }
  float operator[](int64_t d) const { return scale * static_cast<float>(values[d]) + bias; }
};

template <typename Row>
struct TypeOf {
  using type = Row;
};

// f(TypeOf<Row>{}) with the type of values that are not quantised.
template <typename F>
OPER_INLINE void with_float_type(int64_t type, const F& f) {
  switch (type) {
    case kFloat32: return f(TypeOf<Float32Row>{});
    case kFloat16: return f(TypeOf<Float16Row>{});
    default: return f(TypeOf<BFloat16Row>{});
  }
}

// f(TypeOf<Row>{}) with any type of rows.
template <typename F>
OPER_INLINE void with_row_type(int64_t type, const F& f) {
  type == kInt8 ? f(TypeOf<Int8Row>{}) : with_float_type(type, f);
}

// 256 levels from a row's least value to its largest, as FBGEMM's FloatToFused8BitRowwiseQuantized.
// Adding 1.5·2^23 rounds to the nearest integer, which is then in the last bits.
OPER_INLINE void quantise_row(const float* values, int64_t dim, uint8_t* row) {
  float least = dim ? values[0] : 0.0f, largest = least;
  for (int64_t d = 1; d < dim; ++d) {
    least = values[d] < least ? values[d] : least;
    largest = values[d] > largest ? values[d] : largest;
  }
  const float range = largest - least, scale = range / 255.0f;
  const float levels = 255.0f / (range + 1e-8f);
  for (int64_t d = 0; d < dim; ++d)
    row[d] = static_cast<uint8_t>(bits_of_float((values[d] - least) * levels + 0x1.8p23f));
  std::memcpy(row + dim, &scale, sizeof(scale));
  std::memcpy(row + dim + sizeof(scale), &least, sizeof(least));
}

}  // namespace oper
