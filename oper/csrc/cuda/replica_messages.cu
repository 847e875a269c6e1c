// oper_cuda_write_header, oper_cuda_write_message, oper_cuda_take_numbers and
// oper_cuda_add_messages: the steps of the AllGather of replicas' gradients.

#include "oper/cuda/replica_messages.cuh"

extern "C" int oper_cuda_write_header(const oper::HeaderArguments* a, void* stream) {
  using namespace oper;
  return launch({dim3(1), kWarpThreads, static_cast<cudaStream_t>(stream)}, write_header, *a);
}

extern "C" int oper_cuda_write_message(const oper::MessageArguments* a, int64_t most_rows,
                                       void* stream) {
  using namespace oper;
  return launch_rows(write_message, *a, most_rows, stream);
}

extern "C" int oper_cuda_take_numbers(const oper::NumberArguments* a, int64_t most_rows,
                                      void* stream) {
  using namespace oper;
  const Launch one{dim3(1), 256, static_cast<cudaStream_t>(stream)};
  if (const cudaError_t error = launch(one, read_headers, *a)) return error;
  const int64_t of_rank = (most_rows + a->ranks - 1) / a->ranks;
  return launch_threads(take_numbers, *a, of_rank, a->ranks, stream);
}

extern "C" int oper_cuda_add_messages(const oper::AddMessagesArguments* a, int64_t most_rows,
                                      void* stream) {
  using namespace oper;
  return launch_rows(add_messages, *a, most_rows, stream);
}
