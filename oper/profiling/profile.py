"""Profiles: the accesses of each row in a log, and the number of samples that contain the row.

With n samples, row k has f_k = accesses[k] / n accesses per sample (the access frequency of the
paper's §3.2, A_k = f_k · samples per rank) and the share s_k = samples_with_row[k] / n of samples
that contain it. The two differ only if a sample can read a row twice: in bags, or if several
features index one table. So `samples_with_row` is stored only for tables in which some sample had
several ids.

A profile is a folder: profile.json (its marker: tables, samples, provenance, checksums),
accesses.npy, samples_with_row.npy if any table needs it (both sparse in windows: counter_files.py),
bag_lengths.npy, and vocab/TABLE.parquet for tables with a vocabulary. A folder of windows has a
profile.json that lists them, and each window is a profile below it: PROFILE is their sum, PROFILE@3
the fourth one. The last part of a log that was held out of the counts is a profile in `held-out/`.
A window keeps the counts of its first part in `first-part/`, so that plans made from that part can
be judged on the rest (`Profile.parts`).

The value of a plan on data that it was not made from shows on the data that came after: the part
held out, or the next window (`Profile.following`).
"""

import hashlib
import json
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from oper.base.errors import OperError, OperNotice, OperWarning, check_type
from oper.base.spoken import option
from oper.cost.expected_counts import Turnover
from oper.files.manifest import describe_files, open_folder, verify_files, write_manifest
from oper.files.overwrite_rules import Format
from oper.files.storage import atomic_folder, load_array, save_array
from oper.logs.table_discovery import Prepared, numbered_tables
from oper.profiling.counter_arrays import (
    RowCounts,
    check_total,
    new_counters,
    samples_with_row_offsets,
)
from oper.profiling.counter_files import (
    SparseCounts,
    add_counters,
    counter_files,
    load_counters,
    npy_sha256,
    save_counters,
)
from oper.profiling.distinct_rows import Distinct, DistinctSums
from oper.profiling.histogram import RowHistogram
from oper.profiling.sampling import Sampled
from oper.profiling.turnover import turnover_between
from oper.tables.bag_lengths import BagLengths
from oper.tables.row_identity import check_same_rows
from oper.tables.table import Table, VocabularyDigest, check_known, fingerprint

MARKER = "profile.json"
HELD_OUT = "held-out"  # the folder of the part held out
FIRST_PART = "first-part"  # the folder of the first part of a window
BAG_LENGTHS = "bag_lengths.npy"
_ALIKE = 2  # factor within which two numbers of samples count as one size
_WINDOW = re.compile("[0-9]{1,9}")
FORMAT = Format(
    MARKER,
    "oper.profile",
    4,
    "profile the log again with this oper",
    command="oper profile LOG -o PROFILE",
)


