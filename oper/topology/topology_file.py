"""Topology files (docs/topology.md), with errors that name the file, line and key.

A plan's JSON has the same content. Bandwidths are bytes per second in one direction, and L = 1 /
bandwidth.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.base.units import parse_bytes
from oper.files.yaml_file import Document, KeyPath
from oper.topology.capacity import MAX_RANKS, Capacity, parse_capacity
from oper.topology.latency import CPU_RANKS, DEVICES, LATENCIES, Latency
from oper.topology.links import (
    KINDS,
    LINKED,
    SHARED,
    Network,
    NodeMemory,
    link_matrix,
)
from oper.topology.number_ranges import BANDWIDTH, LATENCY, LINK_COST, Range
from oper.topology.presets import Description
from oper.topology.transports import TRANSPORTS, Transport, why_not

_KEYS = (
    "name",
    "node_of",
    "bandwidth",
    *Network._fields,
    "link_cost",
    "allreduce_bandwidth",
    "latency_seconds",
    "cache_bandwidth",
    "memory",
    "transport",
    "device_memory",
    "host_memory",
    "host_bandwidth",
    "capacity",
)


def parse_topology(document: Document, default_name: str) -> Description:
    """Return the topology that `document` describes, named `default_name` if the document has no
    name."""
    content = document.content
    if not isinstance(content, dict):
        document.refuse((), f"a mapping of {', '.join(_KEYS)}", _called(content))
    _check_keys(document, (), _KEYS)
    for key in ("node_of", "allreduce_bandwidth"):
        if content.get(key) is None:
            document.fail((), f"has no {key}; see docs/topology.md")
    node_of = _node_of(document)
    ranks = len(node_of)
    memory = _memory(document, len(set(node_of)))
    return Description(
        name=str(content.get("name", default_name)),
        node_of=node_of,
        link_cost=_link_cost(document, node_of),
        allreduce_bandwidth=_rate(document, ("allreduce_bandwidth",)),
        latency=_latency(document, memory),
        device_memory_bytes=_sizes(document, "device_memory", ranks),
        shares_host_memory=False,
        host_memory_bytes=_sizes(document, "host_memory", ranks),
        host_bandwidth=_host_bandwidth(document, ranks),
        capacity=_capacity(document, ranks),
        memory=memory,
        transport=_transport(document, memory),
        cache_bandwidth=None
        if content.get("cache_bandwidth") is None
        else _rate(document, ("cache_bandwidth",)),
    )


def _node_of(document: Document) -> tuple[int, ...]:
    given = document.content["node_of"]
    if not isinstance(given, list) or not 1 <= len(given) <= MAX_RANKS:
        expected = f"the node of each of 1 to {MAX_RANKS:,} ranks, such as [0, 0, 1, 1]"
        document.refuse(("node_of",), expected, _called(given))
    for rank, node in enumerate(given):
        if type(node) is not int or not 0 <= node < 1 << 31:
            document.refuse(("node_of", rank), "a node's number", repr(node))
    return tuple(given)


def _link_cost(document: Document, node_of: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the matrix from `bandwidth` (bytes/s) or `link_cost` (s/byte), by kind or for each
    pair."""
    content = document.content
    present = [key for key in ("bandwidth", "link_cost") if content.get(key) is not None]
    if len(present) != 1:
        document.fail((), "needs either bandwidth or link_cost")
    key = present[0]
    ranks = len(node_of)

    def cost(*keys: str | int) -> float:
        if key == "bandwidth":
            return 1 / _rate(document, (key, *keys))
        return _number(document, (key, *keys), _at(document, (key, *keys)), LINK_COST)

    if isinstance(content[key], dict):
        _check_keys(document, (key,), KINDS)
        needed = ["local"]
        if len(set(node_of)) < ranks:
            needed.append("same_node")
        if len(set(node_of)) > 1:
            needed.append("other_node")
        for kind in needed:
            if content[key].get(kind) is None:
                document.fail((key,), f"has no {kind!r}, and the ranks have links of that kind")
        network = Network(_adapters_per_node(document), _bisection_bandwidth(document))
        return link_matrix(node_of, {kind: cost(kind) for kind in needed}, network)
    for shared in Network._fields:
        if content.get(shared) is not None:
            document.fail(
                (shared,),
                f"is for links of a kind, and every pair's is given: leave it out, or give {key} "
                f"for {', '.join(KINDS)}",
            )
    matrix = np.zeros((ranks, ranks))
    _check_length(document, (key,), content[key], ranks, "rows, one for each reading rank")
    for reader in range(ranks):
        row = content[key][reader]
        _check_length(document, (key, reader), row, ranks, "links, one for each rank read from")
        matrix[reader] = [cost(reader, source) for source in range(ranks)]
    return matrix


def _adapters_per_node(document: Document) -> int | None:
    given = document.content.get("adapters_per_node")
    if given is not None and (type(given) is not int or not 1 <= given <= MAX_RANKS):
        expected = f"a node's number of network adapters, 1 to {MAX_RANKS:,}"
        document.refuse(("adapters_per_node",), expected, f"{given!r:.80}")
    return given


