// NVSHMEM for the emulator, as far as the kernels' library calls it: PEs are processes, a heap is a
// memfd that all of them map. A PE of another "node" has no pointer here and is reached by gets
// alone.
//
// A get that was not waited for has not happened: it is kept with the thread that asked, what it
// will write is poisoned (NaN), and the bytes come at the quiet of that thread, or of one that has
// met it since, those of several gets in an order drawn from a seed. What came may not be read as
// if it had not changed. A destination outside of symmetric and registered memory, a source outside
// of what was allocated, a PE that is not there, lanes of a collective get with unlike arguments,
// allocations of unlike sizes, gets that were never waited for and quiets that wait for nothing end
// the process. A quiet after a get from a PE that died, and a collective call without it, wait for
// ever, as NVSHMEM's do.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "emulator.h"

struct nvshmemx_uniqueid_t {
  int version;
  int process, board;
  char padding[116];
};
struct nvshmemx_init_attr_t {
  int pe, pes;
  const nvshmemx_uniqueid_t* id;
};
#define NVSHMEMX_UNIQUEID_INITIALIZER \
  {                                   \
  }
#define NVSHMEMX_INIT_ATTR_INITIALIZER \
  {                                    \
  }
constexpr unsigned NVSHMEMX_INIT_WITH_UNIQUEID = 8;
constexpr int NVSHMEM_VENDOR_MAJOR_VERSION = 3;
constexpr int NVSHMEM_VENDOR_MINOR_VERSION = 4;
constexpr int NVSHMEM_VENDOR_PATCH_VERSION = 5;

namespace fake_nvshmem {

constexpr int kMostPes = 64;
constexpr size_t kMostCalls = 4096;
constexpr size_t kHeapBytes = size_t{1} << 30;  // of addresses: what is not touched is not there

// What PEs tell each other, in memory of the first one.
struct Board {
  struct Pe {
    std::atomic<int> process, heap, node;  // `heap` is 1 more than the descriptor
    std::atomic<uint64_t> calls;
    uint64_t bytes[kMostCalls];
  } pe[kMostPes];
};

struct Get {
  uint8_t* to;
  const uint8_t* from;
  size_t bytes;
  int pe;
  uint32_t met = 0;  // lanes of the warp that have met the asking thread since
};

struct State {
  int pe = -1, pes = 0, node = 0, version = 30405;
  Board* board = nullptr;
  int files[kMostPes];
  uint8_t* heap[kMostPes];  // all are mapped here; `nvshmem_ptr` shows those of the node
  size_t used = 0;
  std::vector<std::pair<uint8_t*, size_t>> allocated, registered;
  std::map<const emulator::Thread*, std::vector<Get>> waiting;  // by thread
  uint64_t launch = 0;                                          // that they are of
  uint64_t gets = 0, got_bytes = 0, quiets = 0, random = 88172645463325252u;
};
inline State state;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "fake NVSHMEM: %s, on PE %d\n", what, state.pe);
  std::fflush(stderr);
  std::abort();
}

inline bool in_any(const std::vector<std::pair<uint8_t*, size_t>>& ranges, const void* place,
                   size_t bytes) {
  const auto* const p = static_cast<const uint8_t*>(place);
  for (const auto& [begin, size] : ranges)
    if (p >= begin && p + bytes <= begin + size) return true;
  return false;
}

// Whether a PE's process has ended: its heap's lock is gone then.
inline bool ended(int pe) {
  struct flock question{};
  question.l_type = F_WRLCK;
  return fcntl(state.files[pe], F_OFD_GETLK, &question) == 0 && question.l_type == F_UNLCK;
}

inline void forget_other_launches() {
  if (state.launch == emulator::launches) return;
  for (const auto& [thread, gets] : state.waiting)
    if (!gets.empty()) fail("gets that were never waited for");
  state.waiting.clear();
  state.launch = emulator::launches;
}

// Lanes of a warp have met.
inline void note_meeting(unsigned warp, uint32_t mask) {
  for (auto& [asked, gets] : state.waiting) {
    const auto& thread = *asked;
    if (thread.warp != warp || !(mask >> thread.lane & 1)) continue;
    for (Get& get : gets) get.met |= mask;
  }
}

