// The owner's part of a training step on a device (OPER, §5): the gradients of all ranks merged,
// and one optimizer step with each row. As on the processor (step/update_rows.h), bit by bit.
//
// Each list holds ascending slots. An entry, slot n of list r, does the row's step if no list
// before r holds the slot, and adds what the lists after r have for it, in their order: so each row
// is updated once, by threads that need not know of any others. The lists are searched at once, one
// by each of the threads that hold a row together. One list alone needs no search.
//
// a.lanes threads hold a row, kCount values of it each; rows longer than that are gone through part
// by part. All threads of a warp go through the loops together, as they exchange values there.
// Where the gradients come from is a type of its own, so that update_runs.cuh takes the same steps.
#pragma once

#include <type_traits>

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/listed_rows.cuh"
#include "oper/step/optimizers.h"
#include "oper/step/row_formats.h"
#include "oper/step/stochastic_rounding.h"

namespace oper {

constexpr uint32_t kWholeWarp = 0xFFFFFFFFu;

// Which threads of a warp hold a row together with this one.
struct Group {
  int lane;        // of those of the row
  int first_lane;  // of the warp
};

// kCount values of a gradient.
template <int kCount>
__device__ __forceinline__ void load_gradient(const float* place, float (&g)[kCount]) {
  const auto piece = load_row<4 * kCount>(reinterpret_cast<const uint8_t*>(place));
#pragma unroll
  for (int k = 0; k < kCount; ++k) g[k] = float_of_bits(piece.word[k]);
}

// kCount values of a row, from value d on, as they lie there: those of 16 bits in the first words.
template <int kCount>
__device__ __forceinline__ Piece<4 * kCount> load_words(const uint8_t* row, RowType type, int d) {
  if (type == kFloat32) return load<4 * kCount>(row + 4 * d);
  const auto halves = load<2 * kCount>(row + 2 * d);
  Piece<4 * kCount> piece{};
#pragma unroll
  for (int n = 0; n < Piece<2 * kCount>::kWords; ++n) piece.word[n] = halves.word[n];
  return piece;
}

template <int kCount>
__device__ __forceinline__ void widen_words(const Piece<4 * kCount>& piece, RowType type,
                                            float (&w)[kCount]) {
  if (type == kFloat32) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) w[k] = float_of_bits(piece.word[k]);
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const auto half = static_cast<uint16_t>(piece.word[k / 2] >> (16 * (k % 2)));
    w[k] = type == kFloat16 ? float_of_half(half) : float_of_bfloat(half);
  }
}

// A value of a 16-bit row, rounded.
__device__ __forceinline__ uint16_t round_value(float value, RowType type, const Settings& s,
                                                const RowBits& random, int d) {
  if (s.rounding != 0) {
    const uint32_t bits = random.of_value(static_cast<uint32_t>(d));
    return type == kFloat16 ? half_of_float(value, bits) : bfloat_of_float(value, bits);
  }
  return type == kFloat16 ? half_of_float(value) : bfloat_of_float(value);
}

template <int kCount>
__device__ __forceinline__ void store_values(uint8_t* row, int64_t slot, int d,
                                             const StepArguments& a, const Settings& s,
                                             const float (&w)[kCount]) {
  if (a.arena.type == kFloat32) {
    Piece<4 * kCount> piece;
#pragma unroll
    for (int k = 0; k < kCount; ++k) piece.word[k] = bits_of_float(w[k]);
    store(row + 4 * d, piece);
    return;
  }
  const RowBits random(s.rounding, slot);
  Piece<2 * kCount> piece{};
#pragma unroll
  for (int k = 0; k < kCount; ++k)
    piece.word[k / 2] |= static_cast<uint32_t>(round_value(w[k], a.arena.type, s, random, d + k))
                         << (16 * (k % 2));
  store(row + 2 * d, piece);
}

// kCount values of a part of the state. A slot's state may begin at any multiple of four bytes.
template <int kCount>
__device__ __forceinline__ void load_state(const float* place, bool wide, float (&value)[kCount]) {
  if (wide) {
    const auto piece = load<4 * kCount>(place);
#pragma unroll
    for (int k = 0; k < kCount; ++k) value[k] = float_of_bits(piece.word[k]);
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) value[k] = place[k];
}

template <int kCount>
__device__ __forceinline__ void store_state(float* place, bool wide, const float (&value)[kCount]) {
  if (wide) {
    Piece<4 * kCount> piece;
#pragma unroll
    for (int k = 0; k < kCount; ++k) piece.word[k] = bits_of_float(value[k]);
    store(place, piece);
    return;
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) place[k] = value[k];
}

