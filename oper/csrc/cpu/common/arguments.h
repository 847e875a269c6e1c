// Checks of an operator's arguments. Errors name the argument, the expected value and the given
// one: TypeError for dtypes, ValueError for shapes and values, IndexError for indices.
//
// Every operator checks all that it indexes by, once a call, a table, a feature or a segment,
// before it reads or writes; what there is one of for each row or access, it checks where that
// costs less than 1 % of its time. The contents of these are not looked at, and whoever calls
// vouches for them:
//
// * translate: bitmaps whose headers count their bits, codes of the groups, steps that name ranks.
//   AddressMap vouches, of a layout that oper/plan/validate.py has seen.
// * pooled_rows, weight_gradients: addresses of slots within the arenas, and bases of arenas mapped
//   here, with the features' widths and bytes of a row. AddressMap and Heap vouch.
// * copy_rows: slots of the arenas, by row_bytes. CopiedRows and RowExchange vouch, as slots are of
//   addresses that other ranks' maps gave.
// * unite_slots, relay_gradients: slots that ascend in each group, and that nobody writes
//   meanwhile. RelayedRows and RowExchange vouch.
// * sum_gradients: positions and runs of accesses of one bucket, by the features and segments that
//   they were sorted with. sort_accesses vouches.
// * add_gradients: rows of the accesses of features with gradients, from first_row on and within
//   `out`. number_rows vouches.
// * update_rows on a device: slots that ascend in each group. SortedRows vouches; a slot that is
//   not the arena's is passed over.
// * update_runs on a device: as sum_gradients and update_rows.
// * mark_replicas on a device: as update_rows; a slot that is no replica's is passed over.
// * find_united on a device: as unite_slots, and that all slots are among the united ones.
// * redirect on a device: positions of the batch's accesses. sort_accesses vouches.
// * unite_replicas on a device: bitmaps of no more replicas than there is room for, and no bits
//   beyond a bucket's. mark_replicas, mark_touched and take_numbers vouch for the bits, and the
//   methods of the AllReduce (DeviceBitmap and others) for the room.
// * write_message, take_numbers, add_messages: room for as many rows as there are, holders among
//   the segments, and messages as write_message wrote them. DeviceAllGather vouches.
// * map_segment, protect: a descriptor and memory of a segment. SharedSegment vouches.
// * leave_lock, watch_lock: descriptors of ranks' locks. Liveness vouches.
//
// Operators on devices cannot read what lies on the device without a wait: there the contents of
// all tensors on the device are vouched for, by the same callers.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cstdint>

#include "cpu/common/errors.h"

