"""Mutated files of every format through every reader, in this process.

    python -m scripts.fuzz.files [--count N] [--seed S] [--kind NAME]

Each seed damages one small valid file and reads it as commands do. In folders of plans and profiles
every other time the marker is made to agree with the damaged file, so that the code after the
comparison of digests is reached. The exit status is 1 if any outcome is neither success nor an
OperError of one line.
"""

import argparse
import contextlib
import gzip
import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from oper.analysis.plan_differences import diff
from oper.analysis.row_facts import explain
from oper.base import process_signals
from oper.checker.check import check
from oper.checkpoint import marker as markers
from oper.checkpoint.describe import describe
from oper.checkpoint.export import export
from oper.checkpoint.reshard import reshard
from oper.checkpoint.soundness import open_chain
from oper.checkpoint.verify import verify
from oper.cost.objective import Communication
from oper.cost.workload import Workload
from oper.files.manifest import describe_files, write_manifest
from oper.files.overwrite_rules import Format
from oper.logs import LogOptions, open_log, prepare
from oper.logs.row_reader import RowReader
from oper.monitoring.period_report import PeriodReport
from oper.monitoring.traffic import Traffic
from oper.plan import plan as plans
from oper.plan.address_map import AddressMap
from oper.plan.plan_parts import part_of, plans_of_memories
from oper.plan.reference_figures import HeldOutSource
from oper.plan.row_moves import RowMoves
from oper.plan.settings import PlanSettings
from oper.planner.make_placement import make_placement
from oper.planner.make_plan import make_plan
from oper.planner.replan.judgement import Candidate, Choice, Judgement
from oper.planner.replan.replan import replan
from oper.profiling import profile as profiles
from oper.profiling.counting import CountOptions, count, provenance
from oper.profiling.profile import Profile, window_name, write_windows
from oper.profiling.profile_summary import summarise
from oper.profiling.sampling import Sampling
from oper.profiling.windows import TimeWindows
from oper.tables.table import IdRule, Table
from oper.tables.table_file import load_tables
from oper.topology.topology import Topology
from scripts.fuzz.mutations import mutated
from scripts.fuzz.outcome import Outcomes, report

_NUMBERS = (-1, 0, 1, 2**40, 2**63, 10**30, 0.5, 1e308)
Read = Callable[[Path], object]


def main() -> None:
    """Start a process that reads, and another one after each crash."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind")
    parser.add_argument("--child", type=Path, help="the log of a process that this one started")
    asked = parser.parse_args()
    if asked.child is not None:
        fuzz(asked.child, asked.count, asked.seed, asked.kind)
        return
    # A signal ends the process that reads too, and removes the files.
    with process_signals.raised(), tempfile.TemporaryDirectory() as folder:
        log, end, seed = Path(folder) / "log", asked.seed + asked.count, asked.seed
        log.touch()
        while seed < end:
            command = [sys.executable, "-m", "scripts.fuzz.files", "--child", str(log)]
            command += ["--seed", str(seed), "--count", str(end - seed)]
            command += [] if asked.kind is None else ["--kind", asked.kind]
            status = subprocess.run(command, check=False).returncode
            lines = log.read_text(encoding="utf-8").splitlines()
            if status == 0:
                break
            if not lines or lines[-1].count("\t") == 3:
                sys.exit("the process that reads does not start")
            lines[-1] += f"crashed\tstatus {status}"
            log.write_text("\n".join([*lines, ""]), encoding="utf-8")
            seed = int(lines[-1].split("\t")[0]) + 1
        counts, defects = report(log)
    print("\n".join([counts, *defects]))
    sys.exit(1 if defects else 0)


def fuzz(log: Path, number: int, first: int, kind: str | None = None) -> None:
    """Damage and read `number` files, seeds `first` on; the outcomes go to the log."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=log.parent) as made:
        folder = Path(made)
        logs, folders = _logs(folder / "logs"), _folders(folder / "folders")
        names = [n for n in (*logs, *_TEXT_FILES, *folders) if kind in (None, n)]
        for name in names:
            _check_valid(name, logs, folders, folder / "valid")
        outcomes = Outcomes(log)
        for seed in range(first, first + number):
            name = names[seed % len(names)]
            rng = random.Random(seed)
            scratch = folder / "damaged"
            shutil.rmtree(scratch, ignore_errors=True)
            if name in folders:
                read = _damaged_folder(folders[name], scratch, rng)
            else:
                read = _damaged_file(name, logs, scratch, rng)
            outcomes.of(name, seed, read)


