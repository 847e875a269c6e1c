"""The profile of a synthetic log without the log: row counts drawn directly.

Counts of a table are one multinomial sample of its law over the log's accesses, exact in sum. With
drift, the share of accesses that has moved, D/2 over the whole log, is a second sample through the
second bijection. For bags, `containing` of a row with A accesses is drawn as the number of distinct
bags that A accesses hit. Correlation between tables (CoAccess) does not show in counts.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper import native
from oper.logs.synth import ORDERS, Synthesizer, stream_key
from oper.planner.profile import Profile
from oper.tables import offsets

# Counters above this size live in an unnamed file instead of memory.
_IN_MEMORY_BYTES = 4 << 30


def synthesize_counts(
    synthesizer: Synthesizer,
    scratch: Path,
    advance: Callable[[int], None] = lambda rows: None,
) -> Profile:
    """The profile of the log that `synthesizer` would write; one seed, one profile.

    `scratch` is a folder for counters too large for memory; `advance` is told of rows done.
    """
    import torch

    recipe = synthesizer.recipe
    features = recipe.features
    bagged = tuple(f.bagged for f in features)
    begins = offsets(recipe.tables)
    bag_rows = [t.rows if b else 0 for t, b in zip(recipe.tables, bagged, strict=True)]
    bag_begins = np.concatenate([[0], np.cumsum(bag_rows)])
    dtype = _counter_type(synthesizer)
    accesses = _zeros(int(begins[-1]), dtype, scratch)
    containing = _zeros(int(bag_begins[-1]), dtype, scratch)
    for table, feature in enumerate(features):
        counts = torch.from_numpy(accesses[begins[table] : begins[table + 1]])
        _draw_accesses(synthesizer, table, counts)
        if feature.bagged:
            native.ops().containing_of(
                torch.from_numpy(containing[bag_begins[table] : bag_begins[table + 1]]),
                counts,
                synthesizer.samples,
                0 if feature.varying else int(feature.ids),
                stream_key(synthesizer.seed, "containing", table),
            )
        advance(feature.table.rows)
    return Profile(
        tables=recipe.tables,
        samples=synthesizer.samples,
        accesses=accesses,
        containing=containing,
        bagged=bagged,
        source={"synthetic": synthesizer.source},
    )


def _draw_accesses(synthesizer: Synthesizer, table: int, counts: Any) -> None:
    feature = synthesizer.recipe.features[table]
    random = np.random.default_rng([synthesizer.seed, 1 + table])
    mean = feature.ids * synthesizer.samples
    total = int(random.poisson(mean)) if feature.varying else round(mean)
    moved = int(random.binomial(total, synthesizer.drift / 2))
    order, key = ORDERS.index(synthesizer.order), synthesizer.place_key(table)
    for accesses, has_moved in ((total - moved, False), (moved, True)):
        if accesses:
            law = feature.law.arguments
            native.ops().draw_counts(counts, accesses, *law, order, key, has_moved)


def _counter_type(synthesizer: Synthesizer) -> type[np.unsignedinteger[Any]]:
    """uint32 where the hottest row's count, ten deviations above its mean, fits."""
    means = [f.ids * synthesizer.samples * f.law.hottest_share for f in synthesizer.recipe.features]
    largest = max(means)
    return np.uint32 if largest + 10 * largest**0.5 < 2**32 else np.uint64


def _zeros(size: int, dtype: type[np.unsignedinteger[Any]], scratch: Path) -> NDArray[Any]:
    if size * np.dtype(dtype).itemsize <= _IN_MEMORY_BYTES:
        return np.zeros(size, dtype)
    with tempfile.TemporaryFile(dir=scratch) as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=(size,))
