"""Plan: the placement of every row, its predicted cost and its certificate; immutable.

On disk a plan is a folder: `plan.json` to read, `layout.safetensors` with the small arrays of the
layout, the bitmaps, codes and counters of listed rows as .npy, and `rank_NNNNN.safetensors` with
the part of the address map that differs between ranks. There are no times and no paths in it, so
that equal plans have equal bytes.
"""

import importlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.display import Summarised, Summary
from oper.base.errors import OperError, check_type
from oper.base.formatting import format_bytes, format_duration, format_gap, format_share
from oper.cost.allreduce import Method
from oper.cost.workload import Workload
from oper.files import manifest, storage
from oper.files.overwrite_rules import Format
from oper.files.safetensors_file import load_safetensors, save_safetensors
from oper.plan.layout import Layout, RankMap, rank_map
from oper.plan.prediction import PlanningRecord, PlanParts, Prediction
from oper.plan.row_codes import marks_of, rows_of_tables
from oper.plan.stated_figures import check_stated
from oper.plan.validate import validate, validate_rank_map
from oper.tables.table import Table, fingerprint, index_of
from oper.topology.host_tier import host_to_dict
from oper.topology.topology import Topology

MARKER = "plan.json"
SCHEMA = "oper-plan"
VERSION = 2
FORMAT = Format(MARKER, SCHEMA, VERSION)

_LAYOUT_FILE = "layout.safetensors"
_NAMES_IN_FILE = {"source": "path"}  # of the layout's arrays that are called otherwise there
_OPTIONAL = ("stripe_bitmap", "explicit_containing", "everywhere_bitmap")
# Of the layout: as .npy, to be memory-mapped.
_LARGE = ("bitmap", "codes", "stripe_bitmap", "everywhere_bitmap")
# Only with `everywhere_bitmap`: of the layout, and of the counts.
_EVERYWHERE = ("everywhere_group", "everywhere_first")
_EVERYWHERE_COUNTS = ("everywhere_accesses", "everywhere_least")


@dataclass(frozen=True)
class ListedCounts:
    """What the profile counted of the listed rows of T tables: of each of the C rows with a code,
    and of those with a mark, which are on all ranks, what they are together."""

    accesses: NDArray[Any]  # [C]
    samples_with_row: NDArray[Any]  # [C]; `accesses` itself where no table has bags
    everywhere_accesses: NDArray[np.int64]  # [T] of the rows with a mark
    everywhere_least: NDArray[np.int64]  # [T] fewest accesses of one of them; 0: there is none

    @staticmethod
    def of(
        layout: Layout, accesses: NDArray[Any], samples_with_row: NDArray[Any]
    ) -> "ListedCounts":
        """Of a layout whose listed rows have these counts, [E] each."""
        total, least = np.zeros((2, len(layout.rows)), dtype=np.int64)
        if layout.everywhere_bitmap is None:
            return ListedCounts(accesses, samples_with_row, total, least)
        marked = marks_of(layout.everywhere_bitmap, layout.bitmap)
        for t, rows in enumerate(rows_of_tables(layout.listed_offset)):
            found = accesses[rows][marked[rows]]
            if len(found):
                total[t], least[t] = found.sum(dtype=np.int64), found.min()
        coded = accesses[~marked]
        same = samples_with_row is accesses
        return ListedCounts(coded, coded if same else samples_with_row[~marked], total, least)

    @property
    def total_accesses(self) -> int:
        """Accesses of all listed rows."""
        return int(self.accesses.sum(dtype=np.int64)) + int(self.everywhere_accesses.sum())


