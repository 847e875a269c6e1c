// The AllGather of replicas' gradients on the devices of a node (OPER, §5.3), with the bits of the
// processor's sums (merge_messages, cpu/allreduce/allreduce.cpp).
//
// A rank writes the numbers and gradients of its replicas as a message that the others can read.
// Each rank copies the numbers of all messages, marks them in a bitmap, and sums the gradients of
// each marked replica from the memory of the ranks, in the order of the ranks: it reads each
// gradient of another rank once. Counts stay on the devices: grids have the size of the capacities.
#pragma once

#include "oper/cuda/replica_rows.cuh"

namespace oper {

// The first words of a header, [2, buckets + 1].
struct MessageHeader {
  const int64_t* rows;
  const int64_t* values;
  int64_t buckets;

  __device__ MessageHeader(const int64_t* header, int64_t buckets)
      : rows(header),
        values(header + buckets + 1),
        buckets(buckets) {}

  __device__ int64_t words() const { return values[buckets] + rows[buckets]; }
};

// One warp: writes a header from the rows of the groups that are replicas.
__global__ void __launch_bounds__(32) write_header(const __grid_constant__ HeaderArguments a) {
  const int lane = static_cast<int>(threadIdx.x);
  int64_t* const rows = a.header;
  int64_t* const values = a.header + a.buckets + 1;
  if (lane == 0) rows[0] = values[0] = 0;
  int64_t rows_before = 0, values_before = 0;
  for (int64_t part = 0; part < a.buckets; part += kWarpThreads) {
    const int64_t bucket = part + lane;
    const int64_t group = bucket < a.buckets ? a.group[bucket] : -1;
    const int64_t count = group < 0 ? 0 : a.groups[group + 1] - a.groups[group];
    const int64_t of_bucket = bucket < a.buckets ? count * a.dim[bucket] : 0;
    const int64_t rows_through = sum_to_lane(count, lane);
    const int64_t values_through = sum_to_lane(of_bucket, lane);
    if (bucket < a.buckets) {
      rows[bucket + 1] = rows_before + rows_through;
      values[bucket + 1] = values_before + values_through;
    }
    rows_before += __shfl_sync(0xFFFFFFFFu, rows_through, kWarpThreads - 1);
    values_before += __shfl_sync(0xFFFFFFFFu, values_through, kWarpThreads - 1);
  }
}

// The number of a replica that a message has for a slot. A slot without a replica, which the
// processor refuses, gets the number of another replica: telling the host would take a wait.
__device__ __forceinline__ int32_t number_in_message(const ReplicaBuckets& a, int64_t bucket,
                                                     int64_t slot) {
  const int64_t last = a.count[bucket] - 1;
  if (a.slots[bucket])
    return static_cast<int32_t>(last_at_most(a.slots[bucket], 0, last + 1, slot));
  return static_cast<int32_t>(slot < 0 ? 0 : slot > last ? last : slot);
}

// Writes the rows of the bucket blockIdx.y.
__global__ void __launch_bounds__(256) write_message(const __grid_constant__ MessageArguments a) {
  const int64_t bucket = blockIdx.y, group = a.group[bucket];
  if (a.count[bucket] == 0) return;
  const MessageHeader header(a.header, a.all);
  const int lanes = a.lanes[bucket], dim = static_cast<int>(a.dim[bucket]);
  const int64_t begin = a.groups[group], count = a.groups[group + 1] - begin;
  const float* const from = a.values + a.groups[a.own_groups + 1 + group];
  float* const to = a.message + header.values[a.first + bucket];
  auto* const numbers =
      reinterpret_cast<int32_t*>(a.message + header.values[a.all]) + header.rows[a.first + bucket];
  for_rows(count, lanes, [&](int64_t row, int lane) {
    if (lane == 0) numbers[row] = number_in_message(a, bucket, a.rows[begin + row]);
    write_row(a.wide, from + row * dim, to + row * dim, dim, lane, lanes);
  });
}

// One block: copies all headers, finds the places where messages and their numbers begin, and adds
// up the bytes of the messages that other ranks of the node hold.
__global__ void __launch_bounds__(256) read_headers(const __grid_constant__ NumberArguments a) {
  const int64_t size = 2 * (a.buckets + 1);
  for (int64_t n = threadIdx.x; n < a.ranks * size; n += blockDim.x) {
    const int64_t rank = n / size;
    a.headers[n] = a.segments[a.holder[rank]][a.held_as[rank] * size + n % size];
  }
  __syncthreads();
  for (int64_t rank = threadIdx.x; rank < a.ranks; rank += blockDim.x) {
    int64_t begin = a.message_word, numbers = 0;
#pragma unroll 1
    for (int64_t before = 0; before < a.held_as[rank]; ++before)
      begin += MessageHeader(a.segments[a.holder[rank]] + before * size, a.buckets).words();
#pragma unroll 1
    for (int64_t before = 0; before < rank; ++before)
      numbers += MessageHeader(a.headers + before * size, a.buckets).rows[a.buckets];
    a.begins[rank] = begin;
    a.begins[a.ranks + rank] = numbers;
  }
  if (threadIdx.x != 0) return;
  int64_t words = 0;
#pragma unroll 1
  for (int64_t rank = 0; rank < a.ranks; ++rank)
    if (a.holder[rank] != a.own) words += MessageHeader(a.headers + rank * size, a.buckets).words();
  *a.read += static_cast<int64_t>(sizeof(float)) * words;
}

// The first word of a rank's message.
__device__ __forceinline__ const float* message_of(const HeldMessages& a, int64_t rank) {
  return reinterpret_cast<const float*>(a.segments[a.holder[rank]]) + a.begins[rank];
}

__device__ __forceinline__ MessageHeader header_of(const HeldMessages& a, int64_t rank) {
  return MessageHeader(a.headers + rank * 2 * (a.buckets + 1), a.buckets);
}

// A thread takes a number of the message of rank blockIdx.y.
__global__ void __launch_bounds__(256) take_numbers(const __grid_constant__ NumberArguments a) {
  const int64_t rank = blockIdx.y;
  const MessageHeader header = header_of(a, rank);
  const int64_t count = header.rows[a.buckets];
  const auto* const from =
      reinterpret_cast<const int32_t*>(message_of(a, rank) + header.values[a.buckets]);
  int32_t* const to = a.numbers + a.begins[a.ranks + rank];
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < count;
       n += threads) {
    const int32_t number = from[n];
    to[n] = number;
    const int64_t bucket = last_at_most(header.rows, 0, a.buckets, n);
    atomicOr(a.bitmap + a.first_word[bucket] + number / 64, 1ull << (number % 64));
  }
}

