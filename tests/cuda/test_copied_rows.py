"""Rows that are copied to where others read them, and accesses that are led there: on a device, and
by the processor's operators, against NumPy."""

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from tests.support.cuda.devices import Device
from tests.support.examples import examples

numbers = st.integers(0, 10_000)


def started(place: Device | None, operator: str, order: int, *arguments: Any) -> None:
    """Call an operator on the device; None is the processor."""
    if place is None:
        getattr(native.ops(), operator)(*arguments)
    else:
        place.start(operator, *arguments, order=order, stream=place.stream)


def put(place: Device | None, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if place is None else place.put(tensor)


@examples(40)
@given(numbers, st.lists(st.sampled_from([1, 2, 6, 16, 20, 24, 48, 130]), max_size=7))
def test_rows_are_copied_piece_by_piece(device: Device, seed: int, sizes: list[int]) -> None:
    """Of rows of all sizes, some of them at odd places; targets of other rows stay."""
    rng = np.random.default_rng(seed)
    arenas = [rng.integers(0, 256, (9, size), dtype=np.uint8) for size in sizes]
    counts = rng.integers(0, 9, len(sizes))
    gaps, slots_between = rng.integers(0, 3, len(sizes)), rng.integers(0, 3, len(sizes))
    ends = (counts + slots_between).cumsum()
    firsts = ends - counts
    slots = rng.integers(0, 9, int(ends[-1]) + 2 if len(sizes) else 2)
    nbytes = counts * np.array(sizes, dtype=np.int64)
    places = (nbytes + gaps).cumsum() - nbytes
    expected = np.zeros(int((nbytes + gaps).sum()) + 3, dtype=np.uint8)
    called, targets = rng.integers(0, 1000, len(sizes)), np.full(len(slots), -1)
    for n, arena in enumerate(arenas):
        of = slice(firsts[n], firsts[n] + counts[n])
        expected[places[n] : places[n] + nbytes[n]] = arena[slots[of]].reshape(-1)
        targets[of] = called[n] + np.arange(counts[n])
    for place, order in [(None, 0), *((device, order) for order in device.orders)]:
        there = [put(place, torch.from_numpy(arena)) for arena in arenas]
        out = put(place, torch.zeros(len(expected), dtype=torch.uint8))
        found = put(place, torch.full((len(slots),), -1))
        given = (firsts, counts, [arena.data_ptr() for arena in there], sizes)
        pieces = ([*map(int, of)] for of in given)
        how = (out, places.tolist(), found, called.tolist())
        started(place, "copy_rows", order, put(place, torch.from_numpy(slots)), *pieces, *how)
        assert out.cpu().numpy().tobytes() == expected.tobytes()
        assert found.tolist() == targets.tolist()


@examples(40)
@given(numbers, st.integers(0, 40))
def test_accesses_read_their_rows_where_these_are(device: Device, seed: int, runs: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 6, runs)
    starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
    unsorted = int(rng.integers(0, 4))  # accesses of no run
    accesses = int(starts[-1]) + unsorted
    positions = rng.permutation(accesses).astype(np.int32)
    targets = rng.integers(0, 1000, runs) * rng.choice([1, -1], runs) - 1
    targets[: runs % 2] = 0  # which is a row of rank 0's
    addresses = rng.integers(0, 1000, accesses)
    expected = addresses.copy()
    for run, target in enumerate(targets):
        if target >= 0:
            expected[positions[starts[run] : starts[run + 1]]] = target
    for place, order in [(None, 0), *((device, order) for order in device.orders)]:
        found = put(place, torch.from_numpy(addresses))
        given = [put(place, torch.from_numpy(of)) for of in (positions, starts, targets)]
        started(place, "redirect", order, found, *given)
        assert found.tolist() == expected.tolist()
