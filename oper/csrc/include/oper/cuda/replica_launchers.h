// The launchers of the replicas' AllReduce (csrc/cuda/replica_sums.cu, replica_messages.cu).
#pragma once

#include <cstdint>

#include "oper/cuda/update_list.h"

namespace oper {

constexpr int kMostReplicaBuckets = 48;  // of a launch: they are parameters, of 4 KB at most

// The replicas of some buckets, the launch's.
struct ReplicaBuckets {
  int64_t buckets;
  const int64_t* slots[kMostReplicaBuckets];  // [count] ascending; null: number n is slot n
  int64_t count[kMostReplicaBuckets];
  int64_t first_word[kMostReplicaBuckets + 1];  // of a bitmap of all buckets
  int64_t group[kMostReplicaBuckets];           // of a rank's rows
};

// Marks the replicas among a rank's rows in its bitmap, which is clear.
struct MarkArguments : ReplicaBuckets {
  const int64_t* rows;
  const int64_t* before;  // rows before each group
  unsigned long long* bitmap;
};

// Words of a tile of UnionArguments.
constexpr int64_t kTileWords = 256;

// The union of the bitmaps of a node's ranks, and the bits that are set before each of its words:
// those of the word's tile, and before each tile those of all tiles before, of all in the end.
struct UnionArguments {
  const uint64_t* bitmaps[kMostLists];
  int64_t ranks;
  int64_t words;
  uint64_t* united;     // [words]
  int32_t* in_tile;     // [words]
  int64_t* tile_begin;  // [tiles + 1]
};

// The slots of a union's replicas, and how many there are before each bucket.
struct ListArguments : ReplicaBuckets {
  const uint64_t* united;
  const int32_t* in_tile;
  const int64_t* tile_begin;
  int64_t words;  // of all buckets
  int64_t* rows;
  int64_t* before;  // [buckets + 1]
};

// A rank's gradients of a union's replicas, or padding, in a buffer that `groups` lay out.
struct AggregateArguments {
  int64_t buckets;
  UpdateList own[kMostReplicaBuckets];
  UpdateList united[kMostReplicaBuckets];  // their values are those of `out`
  int64_t dim[kMostReplicaBuckets];
  int32_t lanes[kMostReplicaBuckets];  // threads that hold a row
  int32_t wide[kMostReplicaBuckets];   // 1: four values of it each, at once
  float* out;
};

// Slices of the sum of all ranks' buffers: one to be summed in their order, or all to be gathered
// from the buffers of those that summed them.
struct SliceArguments {
  const float* parts[kMostLists];
  int64_t ranks;
  int64_t rank;
  const int64_t* groups;  // [2, buckets + 1] of the values of a buffer
  const int64_t* dims;    // [buckets]; where a slice is summed
  int64_t buckets;
  int64_t* read;  // [1] what the rank reads of others' buffers is added: bytes
  float* out;     // the whole sum
};

// Buffers that are summed.
struct BufferArguments {
  const float* parts[kMostLists];
  int64_t count;
  int64_t values;  // of each
  float* out;
};

// Marks the replicas that any rank touched, whose gradients in a sum differ from padding, in a
// clear bitmap. The sum has all replicas of all buckets, as `groups` lay them out.
struct TouchedArguments : ReplicaBuckets {
  int64_t dim[kMostReplicaBuckets];
  const float* values;
  const int64_t* groups;  // [2, all buckets + 1]
  int64_t all;
  int64_t first;  // of the launch's buckets, among all
  unsigned long long* bitmap;
};

// The message of a rank, for the AllGather of replicas' gradients: the gradients of its replicas,
// bucket after bucket without gaps, then their numbers, int32. Its header [2, all buckets + 1] has
// the rows before each bucket, and the values before its gradients.
struct HeaderArguments {
  const int64_t* groups;  // [2, own groups + 1] of a rank's rows
  const int64_t* group;   // [buckets] which of them are replicas; -1: none are
  const int64_t* dim;     // [buckets]
  int64_t buckets;
  int64_t* header;
};

// Writes the gradients and the numbers of a rank's replicas to its message.
struct MessageArguments : ReplicaBuckets {
  int64_t dim[kMostReplicaBuckets];
  int32_t lanes[kMostReplicaBuckets];  // threads that hold a row
  int32_t wide;                        // 1: four values of it each, at once
  const int64_t* rows;
  const float* values;
  const int64_t* groups;  // [2, own groups + 1] of them
  int64_t own_groups;
  const int64_t* header;
  int64_t all;
  int64_t first;  // of the launch's buckets, among all
  float* message;
};

// The messages that the ranks of a node hold in memory that all can read: headers, and from
// `message_word` on, in words of 4 bytes, message after message. The message of rank r is number
// held_as[r] in segments[holder[r]].
struct HeldMessages {
  const int64_t* segments[kMostLists];
  int64_t message_word;
  int64_t ranks;
  int64_t buckets;
  const int64_t* holder;   // [ranks]
  const int64_t* held_as;  // [ranks]
  int64_t* headers;        // [ranks, 2, buckets + 1], copies
  int64_t* begins;         // [2, ranks] the first word of each message in its segment, and of its
                           // numbers in `numbers`
};

// Copies headers and the numbers of all messages, and marks their replicas in a clear bitmap.
struct NumberArguments : HeldMessages {
  int64_t own;                // this rank's number among the holders
  int64_t* read;              // [1] to which the bytes of the others' messages are added
  const int64_t* first_word;  // [buckets] of the bitmap
  int32_t* numbers;
  unsigned long long* bitmap;
};

// Sums the messages' gradients of each row of a union, in the order of the ranks.
struct AddMessagesArguments : ReplicaBuckets {
  HeldMessages messages;
  const int32_t* numbers;
  int64_t dim[kMostReplicaBuckets];
  int32_t lanes[kMostReplicaBuckets];
  int64_t wide;                  // 1: four values of a row at once
  const int64_t* united;         // slots
  const int64_t* united_groups;  // [2, all buckets + 1]
  int64_t first;                 // of the launch's buckets, among all
  float* out;
};

static_assert(sizeof(ListArguments) <= 4096 && sizeof(AggregateArguments) <= 4096);
static_assert(sizeof(MessageArguments) <= 4096 && sizeof(AddMessagesArguments) <= 4096);

// They start their work on `stream`, a CUstream, and return a cudaError_t. The buckets have up to
// `most_rows` rows together.
using MarkLauncher = int(const MarkArguments*, int64_t most_rows, void* stream);
using UnionLauncher = int(const UnionArguments*, void* stream);
using ListLauncher = int(const ListArguments*, void* stream);
using AggregateLauncher = int(const AggregateArguments*, int64_t most_rows, void* stream);
using SliceLauncher = int(const SliceArguments*, int64_t most_values, void* stream);
using BufferLauncher = int(const BufferArguments*, void* stream);
using GatherLauncher = int(const SliceArguments*, int64_t most_values, void* stream);
using TouchedLauncher = int(const TouchedArguments*, void* stream);
using HeaderLauncher = int(const HeaderArguments*, void* stream);
using MessageLauncher = int(const MessageArguments*, int64_t most_rows, void* stream);
using NumberLauncher = int(const NumberArguments*, int64_t most_rows, void* stream);
using AddMessagesLauncher = int(const AddMessagesArguments*, int64_t most_rows, void* stream);

}  // namespace oper