// Values of a message, at any place in it.
template <int kCount>
__device__ __forceinline__ Piece<4 * kCount> load_values(const float* from) {
  if (reinterpret_cast<uintptr_t>(from) % (4 * kCount) == 0) return load<4 * kCount>(from);
  Piece<4 * kCount> piece;
#pragma unroll
  for (int k = 0; k < kCount; ++k) piece.word[k] = load<4>(from + k).word[0];
  return piece;
}

// Threads that hold a row together sum it, as `aggregate` does on the processor
// (allreduce/gradient_buffers.h); the +0.0 of its first value is in the messages.
template <int kCount>
__device__ __forceinline__ void add_row(const AddMessagesArguments& a, int64_t bucket,
                                        int64_t number, float* out, int lane) {
  const HeldMessages& messages = a.messages;
  const int dim = static_cast<int>(a.dim[bucket]), lanes = a.lanes[bucket];
  for (int d = lane * kCount; d < dim; d += lanes * kCount) {
    Piece<4 * kCount> sum;
    bool touched = false;
#pragma unroll 1
    for (int64_t rank = 0; rank < messages.ranks; ++rank) {
      const MessageHeader header = header_of(messages, rank);
      const int64_t before = header.rows[a.first + bucket];
      const auto count = static_cast<int>(header.rows[a.first + bucket + 1] - before);
      if (count == 0) continue;
      const int32_t* const numbers = a.numbers + messages.begins[messages.ranks + rank] + before;
      const int entry = last_at_most(numbers, 0, count, number);
      if (numbers[entry] != number) continue;
      const auto more =
          load_values<kCount>(message_of(messages, rank) + header.values[a.first + bucket] +
                              static_cast<int64_t>(entry) * dim + d);
      if (touched) {
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          sum.word[k] = bits_of_float(float_of_bits(sum.word[k]) + float_of_bits(more.word[k]));
      } else {
        sum = more;
        touched = true;
      }
    }
    if (touched) store(out + d, sum);
  }
}

// Sums the rows of a union, of the bucket blockIdx.y.
__global__ void __launch_bounds__(256, 4)
    add_messages(const __grid_constant__ AddMessagesArguments a) {
  const int64_t bucket = blockIdx.y;
  if (a.count[bucket] == 0) return;
  const int64_t* const rows = a.united_groups + a.first + bucket;
  const int64_t begin = rows[0], count = rows[1] - begin;
  float* const out = a.out + rows[a.messages.buckets + 1];
  for_rows(count, a.lanes[bucket], [&](int64_t row, int lane) {
    const int64_t number = number_at(a, bucket, a.united[begin + row]);
    if (a.wide)
      add_row<4>(a, bucket, number, out + row * a.dim[bucket], lane);
    else
      add_row<1>(a, bucket, number, out + row * a.dim[bucket], lane);
  });
}

}  // namespace oper
