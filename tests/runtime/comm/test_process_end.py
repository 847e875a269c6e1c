"""Processes end only once threads in native code are done: such a thread would come for Python's
lock as Python ends, and end the process by signal 6."""

import subprocess
import sys

import pytest

BEGIN = """
import _thread, builtins, time
from datetime import timedelta
import torch.distributed as dist
from oper.runtime.comm.failure_store import FailureStore
from oper.runtime.comm.group import Group

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

class Late:  # makes the end of Python take long enough for a thread to come back in it
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

builtins.late = Late()
"""
ASKS_THE_STORE = """
asked = FailureStore(dist.group.WORLD)
wait = lambda store: store.wait(["never"], timedelta(seconds=1))
assert asked._ask(wait, 0.1) is None
assert asked.lost
dist.destroy_process_group()
"""
# As gloo's threads do, which nothing here knows of.
IS_NEARLY_DONE = """
from oper.runtime.comm import process_end

process_end._GLOO_SECONDS = 3.0  # a hundred times what the thread needs
group = Group(dist.group.WORLD, 5.0)

def wait():
    try:
        store.clone().wait(["never"], timedelta(milliseconds=30))
    except RuntimeError:
        pass

_thread.start_new_thread(wait, ())
time.sleep(0.01)
"""


@pytest.mark.parametrize("thread", [ASKS_THE_STORE, IS_NEARLY_DONE])
def test_a_process_ends_after_threads_in_native_code(thread: str) -> None:
    script = [sys.executable, "-c", BEGIN + thread]
    ended = subprocess.run(script, capture_output=True, timeout=600)
    assert ended.returncode == 0, ended.stderr.decode()


# Two waits for what never comes. What was registered before is told last, how long the end took.
FOR_EVER = """
import atexit, threading, time

began = []
atexit.register(lambda: print(time.monotonic() - began[0]))
from oper.runtime.comm import process_end

events = [threading.Event() for _ in range(2)]
for event in events:
    process_end.wait_for(event, 3.0)
began.append(time.monotonic())
"""


def test_a_process_does_not_wait_for_ever_and_does_so_once() -> None:
    ended = subprocess.run([sys.executable, "-c", FOR_EVER], capture_output=True, timeout=600)
    assert ended.returncode == 0, ended.stderr.decode()
    assert 3 < float(ended.stdout) < 6  # less than two waits