@dataclass(eq=False)
class Profile(RowCounts):
    """Row counts of a log, with measurements made on the way and the provenance of the log.

    distinct: distinct rows measured in batches. source: file names and options, no paths and no
    times, so that equal logs give equal profiles. bag_lengths: None if they were not counted, as by
    earlier versions of oper.
    """

    distinct: Distinct | None = None
    source: dict[str, Any] = field(default_factory=dict)
    # Vocabularies of tables that have one are in `vocab/` of this folder, in memory, or read from a
    # plan that was monitored.
    vocabulary_folder: Path | None = None
    vocabularies: Prepared | None = None
    read_vocabularies: "Callable[[], Prepared] | None" = field(default=None, repr=False)
    bag_lengths: BagLengths | None = None
    # They open the profiles of the data after and before these, if those are known.
    open_following: "Callable[[], Profile] | None" = field(default=None, repr=False)
    open_preceding: "Callable[[], Profile] | None" = field(default=None, repr=False)
    # It opens two windows that follow each other, of a sum of windows. The two windows of another
    # profile are the one that precedes it and itself.
    open_last_windows: "Callable[[], tuple[Profile, Profile]] | None" = field(
        default=None, repr=False
    )
    # It opens the counts of the first part of a window, in the order of the log.
    open_first_part: "Callable[[], Profile] | None" = field(default=None, repr=False)
    holds_out: bool = False  # the following part was held out of this profile, and is saved with it

    def __post_init__(self) -> None:
        check_known(self.tables, "a profile")

    def __repr__(self) -> str:
        return (
            f"<Profile of {len(self.accesses):,} rows of {len(self.tables)} tables in "
            f"{self.samples:,} samples>"
        )

    def prepared(self) -> Prepared:
        """Return the tables with their vocabularies, to read a log by the same rules."""
        if self.vocabularies is None and self.read_vocabularies is not None:
            self.vocabularies = self.read_vocabularies()
        if self.vocabularies is None:
            self.vocabularies = Prepared.load(self.tables, self.vocabulary_folder)
        return self.vocabularies

    def numbered_tables(self) -> tuple[Table, ...]:
        """Return the tables with the digests of their vocabularies, as far as these are known."""
        return numbered_tables(self.tables, self.prepared)

    def vocabulary_start(self, table: str, values: int) -> VocabularyDigest | None:
        """Return the digest of the first values of a table's vocabulary, if that is known."""
        return self.prepared().vocabulary_start(table, values)

    def save_vocabularies(self, folder: Path) -> None:
        """Write the tables' vocabularies, if any, to `vocab/` in a folder that is being written."""
        if self.read_vocabularies is not None:
            self._read_from_plan()
        if self.vocabulary_folder is not None and self.vocabularies is None:
            if (self.vocabulary_folder / "vocab").is_dir():
                shutil.copytree(self.vocabulary_folder / "vocab", folder / "vocab")
        elif self.vocabularies is not None and self.vocabularies.vocabularies:
            self.vocabularies.save_vocabularies(folder)

    def _read_from_plan(self) -> None:
        """Read the vocabularies of the plan that was monitored; a warning if they are gone."""
        try:
            self.prepared()
        except OperError as error:
            warnings.warn(
                f"the vocabularies of the monitored plan are left out: {error}; without them no "
                "command can read raw values by these tables",
                OperWarning,
                stacklevel=3,
            )

    @cached_property
    def rows_by_counts(self) -> RowHistogram:
        """Rows by table, accesses and samples with the row, counted once."""
        return self.histogram()

    @cached_property
    def following(self) -> "Profile | None":
        """The counts of the data right after these: of the part held out, or of the next window;
        None if nothing follows."""
        return None if self.open_following is None else self.open_following()

    @cached_property
    def preceding(self) -> "Profile | None":
        """The counts of the window before; None without one."""
        return None if self.open_preceding is None else self.open_preceding()

    @cached_property
    def turnover(self) -> Turnover | None:
        """Changes of the rows that are read from one window to the next, the last one counted here;
        None without windows, or if the earlier window is of another size than these counts, because
        the number of new rows depends on the number of rows seen before."""
        earlier, later = self.preceding, self
        if self.open_last_windows is not None:
            earlier, later = self.open_last_windows()
        if earlier is None or not 1 / _ALIKE <= earlier.samples / self.samples <= _ALIKE:
            return None
        turnover = turnover_between(earlier, later)
        earlier.release()
        return turnover

    @property
    def parts(self) -> "tuple[Profile, Profile] | None":
        """Earlier and later part of these counts: the first part of a window and its rest, or the
        sum of all windows but the last and the last window; None if nothing tells which counts are
        later."""
        if self.open_first_part is None:
            return None if self.open_last_windows is None else self.open_last_windows()
        first = self.open_first_part()
        later = _without(self, first)
        # The later part alone does not tell how rows come and go: the window before does.
        earlier = replace(
            first,
            distinct=self.distinct,
            source=self.source,
            open_preceding=self.open_preceding,
        )
        return earlier, later

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 of all that plans use: tables, samples, counters, measured ratios and lengths
        of bags."""
        return _digest(self, {name: npy_sha256(getattr(self, name)) for name in self._counters()})

    def select(self, tables: Sequence[int]) -> "Profile":
        """Return the counts of the tables with these numbers, ascending, in counters of their own;
        the profile itself if these are all tables."""
        if len(tables) == len(self.tables):
            return self
        samples_with_row = [self.table_samples_with_row(n) for n in tables if self.bagged[n]]
        measured = self.distinct
        per_table: dict[str, Any] = {
            name: tuple(values[n] for n in tables)
            for name, values in (vars(measured) if measured else {}).items()
            if isinstance(values, tuple)
        }
        return replace(
            self,
            tables=tuple(self.tables[n] for n in tables),
            accesses=np.concatenate([self.table_accesses(n) for n in tables]),
            samples_with_row=np.concatenate([self.samples_with_row[:0], *samples_with_row]),
            bagged=tuple(self.bagged[n] for n in tables),
            distinct=measured and replace(measured, **per_table),
            bag_lengths=self.bag_lengths and self.bag_lengths.select(tables),
            open_following=_selected(self.open_following, tables),
            open_preceding=_selected(self.open_preceding, tables),
            open_last_windows=_both_selected(self.open_last_windows, tables),
            open_first_part=_selected(self.open_first_part, tables),
        )

    def save(self, folder: Path | str, overwrite: bool = False) -> None:
        """Write the profile; `overwrite` replaces an existing one, if it has no other files."""
        with atomic_folder(folder, FORMAT, overwrite) as temporary:
            self.save_vocabularies(temporary)
            self.write(temporary)

    @property
    def left_out(self) -> dict[str, str]:
        """Reason for each column of the log that is in no table, by name; {} if its columns were
        chosen."""
        return dict(self.source.get("left_out", {}))

    @property
    def skipped_ids(self) -> dict[str, int]:
        """Number of ids skipped because they are no rows, by table; only tables with any."""
        return dict(self.source.get("skipped_ids", {}))

    @property
    def unknown_accesses(self) -> dict[str, int]:
        """Accesses of values that a table's vocabulary does not know, by table; only tables with
        any. They are the accesses of row 0, which no value of a vocabulary has."""
        counted = {
            table.name: int(self.table_accesses(number)[0])
            for number, table in enumerate(self.tables)
            if table.ids.kind == "vocab"
        }
        return {name: accesses for name, accesses in counted.items() if accesses}

    @property
    def sampled(self) -> Sampled | None:
        """Share of the samples that was counted, and its error; None if all samples were
        counted."""
        content = self.source.get("sampled")
        return None if content is None else Sampled.from_dict(content)

    @property
    def log_part(self) -> dict[str, Any]:
        """Counted part of the log: `rows`, `window` and `time_unit`, `sampled`, as in `source`; {}
        for all of it, and for sums of other profiles than all windows of a folder."""
        options, sampled = self.source.get("options", {}), self.source.get("sampled", {})
        part = {name: options[name] for name in ("rows",) if name in options}
        if "window" in self.source:
            part["window"] = self.source["window"]
            part |= {name: options[name] for name in ("time_unit",) if name in options}
        if "seed" in sampled:
            part["sampled"] = {"share": sampled["share"], "seed": sampled["seed"]}
        return part

    def write(self, folder: Path, sparse: bool = False) -> None:
        """Write all but the vocabularies into a folder that is being written.

        `sparse`, for windows: counters that are smaller so are written sparse, and read from there.
        """
        if self.holds_out and self.following is not None:
            (folder / HELD_OUT).mkdir(exist_ok=True)
            self.following.write(folder / HELD_OUT, sparse=True)
        if self.open_first_part is not None:
            (folder / FIRST_PART).mkdir(exist_ok=True)
            self.open_first_part().write(folder / FIRST_PART, sparse=True)
        digests = {}
        for name in self._counters():
            counters = getattr(self, name)
            kept = save_counters(folder, name, counters, sparse)
            if isinstance(kept, SparseCounts):
                digests[name] = npy_sha256(counters)
                setattr(self, name, kept)
        bags = self.bag_lengths
        if bags is not None:
            save_array(folder / BAG_LENGTHS, bags.pairs)
        files = describe_files(folder)
        for name in self._counters():
            if name not in digests:
                digests[name] = files[f"{name}.npy"]["sha256"]
        self.digest = _digest(self, digests)
        content = {
            "schema": FORMAT.schema,
            "version": FORMAT.version,
            "samples": self.samples,
            "rows": self.rows,
            "fingerprint": fingerprint(self.tables),
            "digest": self.digest,
            "tables": [
                {**table.to_dict(), "bagged": bagged}
                for table, bagged in zip(self.tables, self.bagged, strict=True)
            ],
            "distinct": None if self.distinct is None else self.distinct.to_dict(),
            "distinct_in_bags": bags and bags.distinct.tolist(),
            "source": self.source,
            "files": files,
        }
        write_manifest(folder, FORMAT, content)

    @classmethod
    def load(cls, spec: Path | str, mmap: bool = True, check: bool = True) -> "Profile":
        """Load a profile: `PROFILE`, which is the sum if it has windows, or `PROFILE@3`.

        `mmap` leaves the counters on the disk until they are read; `check` verifies the digests of
        all files, and without it only their sizes and the marker's own digest are. Raise OperError
        if the folder is not a profile, is damaged or incomplete.
        """
        opened = cls.load_windows(spec, mmap, check)
        whole = opened[0] if len(opened) == 1 else merge(opened)
        # Windows of one folder are of one log, and together all that was counted of it.
        first, *others = ({k: p.log_part.get(k) for k in ("rows", "sampled")} for p in opened)
        if others:
            whole.open_last_windows = partial(_last_windows, opened)
        if others and all(other == first for other in others):
            whole.source |= {"options": {"rows": first["rows"]}} if first["rows"] else {}
            whole.source |= {"sampled": first["sampled"]} if first["sampled"] else {}
        return whole

    @classmethod
    def load_windows(
        cls, spec: Path | str, mmap: bool = True, check: bool = True
    ) -> "list[Profile]":
        """Return the windows that `load` would sum, or the profile itself without windows."""
        folder, window = _split(str(spec))
        content = open_folder(folder, FORMAT)
        if "windows" not in content:
            if window is not None:
                raise OperError(f"{spec}: {folder} has no windows; name it without @{window}")
            return [_load(folder, content, folder, mmap, check)]
        listed = _windows(folder, content)
        verify_files(folder, content.get("files"), digests=check)
        if window is None:
            chosen = range(len(listed))
        elif window < len(listed):
            chosen = range(window, window + 1)
        else:
            raise OperError(f"{spec}: {folder} has windows @0 to @{len(listed) - 1}")
        windows = [_load_window(folder, listed, number, mmap, check) for number in chosen]
        in_order(windows)  # so that no window opens its neighbours' files anew
        return windows

    def _counters(self) -> list[str]:
        """Return the names of the counters that there are, here and on the disk."""
        return ["accesses", *(["samples_with_row"] if any(self.bagged) else [])]


def in_order(windows: "Sequence[Profile]") -> None:
    """Link windows of a log, given in order, to the windows that follow and precede each."""
    for earlier, later in pairwise(windows):
        earlier.open_following = partial(itself, later)
        later.open_preceding = partial(itself, earlier)


def with_held_out(first: Profile, last: Profile) -> Profile:
    """Return the profile of a log's first part, with that of its last part held out."""
    return replace(first, open_following=partial(itself, last), holds_out=True)


