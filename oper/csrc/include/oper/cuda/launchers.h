// Exports of the library of device kernels: the launchers of csrc/cuda/*.cu, those of the replicas'
// AllReduce in replica_launchers.h. The extension finds them by name when a device is first used,
// and the tests' emulator has the same.
#pragma once

#include <cstdint>

#include "oper/common/bits.h"
#include "oper/cuda/replica_launchers.h"
#include "oper/cuda/update_list.h"
#include "oper/plan/translate.h"
#include "oper/step/optimizers.h"
#include "oper/step/row_formats.h"

namespace oper {

struct Feature;  // step/feature.h

// What kernels find wrong in a batch that the host has not looked at: the least number of an id
// that is out of its table's range, and of a bag whose offsets do not fit. All bits of both are set
// before. Such an id gets the address of row 0; of a batch with such a bag nothing is read.
struct BatchReport {
  unsigned long long bad_id;
  unsigned long long bad_bag;
};
constexpr unsigned long long kNothingBad = ~0ull;

// A feature's bags and where their sums go: see Feature (step/feature.h).
struct LookupFeature {
  int64_t first_bag;
  int64_t bags;
  int64_t out_base;
  int64_t out_stride;
  int64_t mean;
};

constexpr int kMostFeatures = 64;  // of a launch: they are parameters, of 4 KB at most

// What features with rows of one type, dim, row_bytes and width read. Pointers are the device's.
struct RowArguments {
  const int64_t* addresses;
  const int32_t* offsets32;  // [bags + 1]; one of the two, or neither: bags hold one access each
  const int64_t* offsets64;
  const int64_t* arenas;  // [ranks + 1] where each rank's arena of the width begins
  int64_t ranks;
  int64_t rank;  // whose own copies are read
  int64_t dim;
  int64_t row_bytes;
  const BatchReport* report;  // null: the batch was looked at
  // The features' bags, cut into tiles of one feature's bags each; launchers cut them. Feature f
  // has tiles [first_tile[f], first_tile[f + 1]), and what comes after the last feature has none.
  int32_t first_tile[kMostFeatures + 1];
  LookupFeature features[kMostFeatures];
};

struct LookupArguments : RowArguments {
  const float* weights;  // null: 1
  uint8_t* out;
  int64_t out_type;     // a RowType, not int8
  int64_t wide_stores;  // 1: every bag's place in `out` is a multiple of 16 bytes
  int64_t short_bags;   // 1: most bags have one access or none, and there are no weights
};

// Gradients of the weights of accesses, from that of the lookup's output.
struct WeightArguments : RowArguments {
  const uint8_t* grad;
  int64_t grad_type;  // a RowType, not int8
  int64_t wide;       // 1: dims are multiples of 4 values, and so is every bag's place in `grad`
  float* out;         // [accesses]
};

// Sums of gradients by row: of the runs of sorted accesses that groups [first_group, last_group)
// have, as sort_accesses made them. All pointers are the device's, and so is what they say of
// sizes.
struct SumArguments {
  const uint8_t* grad;
  const int32_t* positions;  // of the sorted accesses in the batch; where `by_bag`, their bags
  const int32_t* run_start;
  const int64_t* groups;  // [2, all_groups + 1] rows before each group, values before each group's
  int64_t all_groups;
  int64_t first_group;
  int64_t last_group;
  const int32_t* offsets32;  // [bags + 1]; one of the two, or neither: bags hold one access each
  const int64_t* offsets64;
  int64_t bags;
  const float* weights;  // by position; null: 1
  const Feature* features;
  int64_t feature_count;
  const int64_t* segment_offset;  // [feature_count + 1]
  int64_t accesses;               // room for positions, as many as the batch has accesses
  int64_t by_bag;
  int64_t dim;
  float scale;
  float* values;  // null: of long runs alone, where their first pieces' are
  // Room for what is found on the way: the bag of each access, by position (null: by_bag, or bags
  // hold one each); of each sorted access, where its gradient lies in `grad` and what it is
  // multiplied by (null: 1); partial sums [partial_sums(accesses), dim].
  int32_t* bag_of;
  uint32_t* place;
  float* factor;
  float* partial;
};

// Ids offsets[s] … offsets[s + 1] - 1 are rows of table segment_table[s].
template <typename Id, typename Code>
struct TranslateArguments {
  MapView<Code> map;
  const Id* ids;
  int64_t count;
  const int64_t* segment_offset;  // [segments + 1]
  const int64_t* segment_table;   // [segments]
  int64_t segments;
  int64_t* out;
  BatchReport* report;
};

// The offsets of a batch, which are to ascend from 0 to the number of its values.
struct BagArguments {
  const int32_t* offsets32;  // [bags + 1]; one of the two
  const int64_t* offsets64;
  int64_t bags;
  int64_t values;
  BatchReport* report;
};

// Which ranks accesses read from. Added to counts [buckets, ranks + 1]: of replicas, then of each
// rank.
struct CountArguments {
  const int64_t* addresses;
  int64_t rank;  // whose own copies are read
  int64_t ranks;
  int64_t* counts;
  const int64_t* segment_offset;  // [features + 1]: those of the launch's first feature on
  const BatchReport* report;      // null: the batch was looked at
  int64_t bucket[kMostFeatures];
};

// An access as the sort by row has it, in one word: the group of its row, which is one bucket's
// rows of one owner, the row's slot, and what the access is called. Words of group number `groups`
// come after all others and are of no group.
struct WordLayout {
  int64_t groups;
  int32_t slot_bits;
  int32_t number_bits;  // 0: what accesses are called lies beside the words

