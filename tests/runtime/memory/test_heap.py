"""Segments and heaps, alone and shared by ranks."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.base.free_memory import FreeMemory, free_memory
from oper.runtime.comm import shared_segment as segment_module
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment
from oper.runtime.memory.heap import Heap, check_memory
from tests.support.runtime import mortal_ranks


def test_a_segment_grows_in_place_also_where_it_was_attached() -> None:
    segment = Segment.create(100, 1 << 30, "test")
    peer = Segment.attach(os.dup(segment.descriptor), 1 << 30)
    assert (segment.bytes, peer.bytes) == (100, 100)
    view = segment.tensor(0, [25], torch.int32)
    assert not view.any()
    view.fill_(7)
    segment.grow(1 << 20)
    segment.grow(10)  # it is larger already
    assert (segment.bytes, peer.bytes) == (1 << 20, 1 << 20)
    behind = peer.tensor(100, [2, 3], torch.float32)
    behind.fill_(2.5)
    assert torch.equal(segment.tensor(100, [2, 3], torch.float32), behind)
    assert peer.tensor(0, [25], torch.int32).eq(7).all()
    assert view.data_ptr() == segment.pointer != peer.pointer


def test_a_segment_is_not_left_by_its_views_and_does_not_shrink() -> None:
    segment = Segment.create(100, 5000, "test")
    with pytest.raises(OperError, match=r"bytes 96 to 104 of a segment of 100"):
        segment.tensor(96, [1], torch.int64)
    with pytest.raises(OperError, match="bytes -8 to 0"):
        segment.tensor(-8, [1], torch.int64)
    with pytest.raises(OperError, match=r"grow to 10,000 bytes: 8,192 were reserved"):
        segment.grow(10_000)
    with pytest.raises(PermissionError):
        os.ftruncate(segment.descriptor, 10)


def test_a_segment_lives_as_long_as_its_views() -> None:
    before = os.listdir("/proc/self/fd")
    segment = Segment.create(4096, 4096, "short-lived")
    view = segment.tensor(0, [4096], torch.uint8)
    view.fill_(9)
    segment.close()
    del segment
    assert os.listdir("/proc/self/fd") == before
    assert view.eq(9).all()
    assert "oper-short-lived" in Path("/proc/self/maps").read_text()
    del view
    assert "oper-short-lived" not in Path("/proc/self/maps").read_text()


def test_a_segment_is_not_made_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [FreeMemory("the machine", "machine", 1 << 40), FreeMemory("the group", "1:2", 5000)]
    monkeypatch.setattr(segment_module, "free_memory", lambda: here)
    with pytest.raises(OperError, match=r"expected 6,000 free bytes .*, got 5,000 of the group"):
        Segment.create(6000, 6000, "test")
    segment = Segment.create(4000, 1 << 20, "test")
    with pytest.raises(OperError, match=r"expected 5,001 free bytes .*, got 5,000 of the group"):
        segment.grow(9001)
    assert segment.bytes == 4000


def test_more_addresses_than_there_are() -> None:
    with pytest.raises(OperError, match=r"cannot map .*ulimit -v"):
        Segment.create(100, 1 << 47, "test")


def test_huge_pages_keep_what_was_written() -> None:
    segment = Segment.create((8 << 20) + 100, 1 << 30, "test-huge")
    words = segment.tensor(0, [1 << 20], torch.int64)
    words.copy_(torch.arange(1 << 20))
    huge = segment.use_huge_pages(0, segment.bytes)
    assert torch.equal(words, torch.arange(1 << 20))
    if not huge:
        pytest.skip("this kernel gave no huge pages")
    (mapped,) = re.findall(
        r"oper-test-huge .*?ShmemPmdMapped: +(\d+) kB",
        Path("/proc/self/smaps").read_text(),
        flags=re.DOTALL,
    )
    assert int(mapped) == 8 << 10


def _grow_while_others_write(rank: int, group: Any) -> int:
    node = Node.join(group)
    segments = node.share(Segment.create(4096, 1 << 30, "test"))
    for step in range(300):
        if rank == 0:
            segments[0].grow(4096 * (step + 2))
        else:
            end = segments[0].bytes
            segments[0].tensor(end - 4096, [4096], torch.uint8)[1:].fill_(rank)
            segments[0].tensor(0, [1], torch.uint8).fill_(rank)
    node.gather(b"", "grow")
    segments[0].tensor(segments[0].bytes - 8, [8], torch.uint8).fill_(5)
    node.gather(b"", "write")
    return int(segments[0].tensor(0, [segments[0].bytes], torch.uint8)[-8:].sum())


def test_a_segment_grows_while_peers_use_it() -> None:
    assert mortal_ranks.run(2, _grow_while_others_write) == [40, 40]


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(1, 70), st.integers(0, 40)),
        min_size=1,
        max_size=4,
    )
)
def test_arenas_are_zero_and_apart(widths: list[tuple[int, int, int]]) -> None:
    slots, row_bytes, state_bytes = zip(*widths, strict=True)
    heap = Heap(Node.join(None), np.array(slots)[:, None], row_bytes, state_bytes)
    arenas = [heap.rows(w) for w in range(len(widths))]
    arenas += [heap.state(w) for w in range(len(widths))]
    for n, (arena, row) in enumerate(zip(arenas, row_bytes + state_bytes, strict=True)):
        assert arena.shape == (slots[n % len(slots)], row)
        assert not arena.any()
        assert arena.data_ptr() % 64 == 0
        arena.fill_(n + 1)
    for n, arena in enumerate(arenas):
        assert arena.eq(n + 1).all()
    assert heap.bases.shape == (len(widths), 2)
    for w in range(len(widths)):
        assert heap.bases[w, 1] == 0
        if len(heap.rows(w)):
            assert heap.bases[w, 0] == heap.rows(w).data_ptr()
    assert sum(a.numel() for a in arenas) <= heap.bytes


SLOTS = np.array([[10, 20, 0], [5, 0, 6]])


def _write_into_heaps(rank: int, group: Any, nodes: list[int]) -> list[list[int]]:
    node = Node.join(group, nodes=nodes)
    heap = Heap(node, SLOTS, [64, 24], [4, 8])
    for w in range(2):
        heap.rows(w).fill_(10 * rank + w)
        heap.state(w).fill_(100 + 10 * rank + w)
    node.agree(b"", "having written")
    for w in range(2):
        for peer in range(3):
            assert (heap.bases[w, peer] != 0) == (nodes[peer] == nodes[rank])
            if peer in node.peers:
                rows, state = heap.rows(w, peer), heap.state(w, peer)
                assert heap.bases[w, peer] == rows.data_ptr() or len(rows) == 0
                assert rows.shape == (SLOTS[w, peer], [64, 24][w])
                assert state.shape == (SLOTS[w, peer], [4, 8][w])
                assert rows.eq(10 * peer + w).all()
                assert state.eq(100 + 10 * peer + w).all()
    node.agree(b"", "having read")
    return heap.bases.ne(0).int().tolist()


def test_ranks_read_the_heaps_of_their_node() -> None:
    assert mortal_ranks.run(3, _write_into_heaps, [0, 0, 0]) == [[[1, 1, 1, 0]] * 2] * 3
    alone, others = [[0, 1, 0, 0]] * 2, [[1, 0, 1, 0]] * 2
    assert mortal_ranks.run(3, _write_into_heaps, [0, 1, 0]) == [others, alone, others]


def _differ_in_size(rank: int, group: Any) -> None:
    Heap(Node.join(group), SLOTS[:, :2] + (rank == 1), [64, 24], [4, 8])


def test_heaps_of_other_sizes_are_refused() -> None:
    for outcome in mortal_ranks.run(2, _differ_in_size):
        assert isinstance(outcome, OperError)
        assert "the sizes of the heap and the kind of its device: expected the same" in str(outcome)


def _check(rank: int, group: Any, places: list[list[FreeMemory]]) -> None:
    check_memory(Node.join(group), 1000 * (rank + 1), "the heap", places[rank])


@pytest.mark.parametrize(
    ("places", "error"),
    [
        pytest.param([("machine", 3000)] * 2, None, id="enough"),
        pytest.param(
            [("machine", 2999)] * 2, "the heap takes 3,000 bytes.* has 2,999 free", id="together"
        ),
        pytest.param([("a", 1000), ("b", 2000)], None, id="groups apart"),
        pytest.param(
            [("a", 9000), ("b", 1999)], "takes 2,000 bytes.*place b has 1,999", id="one of them"
        ),
        pytest.param(
            [("a", 9000), ("a", 2000)], "takes 3,000 bytes.*place a has 2,000", id="later look"
        ),
    ],
)
def test_memory_is_checked_for_all_ranks_together(
    places: list[tuple[str, int]], error: str | None
) -> None:
    given_places = [[FreeMemory(f"place {p}", p, free)] for p, free in places]
    for outcome in mortal_ranks.run(2, _check, given_places):
        if error is None:
            assert outcome is None
        else:
            assert re.search(error, str(outcome))


MIB = 1 << 20


def _write(folder: Path, **files: str | int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def _v2(root: Path) -> str:
    _write(root / "cg/pod", memory__max=300 * MIB, memory__current=200 * MIB)
    statistics = f"anon 5\ninactive_file {30 * MIB}\nactive_file {20 * MIB}\nfile 9"
    _write(root / "cg/pod", memory__stat=statistics)
    _write(root / "cg/pod/box", memory__max="max", memory__current=5, memory__stat="anon 5")
    return f"25 1 0:23 / {root}/cg rw - cgroup2 cgroup rw,nsdelegate"


def _v1(root: Path) -> str:
    group = root / "memory/docker/abc"
    _write(group, memory__limit_in_bytes=100 * MIB, memory__usage_in_bytes=90 * MIB)
    _write(group, memory__stat=f"total_inactive_file {7 * MIB}\ntotal_active_file 0")
    cpu = f"26 1 0:24 / {root}/cpu rw - cgroup cgroup rw,cpu"
    return cpu + f"\n27 1 0:25 / {root}/memory rw,x shared:9 - cgroup cgroup rw,memory"


def _v1_container(root: Path) -> str:
    """The group itself is what is mounted, at a path with a blank."""
    group = root / "my memory"
    _write(group, memory__limit_in_bytes=50 * MIB, memory__usage_in_bytes=60 * MIB)
    _write(group, memory__stat="total_inactive_file 0")
    mounted = str(group).replace(" ", "\\040")
    return f"27 1 0:25 /docker/abc {mounted} rw - cgroup cgroup rw,memory"


@pytest.mark.parametrize(
    ("groups", "mounts", "expected"),
    [
        pytest.param("0::/pod/box", _v2, {"cg/pod": 150 * MIB}, id="v2, limit of the parent"),
        pytest.param(
            "5:cpu:/\n4:hugetlb,memory:/docker/abc\n0::/",
            _v1,
            {"memory/docker/abc": 17 * MIB},
            id="v1",
        ),
        pytest.param(
            "4:memory:/docker/abc", _v1_container, {"my memory": 0}, id="v1, inside of it"
        ),
        pytest.param("4:memory:/../x", _v1_container, {"my memory": 0}, id="v1, path outside"),
    ],
)
def test_control_groups_limit_the_memory(
    tmp_path: Path,
    groups: str,
    mounts: Callable[[Path], str],
    expected: dict[str, int],
) -> None:
    proc = tmp_path / "proc"
    _write(proc, meminfo=f"MemTotal: 9 kB\nMemAvailable: {1 << 10} kB")
    _write(proc / "self", cgroup=groups, mountinfo=mounts(tmp_path))
    machine, *limits = free_memory(proc)
    assert (machine.limited_by, machine.free_bytes) == ("the machine", 1 << 20)
    assert {left.limited_by: left.free_bytes for left in limits} == {
        f"the control group {tmp_path / group}": free for group, free in expected.items()
    }


def test_memory_of_this_machine() -> None:
    for left in free_memory():
        assert left.free_bytes > 0
