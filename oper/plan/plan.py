"""Plan: placement of every row, with its predicted cost and certificate; immutable.

On disk a plan is a folder: `plan.json` to read, `layout.safetensors` with the small arrays of the
layout, the bitmaps, codes and counters of listed rows as .npy, and `rank_NNNNN.safetensors` with
the part of the address map that differs between ranks. The folder contains neither times nor paths,
so equal plans have equal bytes.
"""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.display import Summarised
from oper.base.errors import OperError, check_type
from oper.cost.allreduce import Method
from oper.cost.objective import Cost
from oper.cost.step_time import PhaseLatency, StepTime, phase_latencies
from oper.cost.workload import Workload
from oper.files import manifest, storage
from oper.files.overwrite_rules import Format
from oper.files.safetensors_file import load_safetensors, save_safetensors
from oper.plan.certificate import Certificate
from oper.plan.layout import Layout, RankMap, rank_map
from oper.plan.memories import HOST, Memory, PlanningRecord
from oper.plan.plan_file import LogPart, RowKinds, Stated, from_json, to_json, to_json_file
from oper.plan.reference_figures import HeldOut, SimplePlan
from oper.plan.row_codes import marks_of, rows_of_tables
from oper.plan.settings import Limits, PlanSettings
from oper.plan.validate import validate, validate_rank_map
from oper.tables.row_identity import check_same_rows
from oper.tables.table import Table, VocabularyDigest, fingerprint, index_of
from oper.topology.host_tier import host_to_dict
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import relayed
from oper.topology.topology import Topology

if TYPE_CHECKING:
    from oper.logs.table_discovery import Prepared

MARKER = "plan.json"
SCHEMA = "oper.plan"
VERSION = 5
FORMAT = Format(
    MARKER,
    SCHEMA,
    VERSION,
    "plan again with this oper",
    "oper-plan",
    "oper plan PROFILE --topology NAME -o PLAN",
)

# Bytes of a sum per byte of its rows: float32 for rows of 8 bits or more, at least one row.
_MOST_RATIO = 5.0
_LAYOUT_FILE = "layout.safetensors"
# Arrays of the layout that are stored as .npy, to be memory-mapped.
_LARGE = ("bitmap", "codes", "stripe_bitmap", "everywhere_bitmap")
_OPTIONAL = ("stripe_bitmap", "everywhere_bitmap")
# Arrays that exist only with `everywhere_bitmap`, of the layout and of the counts.
_EVERYWHERE = ("everywhere_group", "everywhere_first")
_EVERYWHERE_COUNTS = ("everywhere_accesses", "everywhere_least")
_COMPANIONS = ("vocab", "moves.npy")
_ACCESSES, _SAMPLES_WITH_ROW = "listed_accesses", "listed_samples_with_row"


@dataclass(frozen=True)
class ListedCounts:
    """Counts of the listed rows of T tables in the profile: for each of the C rows with a code, and
    in total for the rows with a mark, which are on all ranks."""

    accesses: NDArray[Any]  # [C]
    samples_with_row: NDArray[Any]  # [C]; `accesses` itself if no table has bags
    everywhere_accesses: NDArray[np.int64]  # [T] of the rows with a mark
    everywhere_least: NDArray[np.int64]  # [T] fewest accesses of one of them; 0: no such row

    @staticmethod
    def of(
        layout: Layout, accesses: NDArray[Any], samples_with_row: NDArray[Any]
    ) -> "ListedCounts":
        """Return the counts for a layout whose listed rows have these counts, [E] each."""
        total, least = np.zeros((2, len(layout.rows)), dtype=np.int64)
        if layout.everywhere_bitmap is None:
            return ListedCounts(accesses, samples_with_row, total, least)
        coded = np.zeros(len(accesses), dtype=bool)
        if len(layout.codes):
            coded = ~marks_of(layout.everywhere_bitmap, layout.bitmap)
        for t, rows in enumerate(rows_of_tables(layout.listed_offset)):
            marked_accesses = accesses[rows]
            if len(layout.codes):
                marked_accesses = marked_accesses[~coded[rows]]
            if len(marked_accesses):
                total[t], least[t] = marked_accesses.sum(dtype=np.int64), marked_accesses.min()
        of_coded = accesses[coded]
        same = samples_with_row is accesses
        return ListedCounts(of_coded, of_coded if same else samples_with_row[coded], total, least)

    @property
    def total_accesses(self) -> int:
        """Accesses of all listed rows."""
        return int(self.accesses.sum(dtype=np.int64)) + int(self.everywhere_accesses.sum())


