"""What becomes of a question to the store that is not answered in time."""

import subprocess
import sys

SCRIPT = """
import builtins, sys, time
from datetime import timedelta
import torch.distributed as dist
from oper.runtime.comm.failure_store import FailureStore

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

class Late:  # makes the end of Python take long enough for the thread to come back in it
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

builtins.late = Late()
asked = FailureStore(dist.group.WORLD)
wait = lambda store: store.wait(["never"], timedelta(seconds=1))
assert asked._ask(wait, 0.1) is None
assert asked.lost
dist.destroy_process_group()
"""


def test_a_process_does_not_end_while_a_thread_asks_the_store() -> None:
    """The thread would come back from native code as Python ends, and end the process by signal
    6."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr.decode()