def _bisection_bandwidth(document: Document) -> float | None:
    key = "bisection_bandwidth"
    return None if document.content.get(key) is None else _rate(document, (key,))


def _latency(document: Document, memory: tuple[NodeMemory, ...]) -> Latency:
    """Return the latency from one number, for all hops, or one for each of LATENCIES; missing ones
    have the default for ranks on such nodes."""
    usual = CPU_RANKS if SHARED in memory else DEVICES
    key = "latency_seconds"
    given = document.content.get(key)
    if given is None:
        return usual

    def seconds(*keys: str) -> float:
        value = _at(document, (key, *keys))
        if isinstance(value, bool) or value != 0:
            return _number(document, (key, *keys), value, LATENCY)
        return 0.0

    if not isinstance(given, dict):
        return Latency.of_hops(seconds())
    _check_keys(document, (key,), LATENCIES)
    return replace(usual, **{name: seconds(name) for name in given})


def _memory(document: Document, nodes: int) -> tuple[NodeMemory, ...]:
    given = document.content.get("memory")
    if given is None:
        return (LINKED,) * nodes
    values = given if isinstance(given, list) else [given] * nodes
    _check_length(document, ("memory",), values, nodes, "values, one for each node")
    for node, value in enumerate(values):
        if value not in (LINKED, SHARED):
            keys = ("memory", node) if isinstance(given, list) else ("memory",)
            document.refuse(keys, f"{LINKED} or {SHARED}", f"{value!r:.80}")
    return tuple(values)


def _transport(document: Document, memory: tuple[NodeMemory, ...]) -> Transport | None:
    given = document.content.get("transport")
    if given is None:
        return None
    if given not in TRANSPORTS:
        document.refuse(("transport",), f"one of {', '.join(TRANSPORTS)}", f"{given!r:.80}")
    transport: Transport = given
    if reason := why_not(transport, memory):
        raise OperError(f"{document.where(('transport',))}: {reason}")
    return transport


def _sizes(document: Document, key: str, ranks: int) -> tuple[int, ...] | None:
    """Return the memory of each rank's device or host, from one size for all or a list."""
    given = document.content.get(key)
    if given is None:
        return None
    values = given if isinstance(given, list) else [given] * ranks
    _check_length(document, (key,), values, ranks, "sizes, one for each rank")
    return tuple(
        parse_bytes(str(value), f"{document.where((key,))} of rank {rank}")
        for rank, value in enumerate(values)
    )


def _host_bandwidth(document: Document, ranks: int) -> tuple[float, ...] | None:
    """Return the bytes/s between each rank's device and its host's memory, from one rate for all or
    a list."""
    key = "host_bandwidth"
    given = document.content.get(key)
    if given is None:
        return None
    if not isinstance(given, list):
        return (_rate(document, (key,)),) * ranks
    _check_length(document, (key,), given, ranks, "rates, one for each rank")
    return tuple(_rate(document, (key, rank)) for rank in range(ranks))


def _capacity(document: Document, ranks: int) -> Capacity:
    given = document.content.get("capacity")
    if given is None:
        return None
    if isinstance(given, list):
        _check_length(document, ("capacity",), given, ranks, "values, one for each rank")
    try:
        capacity = parse_capacity(
            ",".join(map(str, given if isinstance(given, list) else [given])), ranks
        )
        # A list with one factor is for the only rank, not for all.
        return (capacity,) if isinstance(given, list) and isinstance(capacity, float) else capacity
    except OperError as error:
        raise OperError(f"{document.where(('capacity',))}: {error}") from error


def _check_keys(document: Document, keys: KeyPath, known: Sequence[str]) -> None:
    for key in _at(document, keys):
        if key not in known:
            document.fail((*keys, str(key)), f"is an unknown key; known are {', '.join(known)}")


def _check_length(document: Document, keys: KeyPath, given: Any, length: int, what: str) -> None:
    if not isinstance(given, list) or len(given) != length:
        got = f"{len(given)}" if isinstance(given, list) else _called(given)
        document.refuse(keys, f"{length} {what}", got)


def _rate(document: Document, keys: KeyPath) -> float:
    """Return a bandwidth in bytes/s from a bare number, or from a size such as `240GB/s`."""
    given = _at(document, keys)
    if isinstance(given, str) and given.strip().endswith("/s"):
        given = parse_bytes(given.strip().removesuffix("/s"), document.where(keys))
    return _number(document, keys, given, BANDWIDTH)


def _number(document: Document, keys: KeyPath, given: Any, limits: Range) -> float:
    if given is None:
        document.refuse(keys, str(limits), "nothing")
    try:
        # A string too: YAML 1.1 reads 1e9 as a string, and only 1.0e+9 as a number. `yes` is true.
        is_number = isinstance(given, int | float | str) and not isinstance(given, bool)
        value = float(given) if is_number else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if not limits.holds(value):
        document.refuse(keys, str(limits), f"{given!r:.80}")
    return value


def _at(document: Document, keys: KeyPath) -> Any:
    value = document.content
    for step in keys:
        value = value[step]
    return value


def _called(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