inline void ask(void* to, const void* from, size_t bytes, int pe) {
  forget_other_launches();
  if (pe < 0 || pe >= state.pes) fail("a get from a PE that is not there");
  if (!in_any(state.allocated, from, bytes)) fail("a get from outside of symmetric memory");
  if (!in_any(state.allocated, to, bytes) && !in_any(state.registered, to, bytes))
    fail("a get to memory that is neither symmetric nor registered");
  const size_t offset = static_cast<const uint8_t*>(from) - state.heap[state.pe];
  std::memset(to, 0xFF, bytes);
  emulator::change(to, bytes);
  state.waiting[emulator::block->now].push_back(
      {static_cast<uint8_t*>(to), state.heap[pe] + offset, bytes, pe});
  emulator::when_met = note_meeting;
  ++state.gets;
  state.got_bytes += bytes;
}

// A call of all PEs, each with its `bytes`.
inline void call_together(size_t bytes) {
  Board::Pe& mine = state.board->pe[state.pe];
  const uint64_t call = mine.calls;
  if (call == kMostCalls) fail("more allocations than it keeps");
  mine.bytes[call] = bytes;
  ++mine.calls;
  for (int pe = 0; pe < state.pes; ++pe) {
    while (state.board->pe[pe].calls <= call) usleep(1000);
    if (state.board->pe[pe].bytes[call] != bytes) fail("allocations of unlike sizes");
  }
}

inline int opened(int process, int descriptor) {
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

inline void* mapped(int file, size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file < 0 || at == MAP_FAILED) fail("memory that cannot be mapped");
  return at;
}

inline int made(size_t bytes) {
  const int file = memfd_create("fake-nvshmem", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) fail("no memory");
  return file;
}

}  // namespace fake_nvshmem

inline int nvshmemx_get_uniqueid(nvshmemx_uniqueid_t* id) {
  id->process = getpid();
  id->board = fake_nvshmem::made(sizeof(fake_nvshmem::Board));
  return 0;
}

inline int nvshmemx_set_attr_uniqueid_args(int pe, int pes, const nvshmemx_uniqueid_t* id,
                                           nvshmemx_init_attr_t* attributes) {
  *attributes = {pe, pes, id};
  return pe < 0 || pe >= pes || pes > fake_nvshmem::kMostPes;
}

inline int nvshmemx_init_attr(unsigned, const nvshmemx_init_attr_t* attributes) {
  auto& s = fake_nvshmem::state;
  if (s.pes) fake_nvshmem::fail("started twice");
  s.pe = attributes->pe, s.pes = attributes->pes;
  const int file = fake_nvshmem::opened(attributes->id->process, attributes->id->board);
  s.board =
      static_cast<fake_nvshmem::Board*>(fake_nvshmem::mapped(file, sizeof(fake_nvshmem::Board)));
  const int heap = fake_nvshmem::made(fake_nvshmem::kHeapBytes);
  struct flock lock{};
  lock.l_type = F_WRLCK;
  if (fcntl(heap, F_OFD_SETLK, &lock)) fake_nvshmem::fail("no lock");
  auto& mine = s.board->pe[s.pe];
  mine.process = getpid(), mine.node = s.node, mine.heap = heap + 1;
  for (int pe = 0; pe < s.pes; ++pe) {
    auto& other = s.board->pe[pe];
    while (!other.heap) usleep(1000);
    s.files[pe] = fake_nvshmem::opened(other.process, other.heap - 1);
    s.heap[pe] = static_cast<uint8_t*>(fake_nvshmem::mapped(s.files[pe], fake_nvshmem::kHeapBytes));
  }
  return 0;
}

inline int nvshmem_my_pe() { return fake_nvshmem::state.pe; }
inline int nvshmem_n_pes() { return fake_nvshmem::state.pes; }

// What was there before is not zero.
inline void* nvshmem_malloc(size_t bytes) {
  auto& s = fake_nvshmem::state;
  fake_nvshmem::call_together(bytes);
  const size_t at = (s.used + 511) / 512 * 512;
  if (at + bytes > fake_nvshmem::kHeapBytes) return nullptr;
  s.used = at + bytes;
  uint8_t* const place = s.heap[s.pe] + at;
  std::memset(place, 0xFF, bytes);
  s.allocated.emplace_back(place, bytes);
  return place;
}