// The sums of squares of the processor's mean_square: sum n is of the values n, n + 16, n + 32, …
// Thread c of a row's ends up with those of its kCount values, taken modulo 16, as if the row were
// as long as its threads hold: what is beyond is 0, which changes no sum of squares.
template <int kCount>
struct Squares {
  float sum[kCount] = {};

  // Adds the part of a row that its threads hold.
  __device__ void add(const float (&g)[kCount], const Group& group, int lanes) {
    float square[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) square[k] = g[k] * g[k];
    const int classes = classes_of(lanes);
    for (int lane = group.lane & (classes - 1); lane < lanes; lane += classes)
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        sum[k] += __shfl_sync(kWholeWarp, square[k], group.first_lane + lane);
  }

  // The mean, known to all threads of the row.
  __device__ float mean(int lanes, int64_t dim) {
    for (int half = classes_of(lanes) / 2; half > 0; half /= 2)
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum[k] += __shfl_xor_sync(kWholeWarp, sum[k], half);
#pragma unroll
    for (int half = kCount / 2; half > 0; half /= 2)
#pragma unroll
      for (int k = 0; k < half; ++k) sum[k] += sum[k + half];
    return sum[0] / static_cast<float>(dim);
  }

 private:
  // After so many threads their values are the same modulo 16.
  __device__ static int classes_of(int lanes) { return lanes < 16 / kCount ? lanes : 16 / kCount; }
};

// The rows of one list, and their gradients, to which others may add.
template <int kCount, bool kMany>
struct ListedGradients {
  const UpdateArguments& a;
  Group group;
  int number;  // of the list
  ListedRows own;
  int count;  // of its entries
  int64_t next_slot = -1;
  // The entry that the threads of a row work on.
  int entry = 0;
  int64_t slot = -1;
  bool mine = false;  // whether the step is done here
  int found = 0;      // the slot's entry in list number group.lane, -1 where it is not

  __device__ ListedGradients(const UpdateArguments& a, const Group& group)
      : a(a),
        group(group),
        number(kMany ? static_cast<int>(blockIdx.y) : 0),
        own(rows_of(a.list[number])),
        count(own.count) {}

  __device__ int64_t slot_at(int n) const { return n < count ? own.slots[n] : -1; }

  // Entry n is the first of this thread's.
  __device__ void begin(int n) { next_slot = slot_at(n); }

  // Goes on from entry n - step to entry n, and loads what the one after it is known by.
  __device__ void take(int n, int step) {
    entry = n;
    slot = next_slot;
    // A slot that is not the arena's is left alone: the host cannot look at it without a wait.
    mine = static_cast<uint64_t>(slot) < static_cast<uint64_t>(a.slots);
    look();
    next_slot = slot_at(n + step);
  }

  __device__ void look_ahead() {}

  __device__ int find(int list) const {
    return mine && list < a.lists && list != number ? find_slot(rows_of(a.list[list]), slot) : -1;
  }

  // Leaves the step to the first list that has the slot.
  __device__ void look() {
    if constexpr (kMany) {
      found = find(group.lane);
      bool before = group.lane < number && found >= 0;
      for (int list = group.lane + a.lanes; list < number; list += a.lanes)
        before |= find(list) >= 0;
      const uint32_t lanes = a.lanes == kWarpThreads ? kWholeWarp : (1u << a.lanes) - 1;
      if (__ballot_sync(kWholeWarp, before) >> group.first_lane & lanes) mine = false;
    }
  }

  // kCount values of the row's gradient, from value d on: the sum over the lists.
  __device__ void gather(int d, bool there, float (&g)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) g[k] = 0;
    const int64_t dim = a.arena.dim;
    if (there) load_gradient(own.values + entry * dim + d, g);
    if constexpr (kMany) {
      const int lanes = static_cast<int>(a.lanes), lists = static_cast<int>(a.lists);
      for (int first = (number + 1) / lanes * lanes; first < lists; first += lanes) {
        const int of_lane = first == 0 ? found : find(first + group.lane);
        for (int lane = first > number ? 0 : number + 1 - first;
             lane < lanes && first + lane < lists; ++lane) {
          const int at = __shfl_sync(kWholeWarp, of_lane, group.first_lane + lane);
          if (!there || at < 0) continue;
          float more[kCount];
          load_gradient(rows_of(a.list[first + lane]).values + at * dim + d, more);
#pragma unroll
          for (int k = 0; k < kCount; ++k) g[k] += more[k];
        }
      }
    }
  }
};

// Which threads of its warp hold a row together with this one, where so many do.
__device__ __forceinline__ Group group_of_lanes(int lanes) {
  const int warp_lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  return {warp_lane & (lanes - 1), warp_lane & -lanes};
}

// The settings of the step. Kernels that read them from memory have more registers for them, and
// fewer blocks at once.
template <bool kThere>
__device__ __forceinline__ const Settings& settings_of(const StepArguments& a) {
  return kThere ? *a.there : a.settings;
}

