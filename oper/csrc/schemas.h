// Schemas of the operators that devices have: each is registered for oper, by the processor's file
// where it has the operator too, and again for oper_emulated, the tests' emulator of devices.
#pragma once

namespace oper::schemas {

constexpr const char* kTranslate =
    "translate(Tensor ids, Tensor segment_offset, Tensor segment_table, Tensor tables,"
    " Tensor bitmap, Tensor? stripe_bitmap, Tensor? everywhere_bitmap, Tensor codes,"
    " int group_bits, Tensor group_base, Tensor stripe_base, Tensor steps, Tensor flat,"
    " int stream=0, Tensor? report=None) -> Tensor";

constexpr const char* kSortAccesses =
    "sort_accesses(Tensor addresses, Tensor segment_offset, Tensor features, int rank, int ranks,"
    " int[] bucket_slots, Tensor? offsets=None, int stream=0, Tensor? report=None,"
    " bool bad_ids_too=False) -> (Tensor positions, Tensor run_start, Tensor run_slot,"
    " Tensor run_count)";

constexpr const char* kAccessesByRank =
    "accesses_by_rank(Tensor addresses, Tensor segment_offset, Tensor features, int buckets,"
    " int rank, int ranks, int stream=0, Tensor? report=None) -> Tensor";

constexpr const char* kPooledRows =
    "pooled_rows(Tensor addresses, Tensor? offsets, Tensor? weights, Tensor features, Tensor bases,"
    " int rank, SymInt out_elements, ScalarType out_dtype, int stream=0, Tensor? report=None)"
    " -> Tensor";

constexpr const char* kPooledRowsByGets =
    "pooled_rows_by_gets(Tensor addresses, Tensor? offsets, Tensor? weights, Tensor features,"
    " Tensor bases, Tensor symmetric, Tensor far, Tensor stage, int rank, int out_elements,"
    " ScalarType out_dtype, int stream=0, Tensor? report=None) -> Tensor";

constexpr const char* kFetchRows =
    "fetch_rows(Tensor(a!) addresses, Tensor positions, Tensor run_start, Tensor slots,"
    " Tensor run_count, Tensor bases, Tensor symmetric, int[] widths, int[] row_bytes,"
    " Tensor row_bytes_there, Tensor(b!) buffer, int rank, int stream, Tensor? report) -> ()";

constexpr const char* kGetPieces =
    "get_pieces(Tensor pieces, Tensor source, Tensor(a!) buffer, int stream) -> ()";

constexpr const char* kUniteSlots =
    "unite_slots(Tensor[] slots, Tensor[] before, int[] groups, int stream=0)"
    " -> (Tensor slots, Tensor before)";

constexpr const char* kFindUnited =
    "find_united(Tensor(a!) targets, Tensor slots, Tensor before, int[] groups, Tensor[] united,"
    " Tensor[] united_before, int[] fields, int[] firsts, int stream=0) -> ()";

constexpr const char* kForwardBags =
    "forward_bags(Tensor addresses, Tensor? offsets, Tensor? weights, Tensor features,"
    " int[] destination_of, int destinations, int[] places, int slot_bits, int code_words,"
    " int stream=0) -> (Tensor[] words, Tensor[] places_of_bags, Tensor[] positions, Tensor kept,"
    " Tensor counts)";

constexpr const char* kJoinBags =
    "join_bags(Tensor addresses, Tensor? offsets, Tensor? weights, Tensor features,"
    " int[] forwards, int[] destination_of, int destinations, Tensor kept, Tensor[] received,"
    " int forwarded_features, int[] fields, int slot_bits, int code_words, Tensor? heads=None,"
    " int stream=0) -> (Tensor addresses, Tensor offsets, Tensor? weights, Tensor positions)";

constexpr const char* kAddBags =
    "add_bags(Tensor(a!) out, Tensor places, int[] counts, int[] dims, Tensor vectors,"
    " int stream=0) -> ()";

constexpr const char* kGatherBags =
    "gather_bags(Tensor values, Tensor places, int[] counts, int[] dims, Tensor(a!) vectors,"
    " int stream=0) -> ()";

constexpr const char* kCopyRows =
    "copy_rows(Tensor slots, int[] firsts, int[] counts, int[] arenas, int[] row_bytes,"
    " Tensor(a!) out, int[] places, Tensor(b!)? targets=None, int[] called=[], int stream=0)"
    " -> ()";

constexpr const char* kRedirect =
    "redirect(Tensor(a!) addresses, Tensor positions, Tensor run_start, Tensor targets,"
    " int stream=0) -> ()";

constexpr const char* kWeightGradients =
    "weight_gradients(Tensor grad, Tensor addresses, Tensor? offsets, Tensor weights,"
    " Tensor features, Tensor bases, int rank, int stream=0, Tensor? report=None) -> Tensor";

constexpr const char* kCheckBags =
    "check_bags(Tensor offsets, int values, Tensor(a!) report, int stream) -> ()";

constexpr const char* kPostReport =
    "post_report(Tensor report, Tensor(a!) slots, Tensor(b!) posted, int stream) -> ()";

constexpr const char* kSumGradients =
    "sum_gradients(Tensor grad, Tensor positions, Tensor run_start, Tensor groups, int bucket,"
    " int first_group, int last_group, Tensor? offsets, Tensor? weights, Tensor features,"
    " Tensor segment_offset, int dim, float scale, Tensor(a!) values, bool by_bag=False,"
    " int stream=0, bool means=True, Tensor? client_grad=None, int own_features=0) -> ()";

constexpr const char* kUpdateRuns =
    "update_runs(Tensor grad, Tensor positions, Tensor run_start, Tensor run_slot, Tensor before,"
    " int group, Tensor? offsets, Tensor? weights, Tensor features, Tensor segment_offset,"
    " float scale, bool by_bag, Tensor(a!) rows, Tensor(b!) state, int dim, int dtype,"
    " str optimizer, float[] settings, Tensor(c!) updated, int stream=0, bool means=True,"
    " Tensor(d!)? marks=None, Tensor? packed=None) -> ()";

constexpr const char* kLayOutGradients =
    "lay_out_gradients(Tensor before, int[] dims, int stream=0) -> Tensor groups";

constexpr const char* kMergeGradients =
    "merge_gradients(Tensor[] slots, Tensor[] values, Tensor[] groups, int[] dims, int stream=0)"
    " -> (Tensor slots, Tensor groups, Tensor values)";

constexpr const char* kUpdateRows =
    "update_rows(Tensor[] slots, Tensor[] values, Tensor[] groups, int[] group, Tensor(a!) rows,"
    " Tensor(b!) state, int dim, int dtype, str optimizer, float[] settings, Tensor(c!) updated,"
    " int stream=0, Tensor(d!)? marks=None, Tensor? packed=None) -> ()";

constexpr const char* kMarkReplicas =
    "mark_replicas(Tensor slots, Tensor before, int[] group, Tensor[] replicas, int[] counts,"
    " Tensor(a!) bitmap, int stream=0) -> ()";

constexpr const char* kUniteReplicas =
    "unite_replicas(Tensor[] bitmaps, Tensor[] replicas, int[] counts, int[] dims, int most_rows,"
    " int stream=0) -> (Tensor slots, Tensor groups)";

constexpr const char* kAggregateRows =
    "aggregate_rows(Tensor slots, Tensor groups, Tensor values, int[] group, int[] counts,"
    " Tensor united, Tensor united_groups, int[] dims, Tensor(a!) out, int stream=0) -> ()";

constexpr const char* kSumSlice =
    "sum_slice(Tensor[] parts, Tensor groups, Tensor dims, int rank, Tensor(a!) out,"
    " Tensor(b!) read, int stream=0) -> ()";

constexpr const char* kMarkTouched =
    "mark_touched(Tensor values, Tensor groups, int[] counts, int[] dims, Tensor(a!) bitmap,"
    " int stream=0) -> ()";

constexpr const char* kWriteMessage =
    "write_message(Tensor slots, Tensor groups, Tensor values, Tensor group_there, int[] group,"
    " Tensor[] replicas, int[] counts, Tensor dims_there, int[] dims, Tensor(a!) header,"
    " Tensor(b!) message, int stream=0) -> ()";

constexpr const char* kTakeNumbers =
    "take_numbers(Tensor[] segments, int message_word, Tensor holders, Tensor held_as, int own,"
    " Tensor first_words, int most_rows, Tensor(a!) bitmap, Tensor(b!) read, int stream=0)"
    " -> (Tensor headers, Tensor begins, Tensor numbers)";

constexpr const char* kAddMessages =
    "add_messages(Tensor[] segments, int message_word, Tensor holders, Tensor headers,"
    " Tensor begins, Tensor numbers, Tensor[] replicas, int[] counts, int[] dims, Tensor united,"
    " Tensor united_groups, Tensor(a!) out, int stream=0) -> ()";

constexpr const char* kSumBuffers =
    "sum_buffers(Tensor[] parts, Tensor(a!) out, int stream=0) -> ()";

constexpr const char* kGatherSlices =
    "gather_slices(Tensor[] parts, Tensor groups, Tensor(a!) out, int stream=0) -> ()";

}  // namespace oper::schemas
