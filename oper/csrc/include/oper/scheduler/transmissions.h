// What an iteration moved between the caches and the tier: a counter for each worker; and in
// training the moves themselves, for the ranks that carry them out, in an order that all ranks
// have.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "oper/common/struct_fields.h"

namespace oper {

// A row counts once for each transmission of it, one way, of one worker.
struct Transmissions {
  int64_t miss_pull = 0;    // absent or outdated rows, from the tier
  int64_t update_push = 0;  // updates, to the tier
  int64_t evict_push = 0;   // updates of rows that leave the cache
  int64_t peer_push = 0;    // rows, straight to a worker that trains them
  int64_t pull_bytes = 0;
  int64_t push_bytes = 0;   // of all three kinds
  int64_t reads = 0;        // distinct rows trained
  int64_t hits = 0;         // of them, present and latest
  int64_t wrong_reads = 0;  // of them, without an update of an earlier iteration
  int64_t lag = 0;          // the most updates that one of them was without

  // Declared as TRANSMISSIONS in oper/scheduler/transmissions.py.
  static std::string fields() {
    return Fields<Transmissions>()
        .add("miss_pull", &Transmissions::miss_pull)
        .add("update_push", &Transmissions::update_push)
        .add("evict_push", &Transmissions::evict_push)
        .add("peer_push", &Transmissions::peer_push)
        .add("pull_bytes", &Transmissions::pull_bytes)
        .add("push_bytes", &Transmissions::push_bytes)
        .add("reads", &Transmissions::reads)
        .add("hits", &Transmissions::hits)
        .add("wrong_reads", &Transmissions::wrong_reads)
        .add("lag", &Transmissions::lag)
        .text();
  }
};
constexpr int kTransmissionFields = sizeof(Transmissions) / sizeof(int64_t);

// Bytes of a row of each width: with its optimizer state, and of its gradient.
struct RowBytes {
  int64_t row;
  int64_t gradient;
};

// What a transmission carries.
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