namespace oper {

// More ranks, tables, buckets or groups than any plan has; arrays of so many are still small.
constexpr int64_t kMostThings = int64_t{1} << 24;
// More rows, slots or bytes of a row than an address tells apart.
constexpr int64_t kMostRows = int64_t{1} << 40;
// More bytes, or accesses, than all tables have together.
constexpr int64_t kMostBytes = int64_t{1} << 60;

// A dtype as NumPy names it.
template <typename T>
inline constexpr const char* kDtypeName = nullptr;
template <>
inline constexpr const char* kDtypeName<bool> = "bool";
template <>
inline constexpr const char* kDtypeName<uint8_t> = "uint8";
template <>
inline constexpr const char* kDtypeName<int32_t> = "int32";
template <>
inline constexpr const char* kDtypeName<int64_t> = "int64";
template <>
inline constexpr const char* kDtypeName<float> = "float32";
template <>
inline constexpr const char* kDtypeName<double> = "float64";

// The elements of a contiguous tensor of T, to be read.
template <typename T>
const T* elements(const at::Tensor& tensor, const char* name) {
  static_assert(kDtypeName<T> != nullptr);
  OPER_CHECK_TYPE(tensor.scalar_type() == c10::CppTypeToScalarType<T>::value, name,
                  ": expected dtype ", kDtypeName<T>, ", got ", tensor.scalar_type());
  OPER_CHECK_VALUE(tensor.is_contiguous(), name, ": must be contiguous");
  return tensor.const_data_ptr<T>();
}

// The elements of a contiguous tensor of T that must have `size` of them, to be read.
template <typename T>
const T* elements(const at::Tensor& tensor, int64_t size, const char* name) {
  const T* const values = elements<T>(tensor, name);
  OPER_CHECK_VALUE(tensor.numel() == size, name, ": expected ", size, " contiguous elements, got ",
                   tensor.numel());
  return values;
}

// The elements of a contiguous tensor of T that must have `least` of them or more, to be read.
template <typename T>
const T* elements_at_least(const at::Tensor& tensor, int64_t least, const char* name) {
  const T* const values = elements<T>(tensor, name);
  OPER_CHECK_VALUE(tensor.numel() >= least, name, ": expected at least ", least,
                   " contiguous elements, got ", tensor.numel());
  return values;
}

// The elements of a contiguous tensor of T that must have `least` of them or more, to be written.
template <typename T>
T* writable_elements(const at::Tensor& tensor, int64_t least, const char* name) {
  elements_at_least<T>(tensor, least, name);
  return tensor.mutable_data_ptr<T>();
}

// The structs that the rows of a contiguous int64 tensor [structs, words of each] are.
template <typename Struct>
const Struct* structs(const at::Tensor& tensor, const char* name) {
  constexpr int64_t kWords = sizeof(Struct) / sizeof(int64_t);
  static_assert(sizeof(Struct) == kWords * sizeof(int64_t));
  OPER_CHECK_VALUE(tensor.dim() == 2 && tensor.size(1) == kWords, name, ": expected [structs, ",
                   kWords, "], got ", tensor.sizes());
  return reinterpret_cast<const Struct*>(elements<int64_t>(tensor, name));
}

// Checks that a number of things is from `least` to `most`.
inline void check_size(int64_t size, int64_t least, int64_t most, const char* name) {
  OPER_CHECK_VALUE(size >= least && size <= most, name, ": expected ", least, " to ", most,
                   ", got ", size);
}

// a · b, which must not overflow; neither is negative.
inline int64_t product(int64_t a, int64_t b, const char* name) {
  int64_t result = 0;
  OPER_CHECK_VALUE(!__builtin_mul_overflow(a, b, &result), name, ": ", a, " times ", b,
                   " is too large");
  return result;
}

inline void check_contiguous(const at::Tensor& tensor, const char* name) {
  OPER_CHECK_VALUE(tensor.is_contiguous(), name, ": must be contiguous");
}

inline void check_same_type(const at::Tensor& tensor, const char* name, const at::Tensor& other,
                            const char* other_name) {
  OPER_CHECK_TYPE(tensor.scalar_type() == other.scalar_type(), name, ": expected dtype ",
                  other.scalar_type(), ", that of ", other_name, ", got ", tensor.scalar_type());
}

// Checks that `index` is one of `size` things, called `what`.
inline void check_index(int64_t index, int64_t size, const char* name, const char* what) {
  OPER_CHECK_INDEX(index >= 0 && index < size, name, ": ", index, " is none of ", size, " ", what);
}

// Checks that offsets [count + 1] begin at 0 and ascend, as the starts of `count` things called
// `what`.
inline void check_offsets_from_zero(const int64_t* offsets, int64_t count, const char* name,
                                    const char* what) {
  OPER_CHECK_VALUE(count >= 0, name, ": expected at least one element, got none");
  OPER_CHECK_VALUE(offsets[0] == 0, name, ": must begin with 0");
  for (int64_t n = 0; n < count; ++n)
    OPER_CHECK_VALUE(offsets[n] <= offsets[n + 1], name, ": must ascend, and does not at ", what,
                     " ", n);
}

// Checks that offsets ascend within [0, last]: what they index is read without further checks.
template <typename T>
void check_offsets_within(const T* offsets, int64_t count, int64_t last, const char* name,
                          const char* what) {
  bool ascending = offsets[0] >= 0 && offsets[count] <= last;
  for (int64_t n = 0; n < count; ++n) ascending &= offsets[n] <= offsets[n + 1];
  OPER_CHECK_VALUE(ascending, name, ": must ascend from 0 or more to at most the ", last, " ",
                   what);
}

// f(T{}) with the type of ids or offsets: int32_t or int64_t.
template <typename F>
auto with_index_type(at::ScalarType type, const char* name, const F& f) {
  OPER_CHECK_TYPE(type == at::kInt || type == at::kLong, name,
                  ": expected dtype int64 or int32, got ", type);
  return type == at::kInt ? f(int32_t{}) : f(int64_t{});
}

// f(T{}) with the type of rows' counters: uint32_t, or uint64_t where one needs more.
template <typename F>
auto with_counter_type(const at::Tensor& counters, const char* name, const F& f) {
  OPER_CHECK_TYPE(counters.scalar_type() == at::kUInt32 || counters.scalar_type() == at::kUInt64,
                  name, ": expected dtype uint32 or uint64, got ", counters.scalar_type());
  OPER_CHECK_VALUE(counters.dim() == 1 && counters.is_contiguous(), name,
                   ": expected one contiguous dimension, got shape ", counters.sizes());
  return counters.scalar_type() == at::kUInt32 ? f(uint32_t{}) : f(uint64_t{});
}

}  // namespace oper