def _without(whole: Profile, part: Profile) -> Profile:
    """Return the counts of a profile less those of a part of it."""
    samples_with_row = whole.samples_with_row.copy()
    starts = whole.samples_with_row_offsets
    for table in np.flatnonzero(whole.bagged).tolist():
        rest = samples_with_row[starts[table] : starts[table + 1]]
        rest -= part.table_samples_with_row(table).astype(rest.dtype)
    bags, part_bags = whole.bag_lengths, part.bag_lengths
    return replace(
        whole,
        samples=whole.samples - part.samples,
        accesses=whole.accesses - part.accesses.astype(whole.accesses.dtype),
        samples_with_row=samples_with_row,
        bag_lengths=None if bags is None or part_bags is None else bags.without(part_bags),
        open_following=None,
        open_preceding=None,
        open_first_part=None,
    )


def itself(profile: Profile) -> Profile:
    """Return the profile; `partial` of it opens a profile that is in memory."""
    return profile


def _selected(
    opened: Callable[[], Profile] | None, tables: Sequence[int]
) -> Callable[[], Profile] | None:
    """Return a function that opens the selected tables of the profile that `opened` opens."""
    return None if opened is None else lambda: opened().select(tables)


def _both_selected(
    opened: Callable[[], tuple[Profile, Profile]] | None, tables: Sequence[int]
) -> Callable[[], tuple[Profile, Profile]] | None:
    """Return a function that opens the selected tables of the two profiles that `opened` opens."""
    if opened is None:
        return None
    both = opened

    def selected() -> tuple[Profile, Profile]:
        earlier, later = both()
        return earlier.select(tables), later.select(tables)

    return selected