@dataclass(frozen=True)
class Plan(Summarised):
    """A plan for `tables` on the ranks of `topology`.

    `layout` and `allreduce_method` are what the runtime acts on; `prediction` and `record` are
    written under "figures" and only shown. `owner_accesses` [M] are the accesses in the profile to
    rows that one rank alone holds, by that rank, and `replica_accesses` the rest. Tables of the
    `tier` lie in the hosts' memory, in arenas of their own; `prediction` is of all tables together,
    and `record` and `partitions` are of those on devices, or of the tier's where it has all.
    """

    tables: tuple[Table, ...]
    topology: Topology
    workload: Workload
    layout: Layout
    counts: ListedCounts
    owner_accesses: NDArray[np.int64]
    replica_accesses: int
    samples: int
    profile: str  # digest of the profile
    allreduce_method: Method  # of the replicas' gradients
    prediction: Prediction
    record: PlanningRecord
    # [P] fewest accesses of a row in each partition of listed rows, descending.
    partition_floor: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    certificate: dict[str, Any] = field(default_factory=dict)
    partitions: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    # [T, 2] measured over expected distinct rows of a rank and of all; None: not measured.
    distinct_ratio: NDArray[np.float64] | None = None
    log_part: dict[str, Any] = field(default_factory=dict)  # that was profiled; {}: all, or unknown
    tier: tuple[int, ...] = ()  # the numbers of its tables, ascending
    parts: PlanParts | None = None  # None without a tier

    def __repr__(self) -> str:
        rows = sum(table.rows for table in self.tables)
        return (
            f"<Plan of {rows:,} rows of {len(self.tables)} tables on {self.ranks} ranks "
            f"({self.topology.name}) for {self.workload.mode}>"
        )

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    def summary(self) -> Summary:
        """What notebooks and rich show: the prediction, the certificate, and the ranks."""
        figures, gap = self.prediction, self.certificate.get("certified_gap")
        return Summary(
            repr(self)[1:-1],
            (
                ("predicted iteration", format_duration(figures.objective_seconds)),
                ("from optimal, at most", "not known" if gap is None else format_gap(gap)),
                ("extra memory", format_share(figures.extra_memory_ratio)),
            ),
            ("rank", "memory", "iteration"),
            [
                (str(rank), format_bytes(held), format_duration(seconds))
                for rank, (held, seconds) in enumerate(
                    zip(figures.memory_bytes, figures.rank_seconds, strict=True)
                )
            ],
        )

    def report(self, path: Path | str, **material: Any) -> list[str]:
        """Write a page that explains the plan: `oper.report.write_report.write_report`, which says
        what may be given by name."""
        # By its name: reports stand above plans, and this is a short way there from a notebook.
        write: Any = importlib.import_module("oper.report.write_report").write_report
        missing: list[str] = write(self, path, **material)
        return missing

    def figures_to_json(self) -> dict[str, Any]:
        """The prediction and the planning record as plan.json and `oper plan show --json` have
        them."""
        return {
            "mode": self.workload.mode,
            "fetch": self.workload.fetch,
            "batch_size": self.workload.batch_size,
            "ranks": self.ranks,
            "rows": int(self.layout.rows.sum()),
            "threshold": self.record.threshold,
            **self.prediction.to_json(self.allreduce_method),
            "status": self.prediction.status,
            **self.record.to_json(),
            **({} if self.parts is None else {"parts": self.parts.to_json()}),
        }

    @property
    def tier_names(self) -> list[str]:
        """The names of the tables in the tier."""
        return [self.tables[t].name for t in self.tier]

    def table_index(self, name: str) -> int:
        """The number of the table called `name`; OperError where there is none."""
        return index_of(self.tables, name, "the plan")

    def get_plan_for_module(self, module_path: str) -> None:
        """What TorchRec's DistributedModelParallel asks of its `plan`: OperError."""
        raise OperError(
            "DistributedModelParallel was given a plan of OPER's, and its form for TorchRec was "
            "needed: plan=oper.torchrec_plan(plan, model)"
        )

    def save(
        self,
        folder: Path | str,
        also: Sequence[Callable[[Path], None]] = (),
        overwrite: bool = False,
    ) -> None:
        """Write the plan and the maps of all ranks, completely or not at all.

        Each of `also` writes more files into the folder, such as vocabularies or moves.
        `overwrite` replaces an existing plan, if its folder has no other files.
        """
        with storage.atomic_folder(folder, FORMAT, overwrite) as temporary:
            self._write_arrays(temporary)
            for write in also:
                write(temporary)
            content = self._to_json() | {"files": manifest.describe_files(temporary)}
            manifest.write_manifest(temporary, FORMAT, content)

    def _write_arrays(self, folder: Path) -> None:
        arrays = {
            _NAMES_IN_FILE.get(f.name, f.name): getattr(self.layout, f.name)
            for f in fields(Layout)
            if f.name not in (*_LARGE, "orders", *_EVERYWHERE)
        }
        arrays |= {f"order_{n:05d}": order for n, order in enumerate(self.layout.orders)}
        arrays["owner_accesses"] = self.owner_accesses
        arrays["partition_floor"] = self.partition_floor
        if self.layout.everywhere_bitmap is not None:
            arrays |= {name: getattr(self.layout, name) for name in _EVERYWHERE}
            arrays |= {name: getattr(self.counts, name) for name in _EVERYWHERE_COUNTS}
        save_safetensors(folder / _LAYOUT_FILE, arrays)
        large = {name: getattr(self.layout, name) for name in _LARGE}
        large["explicit_accesses"] = self.counts.accesses
        if self.counts.samples_with_row is not self.counts.accesses:
            large["explicit_containing"] = self.counts.samples_with_row
        with ThreadPoolExecutor() as pool:
            written = [
                pool.submit(storage.save_array, folder / f"{name}.npy", array)
                for name, array in large.items()
                if array is not None
            ]
            for rank in range(self.ranks):
                mine = rank_map(self.layout, rank)
                content = {"group_base": mine.group_base, "stripe_base": mine.stripe_base}
                save_safetensors(folder / rank_file(rank), content)
            for job in written:
                job.result()

    def _to_json(self) -> dict[str, Any]:
        layout = self.layout
        part = {"log_part": self.log_part} if self.log_part else {}
        hosts = host_to_dict(self.topology) if self.tier else {}
        marked = layout.everywhere_bitmap is not None
        return {
            "schema": SCHEMA,
            "version": VERSION,
            "produced_by": self.record.step,
            "fingerprint": fingerprint(self.tables),
            "profile": self.profile,
            "samples": self.samples,
            **part,
            "workload": {
                "mode": self.workload.mode,
                "fetch": self.workload.fetch,
                "batch_size": self.workload.batch_size,
            },
            "settings": self.settings,
            "distinct_ratio": (
                None if self.distinct_ratio is None else self.distinct_ratio.tolist()
            ),
            "certificate": self.certificate,
            "figures": self.figures_to_json(),
            "partitions": self.partitions,
            "rows": {
                "total": int(layout.rows.sum()),
                "explicit": layout.listed,
                "striped": int(layout.rows.sum()) - layout.listed,
                **({"everywhere": layout.listed - len(layout.codes)} if marked else {}),
            },
            "owner_accesses": self.owner_accesses.tolist(),
            "replica_accesses": self.replica_accesses,
            "arena_slots": layout.slots.tolist(),
            "topology": self.topology.to_dict() | hosts,
            "tables": [table.to_dict() for table in self.tables],
            **({"tier": self.tier_names} if self.tier else {}),
        }


