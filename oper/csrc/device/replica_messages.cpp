// torch.ops.oper.write_message, take_numbers and add_messages: the AllGather of replicas' gradients
// on a device. Rows, gradients, messages and the numbers of them lie on the device: the caller
// vouches for them, and gives the number of rows that there is room for.

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cpu/common/arguments.h"
#include "device/arguments.h"
#include "device/library.h"
#include "device/replica_buckets.h"
#include "schemas.h"

namespace oper {
namespace {

// Whether rows of all buckets, one after another, are whole pieces of four values.
bool all_wide(at::IntArrayRef dims) {
  return std::all_of(dims.begin(), dims.end(), [](int64_t dim) { return dim % 4 == 0; });
}

// Sets the dim of a bucket, and the number of threads that hold a row.
template <typename Arguments>
void set_dim(Arguments& a, int64_t bucket, int64_t dim) {
  check_size(dim, 1, kMostThings, "dims");
  a.dim[bucket] = dim;
  a.lanes[bucket] = lanes_for(a.wide ? dim / 4 : dim);
}

// Writes the header of a rank's message, and the message: gradients, then numbers. `group` on the
// host and `group_there` on the device say which groups of the rank's rows are replicas; -1 on the
// device is a bucket without replicas.
void write_message(const at::Tensor& slots, const at::Tensor& groups, const at::Tensor& values,
                   const at::Tensor& group_there, at::IntArrayRef group, at::TensorList replicas,
                   at::IntArrayRef counts, const at::Tensor& dims_there, at::IntArrayRef dims,
                   at::Tensor& header, at::Tensor& message, int64_t stream) {
  const c10::DeviceGuard guard(message.device());
  const std::vector<Replicas> buckets = replicas_of(replicas, counts);
  const auto all = static_cast<int64_t>(buckets.size());
  check_one_each(group, buckets.size());
  check_one_each(dims, buckets.size());
  check_on({{slots, "slots"},
            {groups, "groups"},
            {values, "values"},
            {group_there, "group"},
            {dims_there, "dims_there"},
            {header, "header"}},
           message);
  HeaderArguments head{};
  head.groups = lines_of(groups, "groups");
  head.group = elements<int64_t>(group_there, all, "group");
  head.dim = elements<int64_t>(dims_there, all, "dims_there");
  head.buckets = all;
  lines_of(header, buckets.size(), "header");
  head.header = header.mutable_data_ptr<int64_t>();
  check_device(device_library().write_header(&head, stream_of(stream)),
               "a message of replicas could not be begun");
  MessageArguments a{};
  a.rows = elements<int64_t>(slots, "slots");
  a.values = elements<float>(values, "values");
  a.groups = head.groups;
  a.own_groups = groups.size(1) - 1;
  a.header = head.header;
  a.all = all;
  a.message = writable_elements<float>(message, 0, "message");
  a.wide = all_wide(dims) && is_wide(a.values) && is_wide(a.message);
  each_launch(buckets, [&](int64_t first, int64_t word) {
    set_buckets(a, buckets, first, word);
    a.first = first;
    for (int64_t b = 0; b < a.buckets; ++b) {
      check_size(a.count[b], 0, int64_t{1} << 31, "count that int32 can number");
      a.group[b] = group[first + b];
      if (a.count[b] > 0) check_index(a.group[b], a.own_groups, "group", "groups");
      set_dim(a, b, dims[first + b]);
    }
    check_device(device_library().write_message(&a, slots.numel(), stream_of(stream)),
                 "a message of replicas could not be written");
  });
}

// The ranks' messages in the memory of their holders.
HeldMessages held_messages(at::TensorList segments, int64_t message_word,
                           const at::Tensor& holders) {
  check_size(static_cast<int64_t>(segments.size()), 1, kMostLists, "segments");
  HeldMessages a{};
  for (size_t n = 0; n < segments.size(); ++n) {
    check_on(segments[n], segments[0], "segments");
    a.segments[n] = elements<int64_t>(segments[n], "segments");
  }
  check_on(holders, segments[0], "holders");
  a.holder = elements<int64_t>(holders, "holders");
  a.ranks = holders.numel();
  check_size(a.ranks, 1, kMostThings, "holders: ranks");
  check_size(message_word, 0, kMostRows, "message_word");
  a.message_word = message_word;
  return a;
}

// Returns the headers [ranks, 2, buckets + 1] of all messages; the places at which messages and
// their numbers begin [2, ranks]; and the numbers, up to `most_rows`. Marks the replicas in
// `bitmap`, and adds the bytes of the messages of other holders than `own` to `read`.
std::tuple<at::Tensor, at::Tensor, at::Tensor> take_numbers(
    at::TensorList segments, int64_t message_word, const at::Tensor& holders,
    const at::Tensor& held_as, int64_t own, const at::Tensor& first_words, int64_t most_rows,
    at::Tensor& bitmap, at::Tensor& read, int64_t stream) {
  const c10::DeviceGuard guard(bitmap.device());
  NumberArguments a{};
  static_cast<HeldMessages&>(a) = held_messages(segments, message_word, holders);
  check_on({{held_as, "held_as"}, {first_words, "first_words"}, {bitmap, "bitmap"}, {read, "read"}},
           segments[0]);
  check_index(own, static_cast<int64_t>(segments.size()), "own", "segments");
  check_size(most_rows, 0, INT32_MAX, "most_rows");
  a.held_as = elements<int64_t>(held_as, a.ranks, "held_as");
  a.own = own;
  a.first_word = elements<int64_t>(first_words, "first_words");
  a.buckets = first_words.numel();
  a.read = writable_elements<int64_t>(read, 1, "read");
  elements<int64_t>(bitmap, "bitmap");
  a.bitmap = static_cast<unsigned long long*>(bitmap.mutable_data_ptr());
  const auto wide = bitmap.options();
  at::Tensor headers = at::empty({a.ranks, 2, a.buckets + 1}, wide);
  at::Tensor begins = at::empty({2, a.ranks}, wide);
  at::Tensor numbers = at::empty({most_rows}, wide.dtype(at::kInt));
  a.headers = headers.mutable_data_ptr<int64_t>();
  a.begins = begins.mutable_data_ptr<int64_t>();
  a.numbers = numbers.mutable_data_ptr<int32_t>();
  bitmap.zero_();
  check_device(device_library().take_numbers(&a, most_rows, stream_of(stream)),
               "messages of replicas could not be read");
  return {headers, begins, numbers};
}

// Writes the sum of each united row's gradients to its place in `out`.
void add_messages(at::TensorList segments, int64_t message_word, const at::Tensor& holders,
                  const at::Tensor& headers, const at::Tensor& begins, const at::Tensor& numbers,
                  at::TensorList replicas, at::IntArrayRef counts, at::IntArrayRef dims,
                  const at::Tensor& united, const at::Tensor& united_groups, at::Tensor& out,
                  int64_t stream) {
  const c10::DeviceGuard guard(out.device());
  const std::vector<Replicas> buckets = replicas_of(replicas, counts);
  const auto all = static_cast<int64_t>(buckets.size());
  check_one_each(dims, buckets.size());
  AddMessagesArguments a{};
  HeldMessages& held = a.messages = held_messages(segments, message_word, holders);
  check_on({{headers, "headers"},
            {begins, "begins"},
            {numbers, "numbers"},
            {united, "united"},
            {united_groups, "united_groups"},
            {out, "out"}},
           segments[0]);
  held.buckets = all;
  elements<int64_t>(headers, held.ranks * 2 * (all + 1), "headers");
  held.headers = headers.mutable_data_ptr<int64_t>();
  elements<int64_t>(begins, 2 * held.ranks, "begins");
  held.begins = begins.mutable_data_ptr<int64_t>();
  a.numbers = elements<int32_t>(numbers, "numbers");
  a.united = elements<int64_t>(united, "united");
  check_size(united.numel(), 0, INT32_MAX, "united: elements");
  a.united_groups = lines_of(united_groups, buckets.size(), "united_groups");
  a.out = writable_elements<float>(out, 0, "out");
  a.wide = all_wide(dims) && is_wide(a.out);
  each_launch(buckets, [&](int64_t first, int64_t word) {
    set_buckets(a, buckets, first, word);
    a.first = first;
    for (int64_t b = 0; b < a.buckets; ++b) set_dim(a, b, dims[first + b]);
    check_device(device_library().add_messages(&a, united.numel(), stream_of(stream)),
                 "messages of replicas could not be summed");
  });
}

}  // namespace
}  // namespace oper

// The processor has pack_rows and merge_messages instead.
TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def(oper::schemas::kWriteMessage);
  m.def(oper::schemas::kTakeNumbers);
  m.def(oper::schemas::kAddMessages);
}
TORCH_LIBRARY_IMPL(oper, CUDA, m) {
  m.impl("write_message", oper::write_message);
  m.impl("take_numbers", oper::take_numbers);
  m.impl("add_messages", oper::add_messages);
}

// The same for tests, of memory that the emulator takes for a device's.
TORCH_LIBRARY_FRAGMENT(oper_emulated, m) {
  m.def(oper::schemas::kWriteMessage);
  m.def(oper::schemas::kTakeNumbers);
  m.def(oper::schemas::kAddMessages);
}
TORCH_LIBRARY_IMPL(oper_emulated, CPU, m) {
  m.impl("write_message", oper::write_message);
  m.impl("take_numbers", oper::take_numbers);
  m.impl("add_messages", oper::add_messages);
}