// Takes the step of all rows that `row` goes through, by the gradients that it gathers.
template <typename Optimizer, int kCount, bool kThere, typename Gradients>
__device__ __forceinline__ void step_all(const StepArguments& a, const Group& group,
                                         Gradients& row) {
  constexpr int kParts = value_parts(Optimizer::kState);
  const Settings& s = settings_of<kThere>(a);
  const int lanes = static_cast<int>(a.lanes), dim = static_cast<int>(a.arena.dim);
  const int warp_lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int rows_of_warp = kWarpThreads / lanes;
  const int rows_at_once = static_cast<int>(gridDim.x * blockDim.x) / lanes;
  const int in_warp = warp_lane / lanes;
  const int begin =
      static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / kWarpThreads) * rows_of_warp;
  int updated = 0;
  row.begin(begin + in_warp);
  for (int first = begin; first < row.count; first += rows_at_once) {
    row.take(first + in_warp, rows_at_once);
    if (a.arena.marks != nullptr && row.mine && group.lane == 0) a.arena.marks[row.slot] = 1;
    uint8_t* const values = a.arena.rows + row.slot * a.arena.row_bytes;
    float* const state = reinterpret_cast<float*>(a.arena.state + row.slot * a.arena.state_bytes);
    float w[kCount] = {}, g[kCount] = {};
    const auto take = [&](int d) {
      const bool there = row.mine && d < dim;
      Piece<4 * kCount> words{};
      if (there) words = load_words<kCount>(values, a.arena.type, d);
      row.gather(d, there, g);
      widen_words(words, a.arena.type, w);
      if (there && s.l2 != 0)
#pragma unroll
        for (int k = 0; k < kCount; ++k) g[k] += s.l2 * w[k];
    };
    const int part = lanes * kCount;
    float rate = 0;
    if constexpr (Optimizer::kRowwise) {
      float of_row = row.mine ? state[kParts * dim] : 0;
      Squares<kCount> squares;
      for (int d = 0; d < dim; d += part) {
        take(d + group.lane * kCount);
        squares.add(g, group, lanes);
      }
      rate = Optimizer::rate(of_row, squares.mean(lanes, dim), s);
      __syncwarp(kWholeWarp);  // all threads have read it
      if (row.mine && group.lane == 0) state[kParts * dim] = of_row;
    } else {
      rate = Optimizer::rate(s);
    }
    for (int from = 0; from < dim; from += part) {
      const int d = from + group.lane * kCount;
      const bool there = row.mine && d < dim;
      // Of a row of one part, the gradient was taken for the mean of its squares.
      if (Optimizer::kRowwise && dim > part) take(d);
      // Read before the gradient is worked with, so that all reads are on their way together.
      float of_value[kParts + 1][kCount] = {};
      if (there)
#pragma unroll
        for (int p = 0; p < kParts; ++p) load_state(state + p * dim + d, a.wide_state, of_value[p]);
      if (!Optimizer::kRowwise) take(d);
      row.look_ahead();
      if (!there) continue;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (s.shrink != 1) w[k] *= s.shrink;
        step_value<Optimizer>(w[k], &of_value[0][k], kCount, g[k], rate, s);
      }
#pragma unroll
      for (int p = 0; p < kParts; ++p) store_state(state + p * dim + d, a.wide_state, of_value[p]);
      store_values(values, row.slot, d, a, s, w);
    }
    updated += row.mine && group.lane == 0;
  }
  for (int step = kWarpThreads / 2; step > 0; step /= 2)
    updated += __shfl_xor_sync(kWholeWarp, updated, step);
  if (warp_lane == 0 && updated > 0) atomicAdd(a.updated, static_cast<unsigned long long>(updated));
}

template <typename Optimizer, int kCount, bool kThere, bool kMany>
__global__ void __launch_bounds__(256, kThere ? 3 : 4)
    step_rows(const __grid_constant__ UpdateArguments a) {
  const Group group = group_of_lanes(static_cast<int>(a.lanes));
  ListedGradients<kCount, kMany> row(a, group);
  step_all<Optimizer, kCount, kThere>(a, group, row);
}

// Calls f with what a step's kernel is made for, as constants: its optimizer, how many values are
// worked on at once, and whether its settings are in memory.
template <typename F>
cudaError_t with_step(const StepArguments& a, int64_t optimizer, F&& f) {
  return with_optimizer(static_cast<size_t>(optimizer), [&](auto of) {
    const auto with_count = [&](auto count) {
      return a.there == nullptr ? f(of, count, std::false_type()) : f(of, count, std::true_type());
    };
    return a.wide_rows ? with_count(std::integral_constant<int, 4>())
                       : with_count(std::integral_constant<int, 1>());
  });
}

}  // namespace oper