def _check_valid(name: str, logs: dict[str, Path], folders: Any, scratch: Path) -> None:
    """Read the undamaged file, which must succeed."""
    if name in folders:
        folders[name][2](folders[name][0])
    elif name in logs:
        _count(logs[name], None, False)
    else:
        scratch.mkdir(exist_ok=True)
        (scratch / name).write_text(_TEXT_FILES[name][0])
        _TEXT_FILES[name][1](scratch / name)


def _damaged_file(
    name: str, logs: dict[str, Path], scratch: Path, rng: random.Random
) -> Callable[[], object]:
    scratch.mkdir()
    if name in _TEXT_FILES:
        path = scratch / name
        text, read = _TEXT_FILES[name]
        path.write_bytes(mutated(text.encode(), rng))
        return lambda: read(path)
    path = scratch / logs[name].name
    path.write_bytes(mutated(logs[name].read_bytes(), rng))
    ids = rng.choice((None, None, "dense", "hash", "vocab"))
    return lambda: _count(path, ids, rng.random() < 0.3)


def _count(path: Path, ids: Any, skip: bool) -> None:
    jagged = ("item",) if path.name.startswith("jagged") else ()
    options = LogOptions(
        values=jagged,
        lengths=("lengths",) if jagged else (),
        on_bad_id="skip" if skip else "error",
        list_separator="|" if path.name.startswith("bags") else None,
    )
    log = open_log(path, options)
    tables = None
    if ids is not None:
        rows = 0 if ids == "vocab" else 50
        tables = tuple(Table(name, rows, 4, ids=IdRule(ids)) for name in log.features)
    prepared = prepare(log, tables)
    if sum(table.rows for table in prepared.tables) < 50_000_000:
        summarise(count(RowReader(log, prepared), prepared=prepared))


def _damaged_folder(
    kind: tuple[Path, Format, Read], scratch: Path, rng: random.Random
) -> Callable[[], object]:
    folder, form, read = kind
    shutil.copytree(folder, scratch)
    files = sorted(p for p in scratch.rglob("*") if p.is_file())
    # The marker often: it has most of the values that decisions depend on, next to many large
    # arrays.
    file = scratch / form.marker if rng.random() < 0.4 else rng.choice(files)
    if file.name == form.marker and rng.random() < 0.7:
        with contextlib.suppress(RecursionError):
            _edit(file.parent, form, rng)
    else:
        file.write_bytes(mutated(file.read_bytes(), rng))
        if file.name != form.marker and rng.random() < 0.7:
            holder = file.parent if (file.parent / form.marker).exists() else file.parent.parent
            content = json.loads((holder / form.marker).read_text())
            (holder / form.marker).unlink()
            content["files"] = {
                name: described
                for name, described in describe_files(holder).items()
                if "windows" not in content or name.startswith("vocab/")
            }
            write_manifest(holder, form, content)
    return lambda: read(scratch)


def _edit(folder: Path, form: Format, rng: random.Random) -> None:
    """Change or remove a value in a marker, and write the right digest."""
    content = json.loads((folder / form.marker).read_text())
    at: Any = content
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.8:
            at = at[key]
            continue
        values: tuple[Any, ...] = (
            None,
            -1,
            0,
            1,
            2**40,
            2**63,
            10**30,
            0.5,
            1e308,
            "",
            "x",
            True,
            [],
            {},
            [1],
            {"a": 1},
        )
        if rng.random() < 0.1:
            del at[key]
        else:
            at[key] = rng.choice(values)
        break
    write_manifest(folder, form, content)


def _use_part(folder: Path, log: Path) -> None:
    """Use the plan of a part of a log; its check reads that part from the log."""
    _use_plan(folder)
    _quiet("plan", "check", folder, log)


def _use_plan(folder: Path) -> None:
    plan = plans.Plan.load(folder)
    check(folder)
    diff(plan, plan)
    for index, table in enumerate(plan.tables):
        explain(plan, table.name, plan.tables[index].rows - 1)
    for rank in range(plan.ranks):
        AddressMap.load(folder, rank)
    _quiet("plan", "show", folder)
    _quiet("plan", "show", folder, "--json")
    plans_of_memories(plan)
    part_of(plan, [0])
    if (folder / "moves.npy").exists():
        RowMoves.load(folder).bytes_by_link(plan.ranks)


def _use_profile(folder: Path) -> None:
    summarise([Profile.load(folder)])
    _quiet("profiles", "show", folder)
    _quiet("profiles", "show", folder, "--json")


