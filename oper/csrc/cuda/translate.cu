// oper_cuda_translate: starts the translation of ids.

#include "oper/cuda/translate.cuh"

namespace oper {
namespace {

constexpr unsigned kThreads = 256;

template <typename Id, typename Code>
cudaError_t translate(const TranslateArguments<Id, Code>& a, cudaStream_t stream) {
  const int64_t blocks = (a.count + kThreads - 1) / kThreads;
  if (blocks == 0) return cudaSuccess;
  return launch(Launch{dim3(static_cast<unsigned>(blocks)), kThreads, stream},
                translate_ids<Id, Code>, a);
}

}  // namespace
}  // namespace oper

extern "C" int oper_cuda_translate(const void* arguments, int64_t id_bytes, int64_t code_bytes,
                                   void* stream) {
  using namespace oper;
  const auto on = static_cast<cudaStream_t>(stream);
  const auto with = [&](auto id, auto code) {
    using Arguments = TranslateArguments<decltype(id), decltype(code)>;
    return translate(*static_cast<const Arguments*>(arguments), on);
  };
  if (code_bytes == 4)
    return id_bytes == 4 ? with(int32_t{}, uint32_t{}) : with(int64_t{}, uint32_t{});
  return id_bytes == 4 ? with(int32_t{}, uint64_t{}) : with(int64_t{}, uint64_t{});
}
