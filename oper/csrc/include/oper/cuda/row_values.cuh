// What a device reads of rows and gradients: the values in a piece of them, and the scale and bias
// of int8 rows. Conversions are those of step/row_formats.h.
#pragma once

#include "oper/cuda/device.h"
#include "oper/step/row_formats.h"

namespace oper {

template <typename Row>
constexpr int64_t kValueBytes = sizeof(typename Row::Value);

// The values of a piece of a row.
template <typename Row, int kBytes>
struct Values {
  static constexpr int kCount = kBytes / static_cast<int>(sizeof(typename Row::Value));

  __device__ static float get(const Piece<kBytes>& piece, int n) {
    if constexpr (sizeof(typename Row::Value) == 4) {
      return float_of_bits(piece.word[n]);
    } else {
      const auto half = static_cast<uint16_t>(piece.word[n / 2] >> (16 * (n % 2)));
      return Row::to_float(half);
    }
  }
};

template <int kBytes>
struct Values<Int8Row, kBytes> {
  static constexpr int kCount = kBytes;

  __device__ static float get(const Piece<kBytes>& piece, int n) {
    return static_cast<float>(piece.word[n / 4] >> (8 * (n % 4)) & 0xFF);
  }
};

// How rows are read that stay as they are while a kernel runs.
struct Unchanged {
  template <int kBytes>
  __device__ static Piece<kBytes> load(const uint8_t* place) {
    return load_row<kBytes>(place);
  }
};

// The scale and the bias of an int8 row, 1 and 0 of others. `Reads` says how rows are read.
template <typename Row, int kBytes, typename Reads = Unchanged>
struct Levels {
  __device__ void load(const uint8_t*, int64_t) {}
  __device__ float value(float level) const { return level; }
};

template <int kBytes, typename Reads>
struct Levels<Int8Row, kBytes, Reads> {
  float scale, bias;

  __device__ void load(const uint8_t* row, int64_t dim) {
    Piece<8> bits{};
    if constexpr (kBytes == 8) {  // what follows whole pieces is aligned as they are
      bits = Reads::template load<8>(row + dim);
    } else if constexpr (kBytes == 4) {
      bits = {{Reads::template load<4>(row + dim).word[0],
               Reads::template load<4>(row + dim + 4).word[0]}};
    } else {
      for (int n = 0; n < 8; ++n)
        bits.word[n / 4] |= Reads::template load<1>(row + dim + n).word[0] << (8 * (n % 4));
    }
    scale = float_of_bits(bits.word[0]);
    bias = float_of_bits(bits.word[1]);
  }

  __device__ float value(float level) const { return scale * level + bias; }
};

}  // namespace oper