def _last_windows(windows: Sequence[Profile]) -> tuple[Profile, Profile]:
    """Return the sum of all windows but the last, and the last window."""
    return merge(windows[:-1]), windows[-1]


def profile_given(function: str, given: Profile | Path | str) -> Profile:
    """Return the profile that the argument `profile` of a public function is, or is the folder of.

    Raises OperError if it is of another type, or the folder is not a profile.
    """
    check_type(function, "profile", given, Profile, Path, str)
    return given if isinstance(given, Profile) else Profile.load(given)


def write_windows(folder: Path, windows: Sequence[Profile]) -> None:
    """Write the marker of a folder of windows, after each window has been written into it."""
    listed = [
        {
            "name": window_name(number),
            "samples": window.samples,
            "digest": window.digest,
            **window.source.get("window", {}),
        }
        for number, window in enumerate(windows)
    ]
    vocabularies = describe_files(folder / "vocab").items()
    content = {
        "schema": FORMAT.schema,
        "version": FORMAT.version,
        "windows": listed,
        "files": {f"vocab/{name}": described for name, described in vocabularies},
    }
    write_manifest(folder, FORMAT, content)


def window_name(number: int) -> str:
    """Return the name of a window's folder."""
    return f"window-{number:03d}"


def merge(profiles: Sequence[Profile], folder: Path | None = None) -> Profile:
    """Return the sum of profiles of the same tables, such as of parts of one log.

    The counters are in files of `folder`, which is being written, if given. Raise OperError if
    tables, vocabularies or sampled shares differ.
    """
    if not profiles:
        raise OperError("merging profiles: expected at least one, got none")
    first = profiles[0]
    if any(profile.holds_out for profile in profiles):
        warnings.warn(
            f"merging profiles: the parts that were held out ({option('--hold-out')}) are not in "
            "the sum, nor beside it",
            OperNotice,
            stacklevel=2,
        )
    for number, other in enumerate(profiles[1:], start=1):
        _check_mergeable(first, other, number)
    stored = [p.stored("accesses") for p in profiles]
    check_total("merging profiles", *stored)
    bagged = tuple(any(flags) for flags in zip(*(p.bagged for p in profiles), strict=True))
    # The sum of the profiles' largest counters bounds every counter of the sum.
    bound = sum(int(counters.max(initial=0)) for counters in stored)
    dtype = np.uint32 if bound <= np.iinfo(np.uint32).max else np.uint64
    starts = samples_with_row_offsets(first.tables, bagged)
    accesses = new_counters(first.rows, dtype, folder, "accesses.npy")
    samples_with_row = new_counters(int(starts[-1]), dtype, folder, "samples_with_row.npy")
    for profile in profiles:
        add_counters(profile.stored("accesses"), accesses)
        if profile.bagged == bagged:
            add_counters(profile.stored("samples_with_row"), samples_with_row)
            continue
        for table in np.flatnonzero(bagged).tolist():
            table_counts = samples_with_row[starts[table] : starts[table + 1]]
            add_counters(profile.table_samples_with_row(table), table_counts)
        profile.release()
    merged = Profile(
        first.tables,
        sum(p.samples for p in profiles),
        accesses,
        samples_with_row,
        bagged,
        source=_merged_source(profiles),
        vocabulary_folder=first.vocabulary_folder,
        vocabularies=first.vocabularies,
        read_vocabularies=first.read_vocabularies,
    )
    lengths = [p.bag_lengths for p in profiles if p.bag_lengths is not None]
    if len(lengths) == len(profiles):
        merged.bag_lengths = BagLengths.sum(lengths)
    measured = [p.distinct for p in profiles if p.distinct is not None]
    if len(measured) == len(profiles) and (sums := DistinctSums.of(measured)):
        merged.distinct = sums.against(merged)
    return merged


