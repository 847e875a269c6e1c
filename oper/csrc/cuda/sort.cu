// oper_cuda_make_words, oper_cuda_sort_scratch and oper_cuda_sort: sorts a batch's accesses by row
// and finds the runs of equal rows. All that CUB does for OPER is here; in the tests' emulator the
// standard library does it.

#include "oper/cuda/sort.cuh"

#if defined(__CUDACC__)
#include <thrust/iterator/counting_iterator.h>
#include <thrust/iterator/transform_iterator.h>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>
#else
#include <algorithm>
#include <numeric>
#include <vector>
#endif

namespace oper {
namespace {

// Sorts a.words, and a.numbers beside them where they are, by the words' bits above the numbers in
// them; equal ones stay in their order. Both come to be the first or the second of the two that are
// given: `sorted` is which. Without scratch, only tells how many bytes of it are needed.
cudaError_t sort_words(void* scratch, size_t& bytes, const SortArguments& a, int& sorted,
                       cudaStream_t stream) {
  const int first_bit = a.layout.number_bits;
  const int last_bit = first_bit + a.layout.key_bits();
#if defined(__CUDACC__)
  const auto accesses = static_cast<int32_t>(a.accesses);
  cub::DoubleBuffer<uint64_t> words(a.words[0], a.words[1]);
  cub::DoubleBuffer<int32_t> numbers(a.numbers[0], a.numbers[1]);
  const cudaError_t error =
      a.numbers[0] ? cub::DeviceRadixSort::SortPairs(scratch, bytes, words, numbers, accesses,
                                                     first_bit, last_bit, stream)
                   : cub::DeviceRadixSort::SortKeys(scratch, bytes, words, accesses, first_bit,
                                                    last_bit, stream);
  sorted = words.selector;
  return error;
#else
  static_cast<void>(stream);
  bytes = 1;
  if (!scratch) return cudaSuccess;
  // Passes of 8 bits, as CUB makes, each from one of the two to the other, say where it ends.
  sorted = (last_bit - first_bit + 7) / 8 % 2;
  std::vector<int32_t> order(a.accesses);
  std::iota(order.begin(), order.end(), 0);
  const std::vector<uint64_t> words(a.words[0], a.words[0] + a.accesses);
  // Bits beyond the last are not looked at, as by CUB.
  const uint64_t looked_at = last_bit < 64 ? (uint64_t{1} << last_bit) - 1 : ~uint64_t{0};
  std::stable_sort(order.begin(), order.end(), [&](int32_t left, int32_t right) {
    return (words[left] & looked_at) >> first_bit < (words[right] & looked_at) >> first_bit;
  });
  std::transform(order.begin(), order.end(), a.words[sorted], [&](int32_t n) { return words[n]; });
  if (a.numbers[0]) {
    const std::vector<int32_t> numbers(a.numbers[0], a.numbers[0] + a.accesses);
    std::transform(order.begin(), order.end(), a.numbers[sorted],
                   [&](int32_t n) { return numbers[n]; });
  }
  return cudaSuccess;
#endif
}

// The numbers n of sorted words that `starts` is true of, in order, and how many they are.
cudaError_t select_starts(void* scratch, size_t& bytes, const SortArguments& a,
                          const StartsRun& starts, cudaStream_t stream) {
  const auto accesses = static_cast<int32_t>(a.accesses);
#if defined(__CUDACC__)
  const thrust::counting_iterator<int32_t> numbers(0);
  return cub::DeviceSelect::Flagged(scratch, bytes, numbers,
                                    thrust::make_transform_iterator(numbers, starts), a.run_start,
                                    a.runs, accesses, stream);
#else
  static_cast<void>(stream);
  bytes = 1;
  if (!scratch) return cudaSuccess;
  int32_t* start = a.run_start;
  for (int32_t n = 0; n < accesses; ++n)
    if (starts(n)) *start++ = n;
  *a.runs = static_cast<int32_t>(start - a.run_start);
  return cudaSuccess;
#endif
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_make_words(const oper::WordArguments* a, int64_t accesses, void* stream) {
  using namespace oper;
  const int64_t strips = (accesses + kStrip - 1) / kStrip;
  const Launch how = a_thread_each(strips * kWarpThreads, stream);
  return a->offsets32 ? launch(how, make_words<int32_t>, *a, a->offsets32)
                      : launch(how, make_words<int64_t>, *a, a->offsets64);
}

extern "C" int oper_cuda_sort_scratch(const oper::SortArguments* a, uint64_t* bytes) {
  using namespace oper;
  int sorted = 0;
  size_t of_sort = 0, of_select = 0;
  cudaError_t error = sort_words(nullptr, of_sort, *a, sorted, nullptr);
  if (!error) error = select_starts(nullptr, of_select, *a, StartsRun{}, nullptr);
  *bytes = of_sort > of_select ? of_sort : of_select;
  return error;
}

extern "C" int oper_cuda_sort(const oper::SortArguments* a, int* sorted, void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  size_t bytes = a->scratch_bytes;
  cudaError_t error = sort_words(a->scratch, bytes, *a, *sorted, on);
  if (error) return error;
  const uint64_t* const words = a->words[*sorted];
  const StartsRun starts{words, a->layout.number_bits};
  bytes = a->scratch_bytes;
  error = select_starts(a->scratch, bytes, *a, starts, on);
  if (error) return error;
  const RunArguments runs{words,
                          a->accesses,
                          a->layout,
                          a->runs,
                          a->run_start,
                          a->positions,
                          reinterpret_cast<int64_t*>(a->words[1 - *sorted]),
                          a->before};
  const int64_t groups = a->layout.groups + 1;
  return launch(a_thread_each(groups > a->accesses ? groups : a->accesses, on), find_runs, runs);
}
