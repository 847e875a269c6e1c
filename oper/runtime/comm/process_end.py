"""The end of this process, before which threads in native code must finish.

A thread that comes for Python's lock while Python ends is ended in the midst of C++, which ends the
process by signal 6, after all its work. There are two kinds of such threads: ours, which ask the
store of a process group (failure_store.py); and gloo's, which drop the tensors of a collective
after the rank that waited for it has gone on. torch joins gloo's threads only if nothing holds the
process group any more, and DistributedDataParallel, TorchRec and we hold it.
"""

import multiprocessing.util
import os
import threading
import time
import weakref

from oper.runtime.comm.deadline import Deadline

# A thread of gloo's that waits for Python's lock has it within microseconds; this is for one that
# waits for a core. Without it 19 of 100 runs of two ranks on busy cores ended by signal 6.
_GLOO_SECONDS = 0.1
_events: "weakref.WeakKeyDictionary[threading.Event, float]" = weakref.WeakKeyDictionary()
_ends_in: set[int] = set()  # this process; a forked child has none of its threads


def let_threads_finish() -> None:
    """Let gloo's threads, and those that `wait_for` knows of, finish before this process ends."""
    if os.getpid() not in _ends_in:
        _ends_in.add(os.getpid())
        _events.clear()
        # Processes of multiprocessing do this and skip atexit; others do it in atexit.
        multiprocessing.util.Finalize(None, _finish, exitpriority=0)


def wait_for(done: threading.Event, seconds: float) -> None:
    """Wait for `done` before this process ends, at most `seconds`; all such waits run at once."""
    let_threads_finish()
    _events[done] = seconds


def _finish() -> None:
    if os.getpid() not in _ends_in:
        return
    deadline = Deadline(max(_events.values(), default=0.0))
    for done in list(_events):
        done.wait(max(deadline.left(), 0))
    time.sleep(_GLOO_SECONDS)  # without Python's lock