def _check_mergeable(first: Profile, other: Profile, number: int) -> None:
    where = f"merging profiles, number {number + 1} of them"
    if fingerprint(first.tables) != fingerprint(other.tables):
        if len(first.tables) != len(other.tables):
            raise OperError(
                f"{where}: has {len(other.tables)} tables, and the first {len(first.tables)}"
            )
        one, two = next((a, b) for a, b in zip(first.tables, other.tables, strict=True) if a != b)
        raise OperError(
            f"{where}: table {two.name!r} is {two.describe()}, and in the first "
            f"{one.describe() if one.name == two.name else f'table {one.name!r} is in its place'}; "
            f"profile all parts with the same {option('--tables')}, such as the first part's "
            "profile"
        )
    if _sampled_share(first) != _sampled_share(other):
        raise OperError(
            f"{where}: counts {_sampled_share(other):g} of the samples, and the first "
            f"{_sampled_share(first):g}; profile all parts with the same {option('--sample')}"
        )
    check_same_rows(
        first.numbered_tables(),
        other.numbered_tables(),
        ("the first of the profiles to merge", f"number {number + 1}"),
        f"profile all parts with the first part's profile as {option('--tables')}",
    )


def _sampled_share(profile: Profile) -> float:
    return float(profile.source.get("sampled", {}).get("share", 1.0))