def _use_planned(folder: Path) -> None:
    """Plan for the profile, which prices every class of its rows."""
    opened = Profile.load(folder)
    if opened.rows < 1_000_000:
        workload = Workload("training", "distinct", 64)
        make_placement(opened, Topology.load("cpu:2"), workload, PlanSettings())


def _quiet(*arguments: object) -> None:
    """Run a command in this process, and raise its OperError."""
    from oper import cli

    argv, sys.argv = sys.argv, ["oper", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            cli.command()(prog_name="oper", standalone_mode=False)
    finally:
        sys.argv = argv


def _logs(folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 40, (30, 3))
    lines = [
        "\t".join(["1", *["2"] * 13, *[f"{n:08x}" for n in row]])
        for row in rng.integers(0, 99, (30, 26))
    ]
    csv = "a,b,t\n" + "".join(f"{x},{y},v{z}\n" for x, y, z in ids)
    texts = {
        "criteo.tsv": "\n".join(lines),
        "log.csv": csv,
        "bags.csv": "a,b\n" + "".join(f'{x},"[{y}|{z}]"\n' for x, y, z in ids),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "log.csv.gz").write_bytes(gzip.compress(csv.encode()))
    (folder / "criteo.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    table = pa.table(
        {
            "a": ids[:, 0],
            "u": ids[:, 1].astype(np.uint64),
            "s": [f"v{n}" for n in ids[:, 2]],
            "l": [list(map(int, row)) for row in ids],
            "f": rng.random(30).astype(np.float32),
        }
    )
    pq.write_table(table, folder / "log.parquet", row_group_size=10)
    pq.write_table(table, folder / "plain.parquet", compression="none", use_dictionary=False)
    samples = [{k: v for k, v in row.items() if v != "v7"} for row in table.to_pylist()]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in samples))
    np.savez(folder / "jagged.npz", item=ids.reshape(-1), lengths=np.full(30, 3))
    np.savez_compressed(folder / "jagged_packed.npz", item=ids.reshape(-1), lengths=np.full(30, 3))
    arrays = {"sparse": ids, "dense": rng.random((30, 2)), "labels": np.zeros((30, 1))}
    np.savez(folder / "criteo.npz", allow_pickle=False, **arrays)
    np.save(folder / "matrix.npy", ids)
    offsets = torch.arange(0, 61 * 3 + 1, 3)
    request = (torch.from_numpy(rng.integers(0, 40, 183)), offsets, torch.full((1, 61), 3))
    torch.save(request, folder / "request.pt")
    torch.save(request, folder / "old.pt", _use_new_zipfile_serialization=False)
    (folder / "request.pt.gz").write_bytes(gzip.compress((folder / "request.pt").read_bytes()))
    return {path.name: path for path in sorted(folder.iterdir())}


def _use_checkpoint(folder: Path) -> None:
    json.dumps(describe(folder).to_json())
    checkpoint = open_chain(folder)
    verify(checkpoint)
    with tempfile.TemporaryDirectory() as place:
        reshard(checkpoint, Path(place) / "other", 3)
        export(checkpoint, "t", Path(place) / "t.safetensors")
        export(checkpoint, "t", Path(place) / "t.parquet")


def _checkpoint(folder: Path) -> Path:
    """Save a checkpoint of a table with a state, a dense tensor and an object."""
    key = "bags.embedding_bags.t.weight"
    state = {
        "model": {key: torch.rand(50, 4), "over.weight": torch.rand(3)},
        "optimizer": {"state": {key: {"t.momentum1": torch.rand(50)}}, "lr": 0.1},
    }
    save_state(state, checkpoint_id=folder / "made", no_dist=True)
    return reshard(folder / "made", folder / "sharded", 2)


