// Row ids of many tables to addresses on a device: a thread an id (plan/translate.h has the
// arithmetic). The bitmap of a plan of Criteo's sizes is 5 MB and stays in the second cache.
#pragma once

#include "oper/cuda/device.h"
#include "oper/cuda/launchers.h"
#include "oper/cuda/search.cuh"

namespace oper {

template <typename Id, typename Code>
__global__ void __launch_bounds__(256)
    translate_ids(const __grid_constant__ TranslateArguments<Id, Code> a) {
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t n = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; n < a.count;
       n += threads) {
    const int64_t segment = last_at_most(a.segment_offset, 0, a.segments, n);
    const TableMap& table = a.map.tables[a.segment_table[segment]];
    int64_t id = static_cast<int64_t>(a.ids[n]);
    if (static_cast<uint64_t>(id) >= static_cast<uint64_t>(table.rows)) {
      atomicMin(&a.report->bad_id, static_cast<unsigned long long>(n));
      id = 0;
    }
    a.out[n] = translate_one(a.map, table, id);
  }
}

}  // namespace oper
