// Moves: what each of the transmissions of an iteration carries, for those who carry it out.
//
// The caches' states say which rows move; in training the moves are written down here, in an order
// that all ranks have, and carried out by the ranks that they concern.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oper/common/struct_fields.h"

namespace oper {

enum class MoveKind : int64_t {
  kPushRow,       // the worker's copy, with the optimizer's state, to the tier
  kPushGradient,  // the gradient that waits in the worker's cache, to the tier
  kPull,          // the tier's row into the worker's cache, which has a place for it
  kPeer,          // the copy of worker `other` into the worker's cache
  kInsert,        // the row gets a place in the worker's cache: that of row `other`, or a free one
  kJoint,         // the row was trained by `other` workers at once, whose gradients belong together
};

struct Move {
  int64_t kind = 0;
  int64_t worker = 0;
  int64_t row = 0;
  int64_t address = 0;
  int64_t other = -1;

  // Declared as MOVES in oper/scheduler/moves.py.
  static std::string fields() {
    return Fields<Move>()
        .add("kind", &Move::kind)
        .add("worker", &Move::worker)
        .add("row", &Move::row)
        .add("address", &Move::address)
        .add("other", &Move::other)
        .text();
  }
};
constexpr int kMoveFields = sizeof(Move) / sizeof(int64_t);

// The moves since they were last taken; none in a simulation, which only counts them.
class Moves {
 public:
  void record() { recording_ = true; }
  void add(MoveKind kind, int worker, uint32_t row, uint64_t address, int64_t other = -1) {
    if (recording_)
      moves_.push_back(
          {static_cast<int64_t>(kind), worker, row, static_cast<int64_t>(address), other});
  }
  std::vector<Move> take() {
    std::vector<Move> taken;
    taken.swap(moves_);
    return taken;
  }

 private:
  bool recording_ = false;
  std::vector<Move> moves_;
};

}  // namespace oper