def _merged_source(profiles: Sequence[Profile]) -> dict[str, Any]:
    one = profiles[0]
    sampled = {"sampled": {"share": _sampled_share(one)}} if "sampled" in one.source else {}
    return {"merged": [p.source for p in profiles], **sampled}


def _split(spec: str) -> tuple[Path, int | None]:
    """Split `PROFILE@3` into PROFILE and 3, unless it exists: as a profile, or next to no profile
    of that name."""
    name, at, window = spec.rpartition("@")
    if not at or not _WINDOW.fullmatch(window):
        return Path(spec), None
    whole, marker = Path(spec), MARKER
    hidden = (Path(name) / marker).exists() and not (whole / marker).exists()
    return (Path(name), int(window)) if hidden or not whole.exists() else (whole, None)


def _windows(folder: Path, content: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names of a folder's windows, and their digests."""
    try:
        listed = [(entry["name"], entry["digest"]) for entry in content["windows"]]
        for name, _ in listed:
            if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
                raise ValueError(f"windows: {name!r} is no folder in it")
        if not listed:
            raise ValueError("windows: the list is empty")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder, error) from error
    return listed


def _load_window(
    folder: Path, listed: list[tuple[str, str]], number: int, mmap: bool, check: bool
) -> Profile:
    """Load a window that a folder lists; its neighbours are opened on demand."""
    name, digest = listed[number]
    path = folder / name
    window = _load(path, open_folder(path, FORMAT), folder, mmap, check)
    if digest != window.digest:
        raise OperError(
            f"{path}: is not the window that {folder / MARKER} lists, which has another "
            "digest; copy or write the windows again"
        )
    if number + 1 < len(listed):
        window.open_following = partial(_load_window, folder, listed, number + 1, mmap, check)
    if number:
        window.open_preceding = partial(_load_window, folder, listed, number - 1, mmap, check)
    return window


def _load(
    folder: Path, content: dict[str, Any], vocabulary_folder: Path, mmap: bool, check: bool
) -> Profile:
    try:
        profile = _parse(content)
        described = content["files"]
        files = {name: counter_files(name, described) for name in profile._counters()}
    except (KeyError, TypeError, ValueError, AttributeError, OperError) as error:
        raise _damaged(folder, error) from error
    verify_files(folder, described, digests=check)
    profile.vocabulary_folder = vocabulary_folder
    profile.accesses = load_counters(folder, files["accesses"], profile.rows, mmap)
    check_total(str(folder / files["accesses"][-1]), profile.stored("accesses"))
    profile.samples_with_row = np.zeros(0, profile.stored("accesses").dtype)
    if any(profile.bagged):
        size = int(profile.samples_with_row_offsets[-1])
        profile.samples_with_row = load_counters(folder, files["samples_with_row"], size, mmap)
        check_total(str(folder / files["samples_with_row"][-1]), profile.stored("samples_with_row"))
    if BAG_LENGTHS in described:
        profile.bag_lengths = _load_bag_lengths(folder, content, len(profile.tables))
    if f"{HELD_OUT}/{MARKER}" in described:
        profile.open_following = partial(_load_inner, HELD_OUT, folder, profile, mmap)
        profile.holds_out = True
    if f"{FIRST_PART}/{MARKER}" in described:
        profile.open_first_part = partial(_load_first_part, folder, profile, mmap)
    return profile


