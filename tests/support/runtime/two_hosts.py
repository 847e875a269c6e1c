"""Two hosts on one machine: network namespaces joined by a cable (a veth pair), with ranks on both.

Run as a program in a network namespace of its own, it takes a pickled (ranks of each host,
function, arguments, bits a second) and gives the pickled results of function(rank, group,
*arguments). The cable may be limited to so many bits a second each way.
"""

import ctypes
import datetime
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_SECONDS = 300.0
# Alone in a namespace of users, one may make those of networks.
_ALONE = ["unshare", "--user", "--map-root-user", "--net"]
_CABLE = ["ip", "link", "add", "host0", "type", "veth", "peer", "name", "host1"]
_CLONE_NEWNET = 0x40000000
_PACKET_BYTES = 1 << 17
_TICKS_A_SECOND = 250
_PACKETS_A_SECOND = 1000
_context = multiprocessing.get_context("fork")


def missing() -> str:
    """Why this machine does not allow them; "" if it does."""
    try:
        probe = subprocess.run(
            [*_ALONE, *_CABLE], capture_output=True, text=True, timeout=DEADLINE_SECONDS
        )
    except FileNotFoundError as error:
        return f"no program {error.filename}"
    return probe.stderr.strip() if probe.returncode else ""


def run(
    hosts: tuple[int, int],
    function: Callable[..., Any],
    *arguments: Any,
    bits_a_second: int | None = None,
) -> list[Any]:
    """The results by rank, of so many ranks on each host; the cable is limited where
    `bits_a_second` are given."""
    program = subprocess.run(
        [*_ALONE, sys.executable, "-m", "tests.support.runtime.two_hosts"],
        input=pickle.dumps((hosts, function, arguments, bits_a_second)),
        stdout=subprocess.PIPE,
        timeout=2 * DEADLINE_SECONDS,
        check=True,
    )
    results = [pickle.loads(result) for result in pickle.loads(program.stdout)]
    for result in results:
        assert not isinstance(result, str), result
    return results


def limits(rank: int, group: Any) -> list[dict[str, Any]]:
    """What this host's end of the cable is limited to, as `tc` says it."""
    said = subprocess.run(["tc", "-j", "qdisc"], capture_output=True, text=True, check=True)
    return [queue for queue in json.loads(said.stdout) if queue["kind"] == "tbf"]


def _main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # where libraries print
    # The function's module is imported once, and not by every rank that is forked.
    hosts, function, arguments, bits_a_second = pickle.load(sys.stdin.buffer)
    pipes = [_context.Pipe() for _ in range(sum(hosts))]
    processes, events = [], []
    for host in range(2):
        ready, cabled = _context.Event(), _context.Event()
        first = sum(hosts[:host])
        ranks = {first + n: pipes[first + n][1] for n in range(hosts[host])}
        process = _context.Process(
            target=_host,
            args=(host, ranks, sum(hosts), ready, cabled, function, arguments, bits_a_second),
        )
        process.start()
        assert ready.wait(DEADLINE_SECONDS)
        processes.append(process)
        events.append(cabled)
    subprocess.run(_CABLE, check=True)
    subprocess.run(["ip", "link", "set", "host1", "netns", str(processes[1].pid)], check=True)
    for cabled in events:
        cabled.set()
    results = [
        here.recv_bytes()
        if here.poll(DEADLINE_SECONDS)
        else pickle.dumps(f"rank {rank} gave no result")
        for rank, (here, _) in enumerate(pipes)
    ]
    with os.fdopen(out, "wb") as file:
        pickle.dump(results, file)
    for process in processes:
        process.join(DEADLINE_SECONDS)


def _host(
    host: int,
    ranks: dict[int, Any],
    count: int,
    ready: Any,
    cabled: Any,
    function: Callable[..., Any],
    arguments: Any,
    bits_a_second: int | None,
) -> None:
    if host:  # the other stays in the program's
        assert not ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET)
    ready.set()
    assert cabled.wait(DEADLINE_SECONDS)
    for command in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"10.77.0.{1 + host}/24", "dev", f"host{host}"],
        ["link", "set", f"host{host}", "up"],
    ):
        subprocess.run(["ip", *command], check=True)
    if bits_a_second is not None:
        _limit(f"host{host}", bits_a_second)
    os.environ["GLOO_SOCKET_IFNAME"] = f"host{host}"
    processes = [
        _context.Process(target=_rank, args=(rank, count, pipe, function, arguments))
        for rank, pipe in ranks.items()
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_SECONDS)
        process.kill()


def _limit(device: str, bits_a_second: int) -> None:
    """Limit what a device sends. The bucket has room for a packet as TCP hands them over, and for
    what may be sent between two ticks of the kernel's clock; such packets are of 64 KB, of which
    one would keep a slow cable busy for milliseconds, and are made shorter."""
    burst = max(_PACKET_BYTES, bits_a_second // 8 // _TICKS_A_SECOND)
    limit = ["rate", f"{bits_a_second}bit", "burst", str(burst), "latency", "400ms"]
    subprocess.run(["tc", "qdisc", "add", "dev", device, "root", "tbf", *limit], check=True)
    size = min(max(bits_a_second // 8 // _PACKETS_A_SECOND, 8192), _PACKET_BYTES // 2)
    subprocess.run(["ip", "link", "set", device, "gso_max_size", str(size)], check=True)
    # Of what any user may choose the one that keeps a cable full: BBR, a default of some, sends
    # below the rate while it looks for it, and after pauses TCP begins slowly.
    for name, value in (("tcp_congestion_control", "reno"), ("tcp_slow_start_after_idle", "0")):
        Path("/proc/sys/net/ipv4", name).write_text(value, encoding="ascii")


def _rank(rank: int, count: int, pipe: Any, function: Callable[..., Any], arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    result: Any
    try:
        dist.init_process_group(
            "gloo",
            init_method="tcp://10.77.0.1:29500",
            rank=rank,
            world_size=count,
            timeout=datetime.timedelta(seconds=DEADLINE_SECONDS),
        )
        result = function(rank, dist.group.WORLD, *arguments)
    except BaseException:
        result = f"rank {rank}: {traceback.format_exc()}"
    pipe.send_bytes(pickle.dumps(result))  # by value: torch's own way is shared memory


if __name__ == "__main__":
    _main()