inline void nvshmem_free(void* place) {
  auto& s = fake_nvshmem::state;
  fake_nvshmem::call_together(static_cast<uint8_t*>(place) - s.heap[s.pe]);
  for (auto& range : s.allocated)
    if (range.first == place) {
      range = s.allocated.back();
      s.allocated.pop_back();
      if (s.allocated.empty()) s.used = 0;
      return;
    }
  fake_nvshmem::fail("memory is freed that was not allocated");
}

inline void* nvshmem_ptr(const void* place, int pe) {
  const auto& s = fake_nvshmem::state;
  if (pe < 0 || pe >= s.pes || !fake_nvshmem::in_any(s.allocated, place, 1) ||
      s.board->pe[pe].node != s.board->pe[s.pe].node)
    return nullptr;
  return s.heap[pe] + (static_cast<const uint8_t*>(place) - s.heap[s.pe]);
}

inline int nvshmemx_buffer_register(void* place, size_t bytes) {
  fake_nvshmem::state.registered.emplace_back(static_cast<uint8_t*>(place), bytes);
  return 0;
}

inline int nvshmemx_buffer_unregister(void* place) {
  auto& ranges = fake_nvshmem::state.registered;
  for (auto& range : ranges)
    if (range.first == place) {
      range = ranges.back();
      ranges.pop_back();
      return 0;
    }
  return 1;
}

inline void nvshmem_getmem_nbi(void* to, const void* from, size_t bytes, int pe) {
  fake_nvshmem::ask(to, from, bytes, pe);
}

// Collective: lane 0 asks for all, after all have come with the same arguments.
#define nvshmemx_getmem_nbi_warp(to, from, bytes, pe) \
  (::fake_get_warp(to, from, bytes, pe, __LINE__))
inline void fake_get_warp(void* to, const void* from, size_t bytes, int pe, int line) {
  const uint64_t given[] = {reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes,
                            static_cast<uint64_t>(pe)};
  for (const uint64_t value : given) {
    const uint64_t* const brought = emulator::meet(~0u, value, "nvshmemx_getmem_nbi_warp", line);
    for (unsigned lane = 0; lane < emulator::kWarp; ++lane)
      if (brought[lane] != value) fake_nvshmem::fail("lanes of a get with unlike arguments");
  }
  if (emulator::lane() == 0) fake_nvshmem::ask(to, from, bytes, pe);
}

inline void nvshmem_quiet() {
  fake_nvshmem::forget_other_launches();
  auto& s = fake_nvshmem::state;
  ++s.quiets;
  const emulator::Thread& me = *emulator::block->now;
  std::vector<fake_nvshmem::Get> mine;
  for (auto& [asked, gets] : s.waiting) {
    const auto& thread = *asked;
    const auto later = [&](const fake_nvshmem::Get& get) {
      return &thread != &me && (thread.warp != me.warp || !(get.met >> me.lane & 1));
    };
    const auto first = std::stable_partition(gets.begin(), gets.end(), later);
    mine.insert(mine.end(), first, gets.end());
    gets.erase(first, gets.end());
  }
  if (mine.empty()) fake_nvshmem::fail("a quiet that waits for nothing");
  while (!mine.empty()) {
    s.random ^= s.random << 13, s.random ^= s.random >> 7, s.random ^= s.random << 17;
    std::swap(mine[s.random % mine.size()], mine.back());
    while (fake_nvshmem::ended(mine.back().pe)) usleep(10000);
    std::memcpy(mine.back().to, mine.back().from, mine.back().bytes);
    mine.pop_back();
  }
}

inline void nvshmemx_vendor_get_version_info(int* major, int* minor, int* patch) {
  const int version = fake_nvshmem::state.version;
  *major = version / 10000, *minor = version / 100 % 100, *patch = version % 100;
}

// For tests: the node that this process says it is on, before it starts; its version; and how many
// gets there were, their bytes, quiets, and gets that nobody waited for.
extern "C" [[gnu::weak]] void fake_nvshmem_node(int node) { fake_nvshmem::state.node = node; }
extern "C" [[gnu::weak]] void fake_nvshmem_version(int version) {
  fake_nvshmem::state.version = version;
}
extern "C" [[gnu::weak]] void fake_nvshmem_counts(uint64_t* out) {
  const auto& s = fake_nvshmem::state;
  uint64_t left = 0;
  for (const auto& [thread, gets] : s.waiting) left += gets.size();
  out[0] = s.gets, out[1] = s.got_bytes, out[2] = s.quiets, out[3] = left;
}