def _load_bag_lengths(folder: Path, content: dict[str, Any], tables: int) -> BagLengths:
    pairs = load_array(folder / BAG_LENGTHS, mmap=False)
    distinct = content.get("distinct_in_bags")
    try:
        if not isinstance(distinct, list) or len(distinct) != tables:
            raise ValueError(f"{MARKER} has no distinct_in_bags of {tables:,} tables")
        if any(type(rows) is not int or not 0 <= rows <= 1 << 62 for rows in distinct):
            raise ValueError(f"{MARKER}: distinct_in_bags are not numbers of rows")
        return BagLengths.checked(pairs, np.array(distinct, dtype=np.int64))
    except ValueError as error:
        raise OperError(
            f"{folder / BAG_LENGTHS}: is damaged ({error}); copy or write the profile again"
        ) from error


def _load_inner(name: str, folder: Path, profile: Profile, mmap: bool) -> Profile:
    """Load the part of a profile in the folder `name` below its own. The profile's marker lists its
    files, so they are as intact as the profile's."""
    path = folder / name
    part = _load(path, open_folder(path, FORMAT), folder, mmap, check=False)
    if fingerprint(part.tables) != fingerprint(profile.tables):
        raise OperError(
            f"{path}: expected the tables of {folder}, got other tables; copy or write the profile "
            "again"
        )
    return part


def _load_first_part(folder: Path, profile: Profile, mmap: bool) -> Profile:
    """Load the first part of a window."""
    first = _load_inner(FIRST_PART, folder, profile, mmap)
    if first.samples >= profile.samples or (first.accesses > profile.accesses).any():
        raise OperError(
            f"{folder / FIRST_PART}: expected the first part of {folder}, got other counts; copy "
            "or write the profile again"
        )
    return first


def _parse(content: dict[str, Any]) -> Profile:
    """Return the profile that a marker describes, without its counters."""
    entries = content["tables"]
    tables = tuple(
        Table.from_dict({k: v for k, v in entry.items() if k != "bagged"}) for entry in entries
    )
    if fingerprint(tables) != content["fingerprint"]:
        raise ValueError("the tables are not those that were counted")
    distinct, samples = content["distinct"], content["samples"]
    if type(samples) is not int or not 1 <= samples <= 1 << 62:
        raise ValueError(f"samples: expected 1 to 2^62, got {samples!r}")
    profile = Profile(
        tables,
        samples,
        np.zeros(0, np.uint32),
        np.zeros(0, np.uint32),
        tuple(bool(entry["bagged"]) for entry in entries),
        None if distinct is None else Distinct.from_dict(distinct),
        dict(content["source"]),
    )
    if profile.distinct is not None and len(profile.distinct.rank_ratio) != len(tables):
        raise ValueError("distinct: not one ratio for each table")
    profile.digest = str(content["digest"])
    return profile


def _damaged(folder: Path, error: Exception) -> OperError:
    return OperError(
        f"{folder / MARKER}: is damaged ({type(error).__name__}: {error}); "
        "copy or write the profile again"
    )


def _digest(profile: Profile, counters: dict[str, str]) -> str:
    """Return the digest of a profile's content; `counters` has by name the SHA-256 of the .npy file
    that dense counters are in, or would be."""
    distinct = profile.distinct
    content = [
        fingerprint(profile.tables),
        profile.samples,
        list(profile.bagged),
        None if distinct is None else distinct.to_dict(),
        {f"{name}.npy": digest for name, digest in counters.items()},
    ]
    if known := [asdict(t.ids.vocabulary) for t in profile.tables if t.ids.vocabulary]:
        content.append(known)
    if profile.bag_lengths is not None:
        bags = profile.bag_lengths
        content.append([npy_sha256(bags.pairs), bags.distinct.tolist()])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
