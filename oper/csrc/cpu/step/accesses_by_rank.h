// How many accesses read from each rank.
#pragma once

#include <cstdint>

namespace oper {

// Adds to counts [ranks + 1]: of replicas, and then of each rank. Returns how many it counted: not
// those whose field is none of these.
int64_t count_by_rank(const int64_t* addresses, int64_t size, int64_t rank, int64_t ranks,
                      int64_t* counts);

}  // namespace oper
