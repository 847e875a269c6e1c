"""The profile of a synthetic log, drawn directly without generating the log.

Counts of a table are one multinomial sample of its law over the log's accesses, exact in sum. With
drift, the accesses that have moved (D/2 of the whole log's on average, more in late windows) are a
second sample, through the second bijection. For bags, the samples with a row of A accesses are
drawn as the number of bags that A accesses hit. Lengths of bags that vary are one multinomial
sample of Poisson's law over the samples, and the accesses are their sum. Correlated accesses
(CoAccess) do not affect counts.
"""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from oper.base import native
from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.files.storage import atomic_folder
from oper.profiling.counter_arrays import new_counters, samples_with_row_offsets
from oper.profiling.profile import FORMAT, Profile, window_name, write_windows
from oper.synth.synthesizer import ORDERS, Synthesizer, stream_key
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import offsets

# Larger counters are in the profile's files from the start: 2 GiB fit on any machine that trains.
_IN_MEMORY_BYTES = 2 << 30


def _ignore(rows: int) -> None:
    pass


def write_profile(
    synthesizer: Synthesizer,
    folder: Path | str,
    windows: int = 1,
    advance: Callable[[int], None] = _ignore,
    overwrite: bool = False,
) -> None:
    """Write the profile of the log, or a folder of profiles of equal `windows` of it.

    `advance` is called with the number of rows drawn. `overwrite` replaces an existing profile.
    Raise OperError if the folder has other files, or writing fails.
    """
    if not 1 <= windows <= synthesizer.samples:
        raise OperError(
            f"{option('--windows', windows)}: expected 1 to {synthesizer.samples:,}, the number of "
            "samples"
        )
    with atomic_folder(folder, FORMAT, overwrite) as temporary:
        if windows == 1:
            synthesize_counts(synthesizer, temporary, advance=advance).write(temporary)
            return
        bounds = [synthesizer.samples * w // windows for w in range(windows + 1)]
        profiles = []
        for window, (begin, end) in enumerate(itertools.pairwise(bounds)):
            inner = temporary / window_name(window)
            inner.mkdir()
            profile = synthesize_counts(synthesizer, inner, begin, end, advance)
            profile.write(inner, sparse=True)
            profiles.append(profile)
        write_windows(temporary, profiles)


def synthesize_counts(
    synthesizer: Synthesizer,
    folder: Path | None = None,
    begin: int = 0,
    end: int | None = None,
    advance: Callable[[int], None] = _ignore,
) -> Profile:
    """Return the profile of samples begin … end - 1 of the log that `synthesizer` describes.

    Large counters are in files of `folder`, which is being written, if given.
    """
    import torch

    end = synthesizer.samples if end is None else end
    tables = synthesizer.recipe.tables
    bagged = tuple(f.bagged for f in synthesizer.recipe.features)
    starts, bag_starts = offsets(tables), samples_with_row_offsets(tables, bagged)
    dtype = _counter_type(synthesizer, end - begin)
    size_bytes = int(starts[-1] + bag_starts[-1]) * np.dtype(dtype).itemsize
    on_disk = folder if size_bytes > _IN_MEMORY_BYTES else None
    accesses = new_counters(int(starts[-1]), dtype, on_disk, "accesses.npy")
    samples_with_row = new_counters(int(bag_starts[-1]), dtype, on_disk, "samples_with_row.npy")
    bag_lengths = _draw_bag_lengths(synthesizer, begin, end)
    distinct, filled = bag_lengths.distinct, bag_lengths.filled_bags
    for table, feature in enumerate(synthesizer.recipe.features):
        counts = torch.from_numpy(accesses[starts[table] : starts[table + 1]])
        _draw_accesses(synthesizer, table, counts, int(distinct[table]), begin, end)
        if feature.bagged:
            in_bags = samples_with_row[bag_starts[table] : bag_starts[table + 1]]
            native.ops().samples_with_row_of(
                torch.from_numpy(in_bags),
                counts,
                end - begin,
                0 if feature.varying else int(feature.ids),
                stream_key(synthesizer.seed, "containing", table, begin),
            )
            # Drawn row by row, they may be slightly fewer than the bags that have any.
            distinct[table] = max(int(in_bags.sum(dtype=np.int64)), int(filled[table]))
        advance(feature.table.rows)
    source = {"synthetic": synthesizer.source}
    if end - begin < synthesizer.samples:
        source["window"] = {"from": begin, "to": end}
    return Profile(
        tables,
        end - begin,
        accesses,
        samples_with_row,
        bagged,
        source=source,
        bag_lengths=bag_lengths,
    )


def _draw_bag_lengths(synthesizer: Synthesizer, begin: int, end: int) -> BagLengths:
    """Return the lengths of all bags, as if no row repeated in one."""
    pairs = []
    for table, feature in enumerate(synthesizer.recipe.features):
        lengths = np.array([round(feature.ids)])
        bags = np.array([end - begin])
        if feature.varying:
            random = np.random.default_rng(
                stream_key(synthesizer.seed, "bag lengths", table, begin)
            )
            chances = poisson(feature.ids)
            lengths, bags = np.arange(len(chances)), random.multinomial(end - begin, chances)
        pairs.append(np.stack([np.full(len(lengths), table), lengths, bags], axis=1))
    drawn = np.concatenate(pairs)
    ids = [int(of_table[:, 1] @ of_table[:, 2]) for of_table in pairs]
    return BagLengths.of_pairs(drawn, np.array(ids, dtype=np.int64))


def poisson(mean: float) -> Floats:
    """Return the chance of each length of a bag, [n], up to a length beyond which the total chance
    is less than 1e-20."""
    if mean == 0:
        return np.ones(1)
    most = math.ceil(mean + 12 * math.sqrt(mean) + 30)
    chances = [math.exp(n * math.log(mean) - mean - math.lgamma(n + 1)) for n in range(most + 1)]
    return np.array(chances) / sum(chances)


def _draw_accesses(
    synthesizer: Synthesizer, table: int, counts: Any, total: int, begin: int, end: int
) -> None:
    seed, feature = synthesizer.seed, synthesizer.recipe.features[table]
    random = np.random.default_rng(stream_key(seed, "accesses", table, begin))
    moved = int(random.binomial(total, synthesizer.moved_share(begin, end)))
    order, key = ORDERS.index(synthesizer.order), synthesizer.row_key(table)
    for accesses, has_moved in ((total - moved, False), (moved, True)):
        if accesses:
            stream = stream_key(seed, "counts", table, begin, has_moved)
            law = feature.law.arguments
            native.ops().draw_counts(counts, accesses, *law, order, key, has_moved, stream)


def _counter_type(synthesizer: Synthesizer, samples: int) -> Any:
    """Return uint32 if the hottest row's count fits with ten deviations above its mean, else
    uint64."""
    means = (f.ids * samples * f.law.hottest_share for f in synthesizer.recipe.features)
    largest = max(means)
    return np.uint32 if largest + 10 * largest**0.5 < 2**32 else np.uint64