def _folders(folder: Path) -> dict[str, tuple[Path, Format, Read]]:
    rng = np.random.default_rng(1)
    tables = (Table("a", 900, 4), Table("b", 60, 8), Table("v", 5, 4, ids=IdRule("vocab")))
    log = folder / "log.parquet"
    folder.mkdir()
    columns = {
        "a": (rng.zipf(1.3, 4000) - 1) % 900,
        "b": [[int(n), int(n) // 2] for n in rng.integers(0, 60, 4000)],
        "v": [f"v{n}" for n in rng.integers(0, 4, 4000)],
    }
    pq.write_table(pa.table(columns | {"t": np.arange(4000)}), log)
    opened = open_log(log, LogOptions(columns=("a", "b", "v")))
    prepared = prepare(opened, tables)
    profile = count(RowReader(opened, prepared), prepared=prepared)[0]
    profile.save(folder / "profile")
    for number in range(2):
        window = folder / "windows" / window_name(number)
        window.mkdir(parents=True)
        replace(profile).write(window, sparse=True)
    shutil.copytree(folder / "profile" / "vocab", folder / "windows" / "vocab")
    write_windows(folder / "windows", [profile, profile])
    workload = Workload("training", "raw", 64)
    settings = PlanSettings(extra_memory=0.02, threshold=0.05, dob=0.5)
    topology = Topology.load("2x2-a100")
    make_plan(profile, topology, workload, settings).save(folder / "plan")
    in_tier = replace(settings, tier=[profile.tables[0].name])
    make_plan(profile, topology, workload, in_tier).save(folder / "tier")
    drifted = Profile(
        profile.tables, profile.samples, profile.accesses[::-1].copy(),
        profile.samples_with_row[::-1].copy(), profile.bagged, vocabularies=prepared,
    )  # fmt: skip
    replan(folder / "plan", drifted, 10**9).plan.save(folder / "replanned")
    part = open_log(log, replace(opened.options, rows="100:", time="t", time_unit="ms"))
    asked = CountOptions(Sampling(0.5), TimeWindows("t", 1.0, "ms"), source=provenance(part))
    of_part = count(RowReader(part, prepared), asked, prepared=prepared)[2]
    make_plan(of_part, topology, workload, settings).save(folder / "part")
    return {
        "plan": (folder / "plan", plans.FORMAT, _use_plan),
        "plan of a part": (folder / "part", plans.FORMAT, lambda made: _use_part(made, log)),
        "plan with a tier": (folder / "tier", plans.FORMAT, _use_plan),
        "replanned": (folder / "replanned", plans.FORMAT, _use_plan),
        "profile": (folder / "profile", profiles.FORMAT, _use_profile),
        "windows": (folder / "windows", profiles.FORMAT, _use_profile),
        "planned profile": (folder / "profile", profiles.FORMAT, _use_planned),
        "checkpoint": (_checkpoint(folder / "checkpoint"), markers.FORMAT, _use_checkpoint),
    }


def _period(number: int) -> str:
    """Return the line that a monitor of two ranks writes for a period."""
    of_ranks, of_links = np.array([9.0, 8.5]), np.array([[0.0, 64.0], [72.5, 0.0]])
    traffic = Traffic(of_ranks, of_links, Communication(136.5, 40.0, 8.0), 0.25)
    steps = (Choice.KEEP, 2e-5), (Choice.REPLAN, 1.5e-5), (Choice.FROM_SCRATCH, 1.4e-5)
    candidates = tuple(Candidate(choice, step, 1e-5, 96.0, 1e-6) for choice, step in steps)
    judged = Judgement(HeldOutSource.THIS_WINDOW, 50, "", 10_000, 0.05, candidates)
    figures = (1.8e9, 50, 50, 5, 60, 180, 12)
    return PeriodReport(number, *figures, traffic, traffic, judged, "").line()


_TEXT_FILES: dict[str, tuple[str, Read]] = {
    "run.jsonl": (_period(0) + _period(1), lambda path: _quiet("top", path)),
    "tables.yaml": (
        "defaults: &d {dim: 8, dtype: fp32}\ntables:\n- {name: a, rows: 40, <<: *d}\n"
        "- name: b\n  rows: 9\n  ids: {kind: hash, missing: -1}\n  features: [x, y]\n",
        lambda path: load_tables(path),
    ),
    "tables.json": (
        '{"tables": [{"name": "a", "rows": 40, "dim": 8}, {"name": "b", "rows": 7, '
        '"ids": "hash"}]}',
        lambda path: load_tables(path),
    ),
    "topology.yaml": (
        "name: x\nnode_of: [0, 0, 1, 1]\nallreduce_bandwidth: 10GB/s\nlatency_seconds: 1.0e-6\n"
        "bandwidth: {local: 1.0e+12, same_node: 240GB/s, other_node: 19GB/s}\n"
        "capacity: [64GB, 64GB, 2.5, 3]\ndevice_memory: 80GB\n"
        "host_memory: 1TB\nhost_bandwidth: [25GB/s, 25e9, 1, 2.5e10]\n",
        lambda path: Topology.load(str(path)),
    ),
    "matrix.yaml": (
        "node_of: [0, 1]\nallreduce_bandwidth: 1.0e+9\n"
        "link_cost: [[1.0e-9, 2.0e-9], [2e-9, 1.0e-9]]\n",
        lambda path: Topology.load(str(path)),
    ),
}


if __name__ == "__main__":
    main()
