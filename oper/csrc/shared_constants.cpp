// torch.ops.oper.declarations: what Python and the kernels must agree about, each name with its
// value as text. oper/base/native.py compares it with what Python declares.

#include <torch/library.h>

#include <string>
#include <tuple>

#include "oper/comm/futex.h"
#include "oper/cuda/launchers.h"
#include "oper/plan/address.h"
#include "oper/plan/bitmap.h"
#include "oper/plan/translate.h"
#include "oper/scheduler/transmissions.h"
#include "oper/step/feature.h"
#include "oper/step/gradient_layout.h"
#include "oper/step/optimizers.h"
#include "oper/step/row_formats.h"
#include "oper/synth/id_bijection.h"

namespace oper {
namespace {

using Declarations = c10::Dict<std::string, std::string>;

// An optimizer's state as text, "momentum1[dim], exp_avg_sq[1]", as STATES of
// oper/runtime/tables/optimizers.py gives it.
template <typename Optimizer>
void add_optimizer(Declarations& declared) {
  std::string parts;
  for (const StatePart& part : Optimizer::kState)
    parts +=
        (parts.empty() ? "" : ", ") + std::string(part.name) + (part.rowwise ? "[1]" : "[dim]");
  declared.insert(std::string("optimizer ") + Optimizer::kName, parts);
}

template <typename... Each>
void add_optimizers(Declarations& declared, std::tuple<Each...>*) {
  (add_optimizer<Each>(declared), ...);
}

Declarations declarations() {
  Declarations declared;
  const std::pair<const char*, int64_t> constants[] = {
      {"slot bits", kSlotBits},
      {"field local", kLocal},
      {"field replica", kReplica},
      {"bitmap words of a line", kWordsPerLine},
      {"bitmap bits of rows before", Line::kBeforeBits},
      {"dtype fp32", kFloat32},
      {"dtype fp16", kFloat16},
      {"dtype bf16", kBFloat16},
      {"dtype int8", kInt8},
      {"int8 extra bytes", kInt8ExtraBytes},
      {"order scattered", static_cast<int64_t>(Order::kScattered)},
      {"order frequency", static_cast<int64_t>(Order::kFrequency)},
      {"order age", static_cast<int64_t>(Order::kAge)},
      {"signal bytes", sizeof(Signal)},
      {"values of a line", kLineValues},
      {"ranks of a device's step", kMostLists},
      {"buckets of a device's step", kMostBuckets},
  };
  for (const auto& [name, value] : constants) declared.insert(name, std::to_string(value));
  declared.insert("struct Feature", Feature::fields());
  declared.insert("struct TableMap", TableMap::fields());
  declared.insert("struct PatternStep", PatternStep::fields());
  declared.insert("struct StepSettings", StepSettings::fields());
  declared.insert("struct Move", Move::fields());
  declared.insert("struct Transmissions", Transmissions::fields());
  add_optimizers(declared, static_cast<Optimizers*>(nullptr));
  return declared;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) { m.def("declarations() -> Dict(str, str)"); }

// It takes no tensor from which a backend could be told.
TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) { m.impl("declarations", declarations); }

}  // namespace oper
