// torch.ops.oper.watch_lock, leave_lock and forget_lock: what a rank that SIGTERM ends says.
//
// torchrun ends all ranks of a host by SIGTERM within a tenth of a second after one has died.
// Python runs nothing then: so this handler writes which ranks have died, as their locks say
// (oper/runtime/comm/liveness.py), and leaves last words of its own. It allocates and locks
// nothing, and hands on to the default action, so that the exit status is what it was. A handler of
// the script's is left as it is: Python ends by itself then.

#include <fcntl.h>
#include <poll.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <string>

namespace oper {
namespace {

struct Lock {
  const int64_t descriptor;
  const bool own;
  const std::string text;          // last words of ours, or what is said of a rank that had none
  const pid_t process = getpid();  // in a forked child these locks are its parent's
  std::atomic<bool> watched{true};
  Lock* next = nullptr;
};

// Never freed, as the handler may be at any of them; they are as few as engines times ranks.
std::atomic<Lock*> locks{nullptr};
static_assert(std::atomic<Lock*>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

bool held(int descriptor) {
  struct flock question{};
  question.l_type = F_WRLCK;
  question.l_whence = SEEK_SET;
  return fcntl(descriptor, F_GETLK, &question) != 0 || question.l_type != F_UNLCK;
}

// Not where the reader of a full pipe has stopped: there it would wait, and the process not end.
bool say(const std::string& line) {
  pollfd error{STDERR_FILENO, POLLOUT, 0};
  return poll(&error, 1, 0) == 1 && write(STDERR_FILENO, line.data(), line.size()) >= 0;
}

void last_words(int signal) {
  const pid_t process = getpid();
  for (Lock* lock = locks; lock != nullptr; lock = lock->next) {
    if (!lock->watched || lock->process != process) continue;
    const auto descriptor = static_cast<int>(lock->descriptor);
    if (!lock->own && held(descriptor)) continue;
    char first;
    if (pread(descriptor, &first, 1, 0) != 0) continue;  // it said itself how it ends
    if (lock->own) {
      static_cast<void>(pwrite(descriptor, lock->text.data(), lock->text.size(), 0) < 0);
      continue;
    }
    if (!say(lock->text)) continue;
    // A rank that died is said once: it has a lock for each engine.
    for (Lock* same = lock; same != nullptr; same = same->next)
      if (same->text == lock->text) same->watched = false;
  }
  raise(signal);  // by now the default action, which follows when this returns
}

void add(int64_t descriptor, bool own, std::string text) {
  auto* const lock = new Lock{descriptor, own, std::move(text)};
  lock->next = locks;
  while (!locks.compare_exchange_weak(lock->next, lock)) {
  }
  if (getpid() == 1)
    return;  // whom the default action does not end, as a container's first process
  struct sigaction action{};
  if (sigaction(SIGTERM, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action = {};
  action.sa_handler = last_words;
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGTERM, &action, nullptr);
}

// At SIGTERM writes the words into our own lock's file, unless there are some.
void leave_lock(int64_t descriptor, std::string words) { add(descriptor, true, std::move(words)); }

// At SIGTERM writes the line to stderr, if the rank that held this lock has ended without a word.
void watch_lock(int64_t descriptor, std::string line) { add(descriptor, false, std::move(line)); }

void forget_lock(int64_t descriptor) {
  for (Lock* lock = locks; lock != nullptr; lock = lock->next)
    if (lock->descriptor == descriptor) lock->watched = false;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(oper, m) {
  m.def("leave_lock(int descriptor, str words) -> ()");
  m.def("watch_lock(int descriptor, str line) -> ()");
  m.def("forget_lock(int descriptor) -> ()");
}

// They take no tensor from which a backend could be told.
TORCH_LIBRARY_IMPL(oper, CompositeExplicitAutograd, m) {
  m.impl("leave_lock", leave_lock);
  m.impl("watch_lock", watch_lock);
  m.impl("forget_lock", forget_lock);
}

}  // namespace oper
