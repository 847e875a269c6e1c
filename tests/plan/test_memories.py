"""Plans in two memories that were changed: refused when they are read, or found wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from oper.base.errors import OperError
from oper.checker.check import check
from oper.checker.replay import replay
from oper.cost.objective import Cost
from oper.cost.workload import Workload
from oper.files.manifest import describe_files, write_manifest
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan.memories import HOST, Memory
from oper.plan.plan import FORMAT, MARKER, Plan, rank_file
from oper.plan.plan_parts import plans_of_memories
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.planner.drifting import make_profile

TABLES = (Table("a", 300, dim=8), Table("b", 40, dim=16), Table("c", 300, dim=8))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables a and c have rows of equal bytes, and c is in the tier."""
    folder = tmp_path_factory.mktemp("tier") / "plan"
    profile = make_profile(TABLES, [np.arange(t.rows) % 50 for t in TABLES])
    asked = PlanSettings(extra_memory=0.1, tier=["c"])
    make_plan(profile, "2x2-a100", Workload("training", "raw", 64), asked).save(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "plan"))


def stamp(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the marker, and make it agree with the files."""
    content = json.loads((folder / MARKER).read_text())
    change(content)
    (folder / MARKER).unlink()
    content["files"] = describe_files(folder)
    write_manifest(folder, FORMAT, content)


def test_a_plan_is_valid(saved: Path) -> None:
    assert Plan.load(saved).tier == (2,)
    assert all(finding.ok for finding in check(saved))


def memories(content: dict[str, Any], *tables: Any) -> None:
    """Change the tables that plan.json states for each memory."""
    for memory, numbers in zip(content["memories"], tables, strict=True):
        memory["tables"] = numbers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: memories(c, [0, 1], [3]), "must have every table once"),
        (lambda c: memories(c, [0, 1], []), "must have every table once"),
        (lambda c: memories(c, [0, 1], "c d"), r"memories\[1\]\.tables"),
        (lambda c: memories(c, [0, 1], [2, 2]), "must have every table once"),
        (lambda c: memories(c, [0, 1, 2], [2]), "must have every table once"),
        (lambda c: memories(c, [0], [2, 1]), "must have their tables in order"),
        (lambda c: memories(c, [0, 1, 2], []), "the hosts' memory has no table"),
        (lambda c: c["memories"].pop(), "must have every table once"),
        (lambda c: c["memories"].pop(0), r"memories: expected .*, got \['host'\]"),
        (lambda c: c["memories"].reverse(), r"memories: expected .*, got \['host', 'device'\]"),
        (lambda c: c["memories"].append(c["memories"][1]), "memories: expected .*, got"),
        (lambda c: c["memories"][1].update(name="disk"), "disk"),
        (lambda c: c.pop("memories"), "memories"),
        (lambda c: c["memories"][1].pop("cost"), "cost"),
        (lambda c: c["memories"][1]["cost"].update(lookups=3), r"memories\[1\]\.cost\.lookups"),
        (lambda c: c["memories"][1].update(owner_accesses=[1]), "owner_accesses"),
        (lambda c: c["workload"].update(mode="inference"), "must be of a plan for training"),
        (lambda c: c["topology"].pop("host_memory"), "host_memory and host_bandwidth must be"),
        (lambda c: c["topology"].pop("host_bandwidth"), "host_memory and host_bandwidth must be"),
        (
            lambda c: memories(c, [1, 2], [0]),
            "every row on one rank|holds of groups in the hosts' memory",
        ),
    ],
)
def test_markers_that_cannot_be_are_refused(copied: Path, change: Any, message: str) -> None:
    if message.startswith("every row"):  # table a has rows on all ranks
        profile = make_profile(TABLES, [np.arange(t.rows)[::-1] ** 2 for t in TABLES])
        asked = PlanSettings(extra_memory=0.3, tier=["c"])
        workload = Workload("training", "raw", 2**16)
        made = make_plan(profile, "2x2-a100", workload, asked)
        made.save(copied, overwrite=True)
        assert made.cost.extra_bytes
    stamp(copied, change)
    with pytest.raises(OperError, match=rf"plan\.json: is damaged .*({message})"):
        Plan.load(copied)


def test_tables_of_both_memories_in_one_arena_are_refused(tmp_path: Path) -> None:
    profile = make_profile(TABLES, [np.arange(t.rows) % 50 for t in TABLES])
    workload, asked = Workload("training", "raw", 64), PlanSettings(extra_memory=0.0)
    plan = make_plan(profile, "2x2-a100", workload, asked)
    (memory,) = plan.memories
    by_hand = replace(plan, topology=Topology.load("2x2-a100"))

    def in_hosts(number: int) -> Plan:
        """The plan put together by hand, with a table in the hosts' memory."""
        others = tuple(t for t in range(len(TABLES)) if t != number)
        nothing = Cost.of_no_rows(np.zeros(4))
        host = Memory(HOST, (number,), nothing, np.zeros(4, dtype=np.int64))
        return replace(by_hand, memories=(replace(memory, tables=others), host))

    in_hosts(1).save(tmp_path / "right")
    right = Plan.load(tmp_path / "right")
    assert right.tier == (1,)
    devices, host = plans_of_memories(right)
    assert [[t.name for t in part.tables] for part in (devices, host)] == [["a", "c"], ["b"]]
    assert host.certificate is None
    in_hosts(2).save(tmp_path / "wrong")
    with pytest.raises(OperError, match="tables in two memories share an arena"):
        Plan.load(tmp_path / "wrong")


def wrong(folder: Path, **changes: Any) -> str:
    """What is wrong with the plan after a change of the cost of its tier."""
    plan = Plan.load(folder)
    assert plan.host is not None
    host = replace(plan.host, cost=replace(plan.host.cost, **changes))
    replace(plan, memories=(plan.memories[0], host)).save(folder, overwrite=True)
    return "; ".join(f"{f.invariant}: {f.wrong}" for f in check(folder) if not f.ok)


def test_check_finds_wrong_figures_of_the_tier(copied: Path) -> None:
    plan = Plan.load(copied)
    assert plan.host is not None
    tier = plan.host.cost
    assert "memory of the tier of each rank" in wrong(copied, memory_bytes=tier.memory_bytes + 40)
    found = wrong(copied, memory_bytes=tier.memory_bytes, capacity_bytes=tier.memory_bytes - 1)
    assert "memory of the tier is within" in found
    assert "the tier may hold what the hosts have" in found
    found = wrong(
        copied,
        capacity_bytes=tier.capacity_bytes,
        link_seconds=2 * tier.link_seconds,
        rank_seconds=tier.rank_seconds * 3,
    )
    assert "host: link_seconds" in found
    assert "host: rank_seconds" in found
    assert "host: certificate" in found
    assert "all tables: rank_seconds" in found
    assert "all tables: certificate" in found
    assert wrong(copied, link_seconds=tier.link_seconds, rank_seconds=tier.rank_seconds) == ""


def test_a_replay_finds_wrong_accesses_of_the_tiers_owners(copied: Path) -> None:
    counts = [np.arange(t.rows) % 50 for t in TABLES]
    rows = [(t, np.repeat(np.arange(len(of)), of)) for t, of in enumerate(counts)]
    assert [f.wrong for f in replay(copied, rows)] == [None]
    plan = Plan.load(copied)
    assert plan.host is not None
    host = replace(plan.host, owner_accesses=plan.host.owner_accesses + 1)
    replace(plan, memories=(plan.memories[0], host)).save(copied, overwrite=True)
    assert [f.wrong for f in replay(copied, rows)] != [None]


def test_check_prices_the_tier_by_the_hosts_links(copied: Path) -> None:
    stamp(copied, lambda content: content["topology"].update(host_bandwidth=1e9))
    (found,) = (finding.wrong for finding in check(copied) if not finding.ok)
    assert found == "inconsistent: host: link_seconds"


def test_check_finds_a_row_of_the_tier_in_two_maps(copied: Path) -> None:
    plan = Plan.load(copied)
    (of_tier,) = np.flatnonzero(plan.layout.width_of_table == plan.layout.width_of_table[2])
    owner = int(plan.layout.addresses(int(of_tier), np.array([0]), 0)[0] >> SLOT_BITS)
    owner = 0 if owner == LOCAL else owner
    other = (owner + 1) % plan.ranks
    path = copied / rank_file(other)
    arrays = load_file(path)
    for name in ("group_base", "stripe_base"):
        slot = arrays[name] & SLOT_MASK
        to_owner = arrays[name] >> SLOT_BITS == owner
        arrays[name] = np.where(to_owner, LOCAL << SLOT_BITS | slot, arrays[name])
    path.write_bytes(save(arrays))
    stamp(copied, lambda content: None)
    wrong = {finding.invariant: finding.wrong for finding in check(copied)}
    assert "is in the tier, on 2 ranks" in str(wrong["every row of the tier is on one rank"])