@dataclass(frozen=True)
class Plan(Summarised):
    """Plan for `tables` on the ranks of `topology`, immutable.

    The runtime acts on `layout` and `allreduce_method`; everything else is stated in the file and
    only shown. Each table is in one of the `memories`; if there are two, the tables of the second
    lie in the hosts' memory, in separate arenas.

    profile: the digest of the profile. asked, limits: the settings requested of the plan, and the
    limits that it keeps (None for a plan that was assembled by hand). whole_certificate: of several
    memories together. partition_floor: [P] fewest accesses of a row in each partition of listed
    rows of the main memory, descending. distinct_ratio: [T, 2] measured over expected distinct rows
    of a rank and of all; None: not measured. log_part: part of the log that was profiled. held_out:
    cost on data that the plan was not made from, if some were held out. simple_plans: costs of
    whole tables and of equal slices. pooled_tables: names of the tables whose rows travel between
    nodes as sums of bags, sorted into the order of `tables`. vector_ratio: the bytes of those sums
    from each node per byte of the rows that they sum, with which the plan is priced. step_time: the
    predicted step, by phase, with the phases of the hosts' tables last; None for a plan that was
    assembled by hand. unread_step_seconds: the step if a tenth of the reads went to rows that the
    profile never read; None if later data are known, or the profile read all rows. seconds: spent
    on each step of planning; empty for a plan from a folder. companions: each writes further files
    into the plan's folder, such as vocabularies and moves. read_vocabularies: reads those of the
    tables; None for a plan that was assembled by hand.
    """

    tables: tuple[Table, ...]
    topology: Topology
    workload: Workload
    layout: Layout
    counts: ListedCounts
    memories: tuple[Memory, ...]
    samples: int
    profile: str
    asked: PlanSettings = field(default_factory=PlanSettings)
    limits: Limits | None = None
    whole_certificate: Certificate | None = None
    partition_floor: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    distinct_ratio: NDArray[np.float64] | None = None
    log_part: dict[str, Any] = field(default_factory=dict)
    held_out: HeldOut | None = None
    simple_plans: tuple[SimplePlan, ...] = ()
    pooled_tables: tuple[str, ...] = ()
    vector_ratio: tuple[float, ...] | None = None
    step_time: StepTime | None = None
    unread_step_seconds: float | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    companions: tuple[Callable[[Path], None], ...] = field(default=(), compare=False, repr=False)
    read_vocabularies: "Callable[[], Prepared] | None" = field(
        default=None, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.pooled_tables:
            object.__setattr__(self, "pooled_tables", self._in_order(self.pooled_tables))

    def _in_order(self, pooled: Sequence[str]) -> tuple[str, ...]:
        """Return the names of pooled tables in the order of the tables; raise OperError if one
        cannot be pooled."""
        numbers = {self.table_index(name) for name in pooled}
        if cached := sorted(numbers.intersection(self.tier)):
            raise OperError(
                f"table {self.tables[cached[0]].name!r}: is in the hosts' memory, whose rows are "
                "cached, and pooled tables have theirs on devices: take it out of the tier, or do "
                "not pool it"
            )
        return tuple(self.tables[number].name for number in sorted(numbers))

    def __repr__(self) -> str:
        rows = sum(table.rows for table in self.tables)
        return (
            f"<Plan of {rows:,} rows of {len(self.tables)} tables on {self.ranks} ranks "
            f"({self.topology.name}) for {self.workload.mode}>"
        )

    @staticmethod
    def load(folder: Path | str, tables: Sequence[Table] | None = None) -> "Plan":
        """Read a plan, with its large arrays memory-mapped; verify sizes and digests of all files.

        Raise OperError if the folder is not a plan of this version, is incomplete or damaged, or is
        for other tables than `tables`, if those are given.
        """
        return _load(folder, tables)

    @property
    def ranks(self) -> int:
        return self.topology.ranks

    @cached_property
    def cost(self) -> Cost:
        """Predicted cost of an iteration, which reads the tables of all memories: times and traffic
        of all memories, bytes of the devices' memory."""
        cost = self.memories[0].cost
        for memory in self.memories[1:]:
            cost = cost.beside(memory.cost, self.topology.is_one_memory)
        return cost

    @property
    def feasible(self) -> bool:
        """True if every rank holds at most its capacity, in each memory."""
        return all(memory.cost.feasible for memory in self.memories)

    @property
    def main(self) -> Memory:
        """The devices' memory, or the hosts' if it has all tables."""
        return next((memory for memory in self.memories if memory.tables), self.memories[0])

    def memory_of(self, table: int) -> Memory:
        """Return the memory that a table is in."""
        return next(memory for memory in self.memories if table in memory.tables)

    @property
    def certificate(self) -> Certificate | None:
        """Bound on the distance from the best plan; None for a plan that was assembled by hand."""
        return self.whole_certificate or self.main.certificate

    @property
    def record(self) -> PlanningRecord | None:
        """Record of the placement of the rows in the main memory."""
        return self.main.record

    @property
    def cost_topology(self) -> Topology:
        """Topology with which the plan is priced: that of pooled tables if it is priced by their
        vectors, and with relays between nodes."""
        topology = relayed(self.topology, self.workload.fetch == "distinct")
        if self.vector_ratio is None:
            return topology
        ratio, training = np.array(self.vector_ratio), self.workload.training
        tables = None if self.workload.fetch == "pooled" else frozenset(self.pooled_tables)
        return PooledTopology.of(topology, ratio, float(ratio.min()), training, tables)

    @property
    def phase_latencies(self) -> dict[str, PhaseLatency]:
        """Fixed work of a step, by phase."""
        pooled = np.array([table.name in self.pooled_tables for table in self.tables])
        width = self.layout.width_of_table
        widths = len(np.unique(width[~pooled])), len(np.unique(width[pooled]))
        return phase_latencies(self.topology, self.workload, *widths)

    @property
    def allreduce_method(self) -> Method:
        """AllReduce method of the replicas' gradients."""
        return self.memories[0].cost.allreduce_method

    @property
    def owner_accesses(self) -> Ints:
        """Accesses in the profile to rows with one holder, by that rank, [M]."""
        return np.asarray(np.sum([memory.owner_accesses for memory in self.memories], axis=0))

    @property
    def replica_accesses(self) -> int:
        """Accesses in the profile to rows that several ranks hold."""
        return sum(memory.replica_accesses for memory in self.memories)

    @property
    def host(self) -> Memory | None:
        """The hosts' memory, if tables lie there: the tier."""
        return next((memory for memory in self.memories if memory.name == HOST), None)

    @property
    def tier(self) -> tuple[int, ...]:
        """The numbers of the tables in the hosts' memory, ascending."""
        return () if self.host is None else self.host.tables

    @property
    def tier_names(self) -> list[str]:
        """The names of the tables in the hosts' memory."""
        return [self.tables[t].name for t in self.tier]

    def to_json(self) -> dict[str, Any]:
        """Return the figures of the plan for `oper plan --json` and `oper plan show --json`."""
        certificate = {} if self.certificate is None else to_json(self.certificate)
        record = {} if self.record is None else to_json(self.record)
        certificate.pop("objective_seconds", None)
        return {
            "mode": self.workload.mode,
            "fetch": self.workload.fetch,
            "pooled_tables": list(self.pooled_tables),
            "batch_size": self.workload.batch_size,
            "ranks": self.ranks,
            "rows": int(self.layout.rows.sum()),
            "asked": to_json(self.asked),
            "limits": to_json(self.limits),
            **to_json(self.cost),
            "feasible": self.feasible,
            "status": "ok" if self.feasible else "infeasible",
            **certificate,
            "held_out": to_json(self.held_out),
            "simple_plans": to_json(self.simple_plans),
            "step_time": to_json(self.step_time),
            "unread_step_seconds": self.unread_step_seconds,
            **record,
            "tier": self.tier_names,
            "memories": [{"name": memory.name, **to_json(memory.cost)} for memory in self.memories]
            if self.host
            else [],
        }

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the content of plan.json without the digests of its files: tables,
        profile, topology, settings, costs and sizes. Equal plans have equal digests."""
        return manifest.content_digest(to_json_file(self._stated()))

    def table_index(self, name: str) -> int:
        """Return the number of the table called `name`; raise OperError if there is none."""
        return index_of(self.tables, name, "the plan")

    def get_plan_for_module(self, module_path: str) -> None:
        """Raise OperError: TorchRec's DistributedModelParallel calls this method of its `plan`."""
        raise OperError(
            "DistributedModelParallel: expected a plan in TorchRec's form, got one of OPER's; pass "
            "plan=oper.torchrec_plan(plan, model)"
        )

    def prepared(self) -> "Prepared":
        """Return the tables with their vocabularies, to read a log by the plan's rules.

        Raises OperError if a table's ids need a vocabulary that the plan does not have.
        """
        from oper.logs.table_discovery import Prepared  # needs pyarrow, unlike training

        if self.read_vocabularies is None:
            return Prepared.load(self.tables, None)
        prepared, names = self.read_vocabularies(), {table.name for table in self.tables}
        return replace(prepared, tables=tuple(t for t in prepared.tables if t.name in names))

    def numbered_tables(self) -> tuple[Table, ...]:
        """Return the tables with the digests of their vocabularies, as far as these are known."""
        from oper.logs.table_discovery import numbered_tables

        return numbered_tables(self.tables, self.prepared)

    def vocabulary_start(self, table: str, values: int) -> VocabularyDigest | None:
        """Return the digest of the first values of a table's vocabulary, if that is known."""
        return self.prepared().vocabulary_start(table, values)

    def save(self, folder: Path | str, overwrite: bool = False) -> None:
        """Write the plan, the maps of all ranks, and its companions, completely or not at all.

        `overwrite` replaces an existing plan, if its folder has no other files.
        """
        check_type("Plan.save", "folder", folder, Path, str)
        with storage.atomic_folder(folder, FORMAT, overwrite) as temporary:
            self._write_arrays(temporary)
            for write in self.companions:
                write(temporary)
            header = {"schema": SCHEMA, "version": VERSION}
            files = {"files": manifest.describe_files(temporary)}
            manifest.write_manifest(
                temporary, FORMAT, header | to_json_file(self._stated()) | files
            )

    def _write_arrays(self, folder: Path) -> None:
        arrays = {
            f.name: getattr(self.layout, f.name)
            for f in fields(Layout)
            if f.name not in (*_LARGE, "orders", *_EVERYWHERE)
        }
        arrays |= {f"order_{n:05d}": order for n, order in enumerate(self.layout.orders)}
        arrays["partition_floor"] = self.partition_floor
        if self.layout.everywhere_bitmap is not None:
            arrays |= {name: getattr(self.layout, name) for name in _EVERYWHERE}
            arrays |= {name: getattr(self.counts, name) for name in _EVERYWHERE_COUNTS}
        save_safetensors(folder / _LAYOUT_FILE, arrays)
        large = {name: getattr(self.layout, name) for name in _LARGE}
        large[_ACCESSES] = self.counts.accesses
        if self.counts.samples_with_row is not self.counts.accesses:
            large[_SAMPLES_WITH_ROW] = self.counts.samples_with_row
        with ThreadPoolExecutor() as pool:
            written = [
                pool.submit(storage.save_array, folder / f"{name}.npy", array)
                for name, array in large.items()
                if array is not None
            ]
            for rank in range(self.ranks):
                of_rank = rank_map(self.layout, rank)
                content = {"group_base": of_rank.group_base, "stripe_base": of_rank.stripe_base}
                save_safetensors(folder / rank_file(rank), content)
            for job in written:
                job.result()

    def _stated(self) -> Stated:
        layout = self.layout
        rows, listed = int(layout.rows.sum()), layout.listed
        hosts = {} if self.host is None else host_to_dict(self.topology)
        ratio = self.distinct_ratio
        return Stated(
            fingerprint=fingerprint(self.tables),
            profile=self.profile,
            samples=self.samples,
            log_part=cast(LogPart, self.log_part),
            workload=self.workload,
            asked=self.asked,
            limits=self.limits,
            distinct_ratio=None
            if ratio is None
            else [(own, of_all) for own, of_all in ratio.tolist()],
            certificate=self.whole_certificate,
            held_out=self.held_out,
            simple_plans=self.simple_plans,
            memories=self.memories,
            rows=RowKinds(rows, listed, rows - listed, listed - len(layout.codes)),
            arena_slots=layout.slots.tolist(),
            topology=self.topology.to_dict() | hosts,
            tables=[table.to_dict() for table in self.tables],
            pooled_tables=self.pooled_tables,
            vector_ratio=self.vector_ratio,
            step_time=self.step_time,
            unread_step_seconds=self.unread_step_seconds,
        )


def plan_given(function: str, name: str, given: Plan | Path | str) -> Plan:
    """Return the plan that the argument `name` of a public function is, or load it from that
    folder.

    Raise OperError if the argument has another type, or the folder is not a plan.
    """
    check_type(function, name, given, Plan, Path, str)
    return given if isinstance(given, Plan) else Plan.load(given)


def rank_file(rank: int) -> str:
    """Return the name of the file with a rank's map."""
    return f"rank_{rank:05d}.safetensors"


def _load(folder: Path | str, tables: Sequence[Table] | None) -> Plan:
    check_type("Plan.load", "folder", folder, Path, str)
    folder = Path(folder)
    content = manifest.open_folder(folder, FORMAT)
    try:
        manifest.verify_files(folder, content["files"], digests=True)
        plan = _from_json(folder, content)
        stated = content["fingerprint"]
        if fingerprint(plan.tables) == stated:  # else it is refused below
            validate(plan)
            _check_follows(plan, content)
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


def _check_follows(plan: Plan, content: dict[str, Any]) -> None:
    """Raise ValueError if the numbers of rows and slots differ from the layout's, or if tables and
    ranks, written again, differ from the file."""
    stated = replace(plan._stated(), memories=(), simple_plans=())  # not compared, and large
    again = to_json(stated)
    for name in ("rows", "arena_slots", "topology", "tables", "pooled_tables"):
        if content.get(name) != again.get(name):
            raise ValueError(f"Expected what follows from the rest of the plan - at `$.{name}`")
    _check_pooled(plan)


def _check_pooled(plan: Plan) -> None:
    """Raise ValueError if a plan for pooled fetches does not pool its tables, or lacks valid bytes
    of their sums per node."""
    ratio, names = plan.vector_ratio, tuple(table.name for table in plan.tables)
    pooled = plan.workload.fetch == "pooled"
    if pooled and plan.pooled_tables != names:
        raise ValueError("Expected all tables, as fetches are pooled - at `$.pooled_tables`")
    if (pooled and ratio is None) or (ratio is not None and not plan.pooled_tables):
        raise ValueError(
            "Expected a ratio for pooled fetches, and none for others - at `$.vector_ratio`"
        )
    if ratio is None:
        return
    if len(ratio) != plan.topology.nodes or not all(
        0 < bytes_per_byte < _MOST_RATIO for bytes_per_byte in ratio
    ):
        raise ValueError("Expected a positive number for each node - at `$.vector_ratio`")


def load_rank_map(folder: Path | str, rank: int, layout: Layout) -> RankMap:
    """Load the map of one rank from its file; raise OperError if it does not fit the layout."""
    path = Path(folder) / rank_file(rank)
    content = load_safetensors(path)
    arrays = (content.get("group_base"), content.get("stripe_base"))
    rank_map = RankMap(rank, *arrays)  # type: ignore[arg-type]
    try:
        validate_rank_map(rank_map, layout)
    except ValueError as error:
        raise OperError(f"{path}: is damaged ({error}); make the plan again") from error
    return rank_map


def _from_json(folder: Path, content: dict[str, Any]) -> Plan:
    arrays = load_safetensors(folder / _LAYOUT_FILE)
    partition_floor = arrays.pop("partition_floor")
    orders = tuple(arrays.pop(name) for name in sorted(arrays) if name.startswith("order_"))

    def large(name: str, optional: bool = False) -> Any:
        file = f"{name}.npy"
        if optional and file not in content["files"]:
            return None
        content["files"][file]  # KeyError, reported as damage, if the marker does not list it
        return storage.load_array(folder / file)

    accesses, samples_with_row = large(_ACCESSES), large(_SAMPLES_WITH_ROW, optional=True)
    none = np.zeros(len(content["tables"]), dtype=np.int64)
    together = {name: arrays.pop(name, none) for name in _EVERYWHERE_COUNTS}
    topology = Topology.from_dict(content["topology"], str(folder / MARKER))
    stated = from_json(content, topology.ranks)
    ratio = stated.distinct_ratio
    tables = tuple(Table.from_dict(t) for t in stated.tables)
    plan = Plan(
        tables=tables,
        topology=topology,
        workload=stated.workload,
        layout=Layout(
            **arrays, orders=orders, **{name: large(name, name in _OPTIONAL) for name in _LARGE}
        ),
        counts=ListedCounts(
            accesses, accesses if samples_with_row is None else samples_with_row, **together
        ),
        memories=stated.memories,
        samples=stated.samples,
        profile=stated.profile,
        asked=stated.asked,
        limits=stated.limits,
        whole_certificate=stated.certificate,
        held_out=stated.held_out,
        simple_plans=stated.simple_plans,
        step_time=stated.step_time,
        unread_step_seconds=stated.unread_step_seconds,
        partition_floor=partition_floor,
        distinct_ratio=None if ratio is None else np.array(ratio, dtype=np.float64),
        log_part=dict(stated.log_part),
        companions=tuple(_copied(folder, name) for name in _COMPANIONS if (folder / name).exists()),
        read_vocabularies=partial(_read_vocabularies, folder, tables),
    )
    try:
        return replace(plan, pooled_tables=stated.pooled_tables, vector_ratio=stated.vector_ratio)
    except OperError as error:
        raise ValueError(f"{error} - at `$.pooled_tables`") from error


def _read_vocabularies(folder: Path, tables: Sequence[Table]) -> "Prepared":
    """Read the vocabularies of a plan's tables from its folder."""
    from oper.logs.table_discovery import Prepared

    return Prepared.load(tables, folder)


def _copied(folder: Path, name: str) -> Callable[[Path], None]:
    """Return a function that copies the companion file `name` of a plan's folder into another."""
    kept = folder / name

    def write(into: Path) -> None:
        if kept.is_dir():
            shutil.copytree(kept, into / name)
        else:
            shutil.copyfile(kept, into / name)

    return write


def _check_tables(folder: Path, planned: Sequence[Table], given: Sequence[Table]) -> None:
    if fingerprint(planned) == fingerprint(given):
        names = str(folder), "the tables given"
        check_same_rows(planned, given, names, "make a plan for these tables")
        return
    if len(planned) != len(given):
        raise OperError(
            f"{folder}: is a plan for {len(planned)} tables, and {len(given)} were given; "
            "make a plan for these tables"
        )
    for table, other in zip(planned, given, strict=True):
        if fingerprint([table]) != fingerprint([other]):
            raise OperError(
                f"{folder}: is a plan for table {table.name!r}, {table.describe()}, and table "
                f"{other.name!r}, {other.describe()}, was given instead; "
                "make a plan for these tables"
            )