  // Bits of group and slot.
  int key_bits() const { return bit_width(static_cast<uint64_t>(groups)) + slot_bits; }
  OPER_HD uint64_t word(int64_t group, int64_t slot, int64_t number) const {
    const uint64_t key = static_cast<uint64_t>(group) << slot_bits | static_cast<uint64_t>(slot);
    return key << number_bits | static_cast<uint64_t>(number);
  }
  OPER_HD int64_t slot_of(uint64_t word) const {
    return static_cast<int64_t>(word >> number_bits & ((uint64_t{1} << slot_bits) - 1));
  }
  OPER_HD int32_t number_of(uint64_t word) const {
    return static_cast<int32_t>(word & ((uint64_t{1} << number_bits) - 1));
  }
};

constexpr int kMostSortedFeatures = 960;  // of a launch: they are parameters, of 4 KB at most

// What words are made from: accesses of some features, which follow each other.
struct WordArguments {
  const int64_t* addresses;
  int64_t accesses;               // of the batch
  const int64_t* segment_offset;  // [features + 1]: those of the launch's first feature on
  int64_t features;
  const int32_t* offsets32;  // [bags + 1] of the batch; one of the two where accesses are called by
  const int64_t* offsets64;  // their bags, else neither
  int64_t bags;
  const BatchReport* report;  // null: the batch was looked at
  int64_t bad_ids_too;        // 1: nothing is found of a batch with a bad id either
  int64_t rank;               // whose own copies are read
  int64_t ranks;
  WordLayout layout;
  uint64_t* words;
  int32_t* numbers;                     // null: they are in the words
  int32_t bucket[kMostSortedFeatures];  // -1: of a frozen table, of no group
};
static_assert(sizeof(WordArguments) <= 4096);

// What is sorted, and where the runs go: `accesses` of everything but what says otherwise.
struct SortArguments {
  uint64_t* words[2];   // the words, and memory for as many
  int32_t* numbers[2];  // the same of the numbers beside them; null where they are in the words
  int64_t accesses;     // 1 or more
  WordLayout layout;
  uint8_t* scratch;
  uint64_t scratch_bytes;
  int32_t* runs;       // [1] how many there are, that of no group included
  int32_t* run_start;  // [accesses + 1]
  int32_t* positions;  // null where numbers lie beside the words
  int64_t* before;     // [groups + 1] runs before each group
};

// Sorted words, of which `runs` start at run_start.
struct RunArguments {
  const uint64_t* words;
  int64_t accesses;
  WordLayout layout;
  const int32_t* runs;
  int32_t* run_start;
  int32_t* positions;
  int64_t* run_slot;
  int64_t* before;
};

// Lists of slots, ascending in each, to be united: pieces of them, each of a group. Pointers are
// the device's.
struct ListedArguments {
  const int64_t* begins;  // [pieces + 1] slots before each piece
  const int64_t* places;  // [pieces] the address of the first
  const int64_t* groups;  // [pieces]
  int64_t pieces;
  int64_t slots;
  WordLayout layout;
  uint64_t* words;  // [slots]
};

// A rank's rows, pieces of which are looked for among united slots.
struct FoundArguments {
  const int64_t* begins;        // [pieces + 1] rows before each piece
  const int64_t* first_row;     // [pieces] among all rows of the rank
  const int64_t* places;        // [pieces] the address of the united slots that it is among
  const int64_t* counts;        // [pieces] how many these are
  const int64_t* first_target;  // [pieces] what the first of them is called
  int64_t pieces;
  int64_t rows;
  const int64_t* slots;
  int64_t* targets;
};

// A batch's accesses and bags, as they were given.
struct GivenBags {
  const int64_t* addresses;
  const int32_t* offsets32;  // [bags + 1]; one of the two, or neither: bags hold one access each
  const int64_t* offsets64;
  const float* weights;  // where they are `weighted`
  int64_t weighted;
  int64_t accesses;
  int64_t bags;
};

// Of each rank its node's number among the others, and of this rank's own how many others there
// are; the last is of addresses that name no rank, which count as its own.
struct NodesOfRanks {
  const int64_t* node;  // [ranks + 1]
  int64_t ranks;
  int64_t others;
};

// What bags forward, as words of its group, a node's feature, its bag and its position.
struct ForwardArguments {
  GivenBags given;
  NodesOfRanks nodes;
  const int64_t* bounds;        // [bound_count] bags from which on a feature's are, or no feature's
  const int64_t* feature_from;  // [bound_count] the feature, -1: of none
  int64_t bound_count;
  int64_t features;
  WordLayout layout;
  uint64_t* words;   // [accesses]
  int32_t* numbers;  // null: they are in the words
  int32_t* kept;     // [bags] of accesses, of which those that go will be taken
};

// What goes to a node: words [2 · features + bags + (code words + 1, of weights) · accesses].
struct NodeParcel {
  int32_t* words;
  int64_t* places;     // [bags] where the sums begin in the output
  int32_t* positions;  // [accesses] in the batch; where there are weights
  int64_t first_bag;   // among those of all nodes, as the first access
  int64_t bags;
  int64_t first_access;
  int64_t accesses;
};

struct ParcelArguments {
  GivenBags given;
  NodesOfRanks nodes;
  const int64_t* code;  // [ranks + 1] the bits above the slot, of a rank's rows
  int64_t code_words;
  const int64_t* base;  // [features] where the sum of bag 0 of the batch would begin
  const int64_t* stride;
  int64_t features;
  WordLayout layout;
  const uint64_t* words;     // sorted
  const int32_t* positions;  // as sorted
  const int32_t* run_start;
  const int64_t* run_bag;
  const int64_t* counts;  // [2, groups + 1] bags before each group, accesses before each
  int64_t runs;           // of bags that go somewhere
  int64_t accesses;       // of them
  const NodeParcel* parcels;
  int32_t* kept;
};

// What a client forwarded.
struct ClientParcel {
  const int32_t* lengths;
  const int32_t* codes;
  const float* weights;
  int64_t first_bag;  // among those of all clients, as the first access
  int64_t first_access;
};

// A batch without what it forwards, and after it what came of clients.
struct JoinArguments {
  GivenBags given;
  NodesOfRanks nodes;
  const int64_t* first_bag;  // [features] ascending
  const int64_t* stays;      // [features] 1: nothing of it is forwarded
  int64_t features;
  const int32_t* kept;  // [bags], of features that forward anything
  const ClientParcel* clients;
  const int64_t* bag_begins;     // [client_count + 1]
  const int64_t* access_begins;  // [client_count + 1]
  int64_t client_count;
  const int64_t* fields;  // [field_count] of addresses, by the place that a code names
  int64_t field_count;
  int64_t slot_bits;
  int64_t code_words;
  int32_t* lengths;        // [1 + all bags], the first 0
  const int32_t* offsets;  // [1 + all bags] their sums
  int64_t own;             // accesses that stay
  int64_t* addresses;
  float* weights;
  int32_t* positions;  // [own]; where there are weights
};

// Vectors of bags, feature after feature.
struct VectorArguments {
  const int64_t* first_value;  // [features + 1] among those of all vectors
  const int64_t* first_bag;    // [features]
  const int64_t* dim;          // [features]
  int64_t features;
  const int64_t* places;  // [bags]
  float* bags;
  float* vectors;
};

// Rows of one arena that are copied to one place, one after another.
struct CopiedPiece {
  const uint8_t* arena;
  uint8_t* out;
  int64_t first;  // of `slots`
  int64_t row_bytes;
  int64_t row_words;  // that a row is copied by, of 1, 2, 4, 8 or 16 bytes
  int64_t target;     // what the first is called
};

struct CopyArguments {
  const int64_t* begins;  // [pieces + 1] words before each piece
  const CopiedPiece* piece;
  int64_t pieces;
  int64_t words;
  const int64_t* slots;
  int64_t* targets;  // null: rows are called nothing
};

// Accesses sorted by row, which are to read a row where its target is.
struct RedirectArguments {
  const int32_t* positions;
  const int32_t* run_start;  // [runs + 1]
  int64_t runs;
  const int64_t* targets;  // [runs], negative: the row is read where it is
  int64_t accesses;        // room for positions
  int64_t* addresses;
};

// Threads that hold a row of so many pieces: as many, up to a warp.
constexpr int32_t lanes_for(int64_t pieces) {
  int32_t lanes = 1;
  while (lanes < 32 && lanes < pieces) lanes *= 2;
  return lanes;
}

// A step of an arena's rows. Pointers are the device's.
struct StepArguments {
  Arena arena;
  int64_t slots;  // of the arena
  Settings settings;
  const Settings* there;  // null, or where they are in the place of `settings`: a graph that has
                          // the step finds other ones each time it runs
  unsigned long long* updated;  // rows are counted here
  int64_t wide_rows;   // 1: four values of rows and gradients each can be read and written at once
  int64_t wide_state;  // 1: four values of the state's parts as well, if that is so of rows
  int64_t lanes;       // threads that hold a row, which the launcher sets
};

// By the sums of the rows' gradients over the lists, in their order.
struct UpdateArguments : StepArguments {
  int64_t lists;
  UpdateList list[kMostLists];
};

// By the gradients of a batch, summed by row, whose partial sums are there.
struct RunUpdateArguments : StepArguments {
  SumArguments sums;
  const int64_t* run_slot;  // as run_start
};

constexpr int kMostBuckets = 960;  // of a layout: they are parameters too

// Buckets of rows, each of as many groups, and the values of a gradient in each.
struct BucketDims {
  int64_t buckets;
  int64_t of_bucket;
  int32_t dim[kMostBuckets];
};

// The rows of a strip are counted by a warp, and those of all strips by one block.
constexpr int64_t kMergeStrip = 256;
constexpr int kCountWarps = 32;

// Gradients of a batch's rows, by group, slots ascending in each.
struct MergeList {
  const int64_t* slots;
  const float* values;
  const int64_t* groups;  // [2, groups + 1]
  int32_t* place;         // of each row in the other list
};

// The rows of the two lists that a sum is of; -1: none.
struct alignas(8) SumSource {
  int32_t row[2];
};

// Two lists as one. Pointers are the device's, and so is what they say of sizes.
struct MergeArguments {
  BucketDims dims;
  MergeList list[2];
  int64_t most_rows[2];  // that the lists have room for
  int64_t most_values;   // that the sums have room for
  int64_t* slots;        // [most_rows of both]
  int64_t* groups;       // [2, groups + 1]
  float* values;
  // Room for what is found on the way. Rows of the second list that the first has not, before each
  // of its strip and its end [most_rows[1] + 1], before each strip, and in each warp's strips
  // [kCountWarps].
  int32_t* new_in_strip;
  int32_t* new_in_strips;
  int32_t* new_in_warps;
  SumSource* sources;  // [most_rows of both]
};
static_assert(sizeof(MergeArguments) <= 4096);

// Those that take a `stream`, a CUstream, start their work on it. All return a cudaError_t; the
// driver's errors have the same numbers.

// Looks up `features` features, at most kMostFeatures; cuts the tiles.
using LookupLauncher = int(LookupArguments*, int64_t row_type, int64_t features, void* stream);

// Of features as the lookup's.
using WeightLauncher = int(WeightArguments*, int64_t row_type, int64_t features, void* stream);

// Sums gradients of grad_type, a RowType but int8.
using SumLauncher = int(const SumArguments*, int64_t grad_type, void* stream);

// `arguments` is TranslateArguments of ids of id_bytes and codes of code_bytes, 4 or 8.
using TranslateLauncher = int(const void* arguments, int64_t id_bytes, int64_t code_bytes,
                              void* stream);

// Looks for bags whose offsets do not fit.
using BagLauncher = int(const BagArguments*, void* stream);
// Leaves a report in one of `count` slots of the host's memory.
using ReportLauncher = int(const BatchReport*, BatchReport* slots, int64_t count, int64_t* posted,
                           void* stream);

// Counts the accesses of `features` features, at most kMostFeatures; `accesses` is how many they
// have on average.
using CountLauncher = int(const CountArguments*, int64_t features, int64_t accesses, void* stream);

// Makes words of the accesses of a launch's features, about `accesses` of them.
using WordLauncher = int(const WordArguments*, int64_t accesses, void* stream);
// Bytes of scratch that sorting takes.
using SortScratch = int(const SortArguments*, uint64_t* bytes);
// Sorts words and finds their runs. The words, and the numbers beside them, are then in the first
// or the second of what was given, by *sorted; the slots of the runs are in the other words'
// memory.
using SortLauncher = int(const SortArguments*, int* sorted, void* stream);

// Of one slot, row, word or access at least.
using ListedLauncher = int(const ListedArguments*, void* stream);
using FoundLauncher = int(const FoundArguments*, void* stream);
using CopyLauncher = int(const CopyArguments*, void* stream);
using ForwardLauncher = int(const ForwardArguments*, void* stream);
using ForwardCounter = int(const int64_t* before, const int32_t* run_start, int64_t groups,
                           int64_t* counts, void* stream);
using ParcelLauncher = int(const ParcelArguments*, void* stream);
using LengthLauncher = int(const JoinArguments*, int64_t bags, void* stream);
using JoinLauncher = int(const JoinArguments*, int64_t received, void* stream);
using VectorLauncher = int(const VectorArguments*, int64_t values, int64_t add, void* stream);
using RedirectLauncher = int(const RedirectArguments*, void* stream);

// Takes a step of the optimizer of this number in Optimizers; a list has `most_rows` at the most.
using UpdateLauncher = int(const UpdateArguments*, int64_t optimizer, int64_t most_rows,
                           void* stream);

// Sums gradients of float32 and takes the rows' steps of the optimizer of this number.
using RunUpdateLauncher = int(const RunUpdateArguments*, int64_t optimizer, void* stream);

// Makes groups [2, G + 1] of the rows before each group [G + 1], of which there are one or more.
using LayoutLauncher = int(const BucketDims*, const int64_t* before, int64_t* groups, void* stream);

// Merges two lists of one group or more.
using MergeLauncher = int(const MergeArguments*, void* stream);

// Memory of a device that other processes can map: at least `bytes`, in fact *size, mapped at
// *pointer, and a descriptor of it, which the caller closes.
using CreateSegment = int(int device, uint64_t bytes, uint64_t* size, uint64_t* pointer,
                          int* descriptor);
// Maps that memory in another process, of its *size, for a device there. The descriptor stays open.
using AttachSegment = int(int device, int descriptor, uint64_t size, uint64_t* pointer);
// Unmaps what either of the two mapped, once all work on the device that may use it has ended.
using ReleaseSegment = int(int device, uint64_t pointer, uint64_t size);

// Waits for a stream's work for so long at the most; *done says whether that was long enough.
using StreamWait = int(void* stream, int64_t milliseconds, int* done);

// Says whether what is started on a stream is captured by a CUDA graph.
using CaptureQuestion = int(void* stream, int* captured);

// Versions of CUDA, 1,000 times the major one and 10 times the minor one: what the driver supports,
// 0 where there is none, and that of the runtime in the library.
using CudaVersions = void(int* driver, int* runtime);

// The architectures that the library has kernels of, as "800,900": 100 times the major version and
// 10 times the minor one.
using Architectures = const char*();

// The text of a cudaError_t.
using ErrorText = const char*(int);

// kDeviceInterface of the library: other arguments, or others of equal size, are another interface.
using InterfaceNumber = int64_t();
constexpr int64_t kDeviceInterface =
    (int64_t{13} << 32) + sizeof(LookupArguments) + sizeof(WeightArguments) + sizeof(SumArguments) +
    sizeof(TranslateArguments<int64_t, uint64_t>) + sizeof(CountArguments) + sizeof(WordArguments) +
    sizeof(SortArguments) + sizeof(UpdateArguments) + sizeof(RunUpdateArguments) +
    sizeof(BucketDims) + sizeof(MergeArguments) + sizeof(MarkArguments) + sizeof(UnionArguments) +
    sizeof(ListArguments) + sizeof(AggregateArguments) + sizeof(SliceArguments) +
    sizeof(ListedArguments) + sizeof(FoundArguments) + sizeof(CopiedPiece) + sizeof(CopyArguments) +
    sizeof(RedirectArguments) + sizeof(ForwardArguments) + sizeof(NodeParcel) +
    sizeof(ParcelArguments) + sizeof(ClientParcel) + sizeof(JoinArguments) +
    sizeof(VectorArguments) + sizeof(BufferArguments) + sizeof(TouchedArguments) +
    sizeof(HeaderArguments) + sizeof(MessageArguments) + sizeof(NumberArguments) +
    sizeof(AddMessagesArguments);

}  // namespace oper