def rank_file(rank: int) -> str:
    """The name of the file with a rank's map."""
    return f"rank_{rank:05d}.safetensors"


def load_plan(folder: Path | str, tables: Sequence[Table] | None = None) -> Plan:
    """Read a plan, with its large arrays memory-mapped; verifies sizes and digests of all files.

    OperError where the folder is not a plan of this version, is incomplete or damaged, or is for
    other tables than `tables`, where those are given.
    """
    check_type("load_plan", "folder", folder, Path, str)
    folder = Path(folder)
    content = manifest.open_folder(folder, FORMAT)
    try:
        manifest.verify_files(folder, content["files"], digests=True)
        plan = _from_json(folder, content)
        stated = content["fingerprint"]
        if fingerprint(plan.tables) == stated:  # else it is refused below
            validate(plan)
        unlisted = [rank for rank in range(plan.ranks) if rank_file(rank) not in content["files"]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise OperError(
            f"{folder / MARKER}: is damaged ({type(error).__name__}: {error}); copy the plan "
            "or write it again"
        ) from error
    if unlisted:
        raise OperError(
            f"{folder / MARKER}: lists no {rank_file(unlisted[0])}; it was changed: copy the plan "
            "or write it again"
        )
    if fingerprint(plan.tables) != stated:
        raise OperError(
            f"{folder / MARKER}: its tables are not those of its fingerprint; it was changed: "
            "copy the plan or write it again"
        )
    if tables is not None:
        _check_tables(folder, plan.tables, tables)
    return plan


def load_rank_map(folder: Path | str, rank: int, layout: Layout) -> RankMap:
    """The map of one rank, from its file; OperError where it is none of this layout."""
    path = Path(folder) / rank_file(rank)
    content = load_safetensors(path)
    arrays = (content.get("group_base"), content.get("stripe_base"))
    found = RankMap(rank, *arrays)  # type: ignore[arg-type]
    try:
        validate_rank_map(found, layout)
    except ValueError as error:
        raise OperError(f"{path}: is damaged ({error}); make the plan again") from error
    return found


def _from_json(folder: Path, content: dict[str, Any]) -> Plan:
    arrays = load_safetensors(folder / _LAYOUT_FILE)
    owner_accesses = arrays.pop("owner_accesses")
    partition_floor = arrays.pop("partition_floor")
    orders = tuple(arrays.pop(name) for name in sorted(arrays) if name.startswith("order_"))
    for name, in_file in _NAMES_IN_FILE.items():
        arrays[name] = arrays.pop(in_file)

    def large(name: str) -> Any:
        file = f"{name}.npy"
        if name in _OPTIONAL and file not in content["files"]:
            return None
        content["files"][file]  # KeyError, an error of damage, where the marker does not list it
        return storage.load_array(folder / file)

    accesses, samples_with_row = large("explicit_accesses"), large("explicit_containing")
    none = np.zeros(len(content["tables"]), dtype=np.int64)
    together = {name: arrays.pop(name, none) for name in _EVERYWHERE_COUNTS}
    ratio = content["distinct_ratio"]
    topology = Topology.from_dict(content["topology"], str(folder / MARKER))
    check_stated(content, topology.ranks)
    tables = tuple(Table.from_dict(t) for t in content["tables"])
    number = {table.name: n for n, table in enumerate(tables)}
    parts = content["figures"].get("parts")
    return Plan(
        tables=tables,
        topology=topology,
        workload=Workload(**content["workload"]),
        layout=Layout(**arrays, orders=orders, **{name: large(name) for name in _LARGE}),
        counts=ListedCounts(
            accesses, accesses if samples_with_row is None else samples_with_row, **together
        ),
        owner_accesses=owner_accesses,
        replica_accesses=content["replica_accesses"],
        samples=content["samples"],
        profile=content["profile"],
        allreduce_method=content["figures"]["allreduce_method"],
        prediction=Prediction.from_json(content["figures"]),
        record=PlanningRecord.from_json(content["figures"]),
        partition_floor=partition_floor,
        certificate=content["certificate"],
        partitions=content["partitions"],
        settings=content["settings"],
        distinct_ratio=None if ratio is None else np.array(ratio, dtype=np.float64),
        log_part=content.get("log_part", {}),
        tier=tuple(number[name] for name in content.get("tier", ())),
        parts=None if parts is None else PlanParts.from_json(parts),
    )


def _check_tables(folder: Path, planned: Sequence[Table], given: Sequence[Table]) -> None:
    if fingerprint(planned) == fingerprint(given):
        return
    if len(planned) != len(given):
        raise OperError(
            f"{folder}: is a plan for {len(planned)} tables, and {len(given)} were given; "
            "make a plan for these tables"
        )
    for mine, other in zip(planned, given, strict=True):
        if fingerprint([mine]) != fingerprint([other]):
            raise OperError(
                f"{folder}: is a plan for table {mine.name!r}, {mine.describe()}, and table "
                f"{other.name!r}, {other.describe()}, was given instead; "
                "make a plan for these tables"
            )
