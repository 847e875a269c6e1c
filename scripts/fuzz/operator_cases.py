"""Valid arguments of every operator, and ways to damage them."""

import functools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import struct_words
from oper.plan.address_map import AddressMap
from oper.plan.layout import LOCAL, SLOT_BITS, rank_map
from oper.runtime.tables.kernel_structs import FEATURE
from tests.support.planner.layouts import random_layout, tables_of

_NUMBERS = (
    0, 1, -1, 2, 7, 63, 64, 65, -64, 1000, -1000, 2**31 - 1, 2**31, 2**32, 2**40, 2**48, 2**62,
    2**63 - 1, -(2**63), -(2**31),
)  # fmt: skip
_FLOATS = (0.0, -1.0, 0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan"))
_DTYPES = (
    torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.float16,
    torch.uint32, torch.uint64, torch.bool, torch.int8,
)  # fmt: skip


@dataclass
class Argument:
    """One argument; `vouched` ones keep their values, or those of some `columns`."""

    value: Any
    vouched: bool = False
    columns: tuple[int, ...] = ()
    numbers: tuple[int, ...] = _NUMBERS


def damaged(arguments: list[Argument], rng: random.Random) -> list[Argument]:
    """Return the arguments with one to three of them changed."""
    for argument in rng.sample(arguments, min(rng.randint(1, 3), len(arguments))):
        if isinstance(argument.value, list):
            argument.value = _damaged_list(argument.value, argument.vouched, rng)
        elif isinstance(argument.value, torch.Tensor):
            argument.value = _damaged_tensor(argument, rng)
        elif not argument.vouched:
            argument.value = _damaged_value(argument.value, rng, argument.numbers)
    return arguments


def _damaged_value(value: Any, rng: random.Random, numbers: tuple[int, ...] = _NUMBERS) -> Any:
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((*numbers, value + 1, value - 1))
        case float():
            return rng.choice(_FLOATS)
        case str():
            return rng.choice(("", "adam", "sgd", "x" * 1000))
        case torch.dtype():
            return rng.choice(_DTYPES)
    return value


def _damaged_list(values: list[Any], vouched: bool, rng: random.Random) -> list[Any]:
    values = list(values)
    # Vouched numbers stay, because operators do not check them; only their count may change.
    numbers = vouched and not any(isinstance(value, torch.Tensor) for value in values)
    kind = rng.randrange(2 if numbers else 4)
    if kind == 0 and values:
        del values[rng.randrange(len(values))]
    elif kind == 1 and values:
        values.append(values[0])
    elif values:
        at = rng.randrange(len(values))
        one = Argument(values[at], vouched)
        is_tensor = isinstance(values[at], torch.Tensor)
        values[at] = _damaged_tensor(one, rng) if is_tensor else _damaged_value(values[at], rng)
    return values


def _damaged_tensor(argument: Argument, rng: random.Random) -> torch.Tensor:
    tensor: torch.Tensor = argument.value
    if argument.vouched:
        return tensor.to(rng.choice([d for d in _DTYPES if d != tensor.dtype]))
    match rng.randrange(9):
        case 0:
            return tensor.to(rng.choice(_DTYPES))
        case 1:
            return tensor.flatten()[: rng.randint(0, tensor.numel())]
        case 2:
            return torch.empty(rng.choice(((0,), (0, 3), (3, 0), ())), dtype=tensor.dtype)
        case 3:
            return torch.cat([tensor.flatten()] * 2)[::2]
        case 4 if tensor.dim() and tensor.shape[0]:
            return tensor[:1].expand(tensor.shape)
        case 5:
            return tensor.unsqueeze(0)
        case 6 if tensor.dim() > 1:
            return tensor.transpose(0, 1)
        case _:
            return _wild_values(argument, rng)


def _wild_values(argument: Argument, rng: random.Random) -> torch.Tensor:
    tensor = argument.value.clone(memory_format=torch.contiguous_format)
    if not tensor.numel() or tensor.dtype in (torch.uint32, torch.uint64, torch.bool):
        return tensor
    flat = tensor.view(-1)
    width = tensor.shape[-1] if tensor.dim() else 1
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(flat.numel())
        if at % width in argument.columns:
            continue
        if tensor.is_floating_point():
            flat[at] = torch.tensor(rng.choice(_FLOATS), dtype=torch.float64).to(tensor.dtype)
        else:
            least, most = torch.iinfo(tensor.dtype).min, torch.iinfo(tensor.dtype).max
            number = rng.choice((*_NUMBERS, int(flat[at]) + rng.randint(-3, 3)))
            flat[at] = min(max(number, least), most)
    return tensor


def _i64(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _doubles(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64)


def _counters(size: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).integers(0, 9, size).astype(np.uint32))


def _list(*values: Any) -> list[Argument]:
    return [value if isinstance(value, Argument) else Argument(value) for value in values]


def _vouched(value: Any, *columns: int) -> Argument:
    return Argument(value, not columns, columns)


def _columns() -> list[Any]:
    ids = [torch.randint(0, 20, (20,)), torch.randint(0, 30, (10,))]
    return [ids, [torch.full((10,), 2, dtype=torch.int32), _i32()], _i64(0, 1)]


def _count() -> list[Argument]:
    offsets = _i64(0, 20, 50)
    return _list(_counters(50), _counters(20), offsets, _i64(0, -1), *_columns(), 10)


def _entries() -> list[Any]:
    return [_i64(0, 9, 18), torch.arange(9).repeat(2), torch.arange(9).repeat(2), _i64(*range(18))]


def _listed_and_striped() -> list[Argument]:
    accesses, offsets = _counters(1500), _i64(0, 600, 1500)
    bitmap = native.ops().list_hot_rows(accesses, offsets, _i64(5, 6), _i64(0, 0))[0]
    order = _i32(0, 1, 2, 2, 1)
    touched, weight = torch.rand(2, 18, dtype=torch.float64)
    return _list(
        accesses, _counters(0), offsets, _i64(-1, -1), bitmap, None, order, _i64(0, 3, 5),
        _i64(0, 1), _i64(2, 1), 3, _i64(0, 9, 18), torch.arange(9).repeat(2), touched, weight,
    )  # fmt: skip


def _translate() -> list[Argument]:
    layout = random_layout(np.random.default_rng(3), [1000, 300, 2000], 3, moved=True)
    made = AddressMap(tables_of(layout), layout, rank_map(layout, 1)).flattened(4000)
    bitmap, stripes, everywhere, codes, bits, groups, bases, steps = made._arguments
    ids = torch.cat([torch.randint(0, n, (40,)) for n in (1000, 300, 2000)])
    return _list(
        ids, _i64(0, 40, 80, 120), _i64(0, 1, 2), made._maps, _vouched(bitmap), _vouched(stripes),
        _vouched(everywhere), _vouched(codes), _vouched(bits), _vouched(groups), bases,
        _vouched(steps), made._flat, 0,
    )  # fmt: skip


_ARENA = torch.zeros(64 * 1024, dtype=torch.uint8)
_FIELDS = list(FEATURE.names or ())
_WIDTH, _ROW_BYTES = _FIELDS.index("width"), _FIELDS.index("row_bytes")


def _features(bucket: int = 0) -> torch.Tensor:
    features = np.zeros(2, dtype=FEATURE)
    features["bucket"], features["dim"], features["row_bytes"] = (0, bucket), 8, 32
    features["first_bag"], features["bags"] = (0, 10), 10
    features["out_base"], features["out_stride"], features["has_gradient"] = (0, 8), 16, 1
    return struct_words(features)


def _batch() -> list[Argument]:
    """Return addresses, offsets, weights, features, bases, rank: two features of ten bags of
    two."""
    addresses = torch.randint(0, 1000, (40,)) | LOCAL << SLOT_BITS
    bases = torch.tensor([[_ARENA.data_ptr(), _ARENA.data_ptr(), _ARENA.data_ptr()]])
    return _list(
        _vouched(addresses), torch.arange(0, 41, 2), torch.rand(40),
        _vouched(_features(), _WIDTH, _ROW_BYTES), _vouched(bases), 0,
    )  # fmt: skip


def _out_elements() -> Argument:
    # An output of gigabytes would be allocated if requested.
    return Argument(320, numbers=(0, 1, -1, 2**62, 2**63 - 1, -(2**63)))


def _sort() -> list[Argument]:
    addresses = torch.randint(0, 30, (40,)) | torch.randint(0, 2, (40,)) << SLOT_BITS
    addresses[::5] = LOCAL << SLOT_BITS | 3
    return _list(addresses, _i64(0, 20, 40), _features(1), 1, 2, [30, 30], torch.arange(0, 41, 2))


def _mark_rows() -> list[Argument]:
    """Return three listed rows in one line: two of group 0, one of group 1."""
    line = torch.tensor([[0, 7, 0, 0, 0, 0, 0, 0]])
    return _list(_i32(0, 2, 1), 2, line, _i64(0, 1), _i64(0))


def _sum_gradients() -> list[Argument]:
    features, segments = _features(), _i64(0, 20, 40)
    addresses = torch.randint(0, 30, (40,)) | LOCAL << SLOT_BITS
    sorted_ = native.ops().sort_accesses(addresses, segments, features, 0, 1, [30])
    positions, starts, _, before = sorted_
    groups = native.ops().lay_out_gradients(before, [8])
    keep = (_FIELDS.index("bucket"), _FIELDS.index("has_gradient"))
    return _list(
        torch.rand(160), _vouched(positions), _vouched(starts), _vouched(groups), _vouched(0), 0, 2,
        torch.arange(0, 41, 2), torch.rand(40), _vouched(features, *keep), _vouched(segments), 8,
        1.0, torch.empty(int(groups[1, -1])),
    )  # fmt: skip


def _number_rows() -> list[Argument]:
    return _sort()[:-1]


def _bags_of_nodes() -> list[Argument]:
    """Return addresses, offsets, weights and features: ten bags of two of each of two features."""
    fields = torch.tensor([0, 1, 2, LOCAL])[torch.randint(0, 4, (40,))]
    addresses = torch.randint(0, 30, (40,)) | fields << SLOT_BITS
    return _list(_vouched(addresses), torch.arange(0, 41, 2), torch.rand(40), _features())


_NODES: tuple[Any, ...] = ([2, 0, 1], 2)  # of three ranks, each a node of its own


def _forward_bags() -> list[Argument]:
    return [*_bags_of_nodes(), *_list(*_NODES, [0, 0, 0], 5, 1)]


def _join_bags() -> list[Argument]:
    batch = _bags_of_nodes()
    values = [argument.value for argument in batch]
    words, _, _, kept, _ = native.ops().forward_bags(*values, *_NODES, [0, 0, 0], 5, 1)
    forwards = [sum(int(part[2 + feature]) for part in words) for feature in range(2)]
    return [*batch, *_list(forwards, *_NODES, kept, words, 2, [LOCAL], 5, 1)]


def _add_gradients() -> list[Argument]:
    features, segments = _features(), _i64(0, 20, 40)
    addresses = torch.randint(0, 30, (40,)) | LOCAL << SLOT_BITS
    row_of, _, (before, _) = native.ops().number_rows(addresses, segments, features, 0, 1, [30])
    groups = native.ops().lay_out_gradients(before, [8])
    keep = (_FIELDS.index("bucket"), _FIELDS.index("has_gradient"))
    return _list(
        torch.rand(160), _vouched(row_of), _vouched(groups), 0, _vouched(0), _vouched(2),
        torch.arange(0, 41, 2), torch.rand(40), _vouched(features, *keep), _vouched(segments),
        _vouched(8), 1.0, torch.empty(int(groups[1, -1])),
    )  # fmt: skip


_GROUPS = [torch.tensor([[0, 1, 3], [0, 8, 24]]), torch.tensor([[0, 0, 2], [0, 0, 16]])]


def _update() -> list[Argument]:
    slots, values = [_i64(1, 5, 9), _i64(0, 5)], [torch.rand(24), torch.rand(16)]
    rows, state = (torch.zeros((20, n), dtype=torch.uint8) for n in (32, 64))
    settings = [0.1] * _settings()
    marks = torch.zeros(20, dtype=torch.bool)
    arguments = _list(slots, values, _GROUPS, [1, 1], rows, state, 8, 0, "adam", settings, _i64(0))
    return [*arguments, *_list(0, marks)]


def _settings() -> int:
    """Return the number of settings that an optimizer takes, found by calling the operator."""
    empty: list[torch.Tensor] = []
    rows = torch.zeros((1, 32), dtype=torch.uint8)
    for size in range(20):
        try:
            native.ops().update_rows(
                empty, empty, empty, [], rows, rows, 8, 0, "sgd", [0.1] * size, _i64(0)
            )
        except ValueError:
            continue
        return size
    raise AssertionError("no number of settings is right")


def _merge() -> list[Argument]:
    messages = []
    for _ in range(2):
        message = torch.empty(100)
        native.ops().pack_rows(*_own_rows(), [0, 2], _replicas(), [70, 10], [4, 3], message)
        messages.append(message)
    return _list(messages, _i64(2, 1, 2, 1), _replicas(), [70, 10], [4, 3])


def _own_rows() -> list[torch.Tensor]:
    """Return slots, groups and gradients of two buckets with two groups each, of dims 4 and 3."""
    return [_i64(1, 5, 8, 20), _i64(0, 2, 3, 4, 4, 0, 8, 16, 19, 19).view(2, 5), torch.rand(30)]


def _replicas() -> list[torch.Tensor]:
    """Return the slots of 70 and of 10 replicas, the former their numbers."""
    return [_i64(), torch.arange(0, 100, 10)]


def _united() -> list[torch.Tensor]:
    """Return slots and groups of the replicas that some rank touched."""
    return [_i64(1, 4, 5, 20), _i64(0, 3, 4, 0, 12, 15).view(2, 3)]


_SIGNALS = torch.zeros(4 * 16 + 16, dtype=torch.int32)


def _signals() -> torch.Tensor:
    first = -(_SIGNALS.data_ptr() // 4) % 16
    return _SIGNALS[first : first + 64].view(4, 16)


_SEGMENT_BYTES = 8192


@functools.cache
def _descriptor() -> int:
    """Open a file in memory, which stays open."""
    descriptor = os.memfd_create("fuzz")
    os.ftruncate(descriptor, _SEGMENT_BYTES)
    return descriptor


def _placed_rows() -> tuple[torch.Tensor, ...]:
    """Return addresses of rows by extent, each extent's column, each row's class, and counts."""
    address = _i64(*((extent << 40) + n for n, extent in enumerate((0, 2, 1, 1))))
    return address, _i64(0, 1, 1), _i32(0, 2, 1, 0), _i64(3, 0, 1, 1, 0, 2).view(3, 2)


CASES: dict[str, Callable[[], list[Argument]]] = {
    "count": _count,
    "distinct": lambda: _list(*_columns(), 2, 10, 3),
    "histogram": lambda: _list(_counters(50), _counters(20), _i64(0, 20, 50), _i64(0, -1)),
    "find_classes": lambda: _list(_counters(50), _counters(50), _i64(0, 20, 50), *_entries()),
    "count_rows": lambda: _list(*_placed_rows()),
    "leaving_rows": lambda: _list(*_placed_rows()),
    "cut_partitions": lambda: _list(_i64(3, 0, 400), _i64(64, 16, 16), _i64(90, 5, 0), 300, 100),
    "give_leftovers": lambda: _list(
        _i64(1, 0, 5), _doubles(3, 4), _doubles(3), _i64(*range(12)).view(3, 4), _doubles(4)
    ),
    "whole_by_shares": lambda: _list(_i64(1, 0, 50), _doubles(3, 4), _i64(0, 1, 0), _doubles(3), 2),
    "least_loaded": lambda: _list(_doubles(9), _doubles(3)),
    **{name: lambda: _list(_doubles(9)) for name in ("exp", "expm1", "log", "log1p", "log_gamma")},
    "ordered_product": lambda: _list(_doubles(4, 3), _doubles(3, 2)),
    "rows_to_least_loaded": lambda: _list(_i64(1, 0, 50), _i64(9, 7, 0), 4),
    "assign_in_order": lambda: _list(_doubles(6, 3), _i64(2, 3, 1), 7),
    "assign_exactly": lambda: _list(_doubles(6, 3), _i64(2, 3, 1)),
    "assign_partly": lambda: _list(_doubles(6, 3), _i64(2, 3, 1), 4),
    "cache_record_bytes": lambda: _list(True, 1),
    "assign_groups": lambda: _list(
        _i32(0, 1, 0, 1), _i64(1, 1, 2, 2).view(2, 2), _i32(0, 1, 2, 3).view(2, 2)
    ),
    "pack_codes": lambda: _list(_i32(0, 1, 2, 1), 3),
    "largest_in_order": lambda: _list(
        _i32(0, 4, 8, 1), _i64(0, 3, 4), torch.tensor([True, False, True])
    ),
    "mark_rows": _mark_rows,
    "list_hot_rows": lambda: _list(_counters(1500), _i64(0, 600, 1500), _i64(3, 4), _i64(5, 2)),
    "number_bitmap": lambda: _list(torch.randint(0, 2**62, (5, 8)), _i64(0, 2, 5)),
    "listed_and_striped_counts": _listed_and_striped,
    "translate": _translate,
    "pooled_rows": lambda: [*_batch(), *_list(_out_elements(), torch.float32, 0)],
    "weight_gradients": lambda: _list(torch.rand(320), *_batch()),
    "copy_rows": lambda: _list(
        _vouched(_i64(0, 5, 9)),
        [0, 1],
        [1, 2],
        _vouched([_ARENA.data_ptr(), _ARENA.data_ptr()]),
        _vouched([32, 32]),
        torch.empty(96, dtype=torch.uint8),
        [0, 32],
        _i64(-1, -1, -1),
        [7, 9],
    ),
    "redirect": lambda: _list(
        torch.randint(0, 99, (40,)), _i32(*range(40)), _i32(0, 10, 40), _i64(-1, 5)
    ),
    "redirect_numbered": lambda: _list(
        torch.randint(0, 99, (4,)), _i32(0, 2, -1, 1), _i64(-1, 5, 7)
    ),
    "accesses_by_rank": lambda: _list(*_sort()[:3], 2, 2, 3, 0),
    "one_per_bag": lambda: _list(torch.arange(2000)),
    "sort_accesses": _sort,
    "sum_gradients": _sum_gradients,
    "number_rows": _number_rows,
    "forward_bags": _forward_bags,
    "join_bags": _join_bags,
    "add_bags": lambda: _list(torch.rand(60), _i64(0, 8, 50), [1, 2], [8, 4], torch.rand(16)),
    "gather_bags": lambda: _list(torch.rand(60), _i64(0, 8, 50), [1, 2], [8, 4], torch.rand(16)),
    "reused_tensor": lambda: _list(_out_elements(), torch.float32),
    "add_gradients": _add_gradients,
    "lay_out_gradients": lambda: _list(_i64(0, 1, 4, 4, 9), [8, 5]),
    "merge_gradients": lambda: _list(
        [_i64(1, 5, 9), _i64(0, 5)], [torch.rand(24), torch.rand(16)], _GROUPS, [8]
    ),
    "unite_slots": lambda: _list(
        [_i64(1, 5, 9), _i64(0, 5)], [_i64(0, 1, 3), _i64(0, 2, 2)], [1, 0]
    ),
    "find_united": lambda: _list(
        _i64(-1, -1),
        _i64(3, 5),
        _i64(0, 2),
        [0],
        [_i64(3, 4, 5)],
        [_i64(0, 3)],
        [2],
        [7],
    ),
    "relay_gradients": lambda: _list(
        [_i64(1, 5, 9), _i64(0, 5)], [torch.rand(24), torch.rand(16)], _GROUPS, [0], [8]
    ),
    "pack_settings": lambda: _list([0.1] * _settings()),
    "update_rows": _update,
    "quantise_rows": lambda: _list(torch.rand(5, 8)),
    "dequantise_rows": lambda: _list(torch.zeros((5, 16), dtype=torch.uint8)),
    "mark_replicas": lambda: _list(
        *_own_rows()[:1], _i64(0, 2, 3, 4, 4), [0, 2], _replicas(), [70, 10], _i64(0, 0, 0)
    ),
    "unite_replicas": lambda: _list(
        [_i64(5, 1, 2), _i64(1, 0, 4)], _replicas(), [70, 10], [4, 3], 80
    ),
    "aggregate_rows": lambda: _list(
        *_own_rows(), [0, 2], [70, 10], *_united(), [4, 3], torch.empty(15)
    ),
    "sum_buffers": lambda: _list([torch.rand(9), torch.rand(9)], torch.empty(9)),
    "touched_rows": lambda: _list(_united()[1], torch.rand(15), [4, 3]),
    "take_rows": lambda: _list(*_united(), torch.rand(15), _i64(0, 2, 3), [4, 3]),
    "pack_rows": lambda: _list(
        *_own_rows(), [0, 2], _replicas(), [70, 10], [4, 3], torch.empty(14)
    ),
    "merge_messages": _merge,
    "digest_rows": lambda: _list(torch.zeros((9, 20), dtype=torch.uint8), 4),
    "draw_ranks": lambda: _list(
        torch.rand(50, dtype=torch.float64),
        30,
        1.1,
        _i64(10, 30),
        torch.rand(2, dtype=torch.float64),
    ),
    "place_ranks": lambda: _list(torch.randint(0, 30, (50,)), 30, 0, 5, True),
    "draw_counts": lambda: _list(
        _counters(3000), 5000, 1.1, _i64(), torch.empty(0, dtype=torch.float64), 2, 5, False, 1
    ),
    "samples_with_row_of": lambda: _list(_counters(50), _counters(50), 100, 2, 7),
    "wait_signals": lambda: _list(_signals(), 0, _vouched(5)),
    "post_signal": lambda: _list(_signals(), 1, 0),
    "leave_lock": lambda: _list(_vouched(_descriptor()), "Trank 0 was ended by SIGTERM"),
    "watch_lock": lambda: _list(_vouched(_descriptor()), "rank 1 died"),
    "forget_lock": lambda: _list(_descriptor()),
    "map_segment": lambda: _list(_vouched(_descriptor()), 4096),
    "huge_pages": lambda: _list(torch.zeros(5000, dtype=torch.uint8)),
    "protect": lambda: _list(
        _vouched(native.ops().map_segment(_descriptor(), _SEGMENT_BYTES)), False
    ),
    "trim_memory": lambda: _list(),
    "declarations": lambda: _list(),
}
