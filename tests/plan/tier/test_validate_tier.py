"""Folders of plans with a tier that were changed: refused when they are read, or found wrong."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from oper.audit.check import check
from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.files.manifest import describe_files, write_manifest
from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.plan.plan import FORMAT, MARKER, Plan, rank_file
from oper.plan.settings import PlanSettings
from oper.plan.some_tables import split_plan
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(tier=["d"]), "KeyError: 'd'"),
        (lambda c: c.update(tier="c d"), "KeyError"),
        (lambda c: c.update(tier=["c", "c"]), "must name tables once"),
        (lambda c: c.update(tier=["c", "b"]), "must name tables once, in their order"),
        (lambda c: c.update(tier=["a", "b", "c"]), "figures of devices must be there if tables"),
        (lambda c: c.pop("tier"), "figures of its parts are there without it"),
        (lambda c: c["figures"].pop("parts"), "it without them"),
        (lambda c: c["figures"]["parts"].pop("tier"), "KeyError: 'tier'"),
        (lambda c: c["figures"]["parts"].pop("devices"), "figures of devices must be there"),
        (lambda c: c["figures"]["parts"].update(disks={}), "disks is of no memory"),
        (lambda c: c["figures"]["parts"]["tier"].update(lookups=3), "parts.tier.lookups is 3"),
        (lambda c: c["figures"]["parts"]["tier"].update(owner_accesses=[1]), "owner_accesses"),
        (lambda c: c["workload"].update(mode="inference"), "must be of a plan for training"),
        (lambda c: c["topology"].pop("host_memory"), "host_memory and host_bandwidth must be"),
        (lambda c: c["topology"].pop("host_bandwidth"), "host_memory and host_bandwidth must be"),
        (lambda c: c.update(tier=["a"]), "every row on one rank|holds of the tier's groups"),
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
    make_plan(profile, "2x2-a100", workload, asked).save(tmp_path / "plan")
    plan = replace(Plan.load(tmp_path / "plan"), topology=Topology.load("2x2-a100"))
    by_hand = replace(plan, certificate={}, tier=(1,))
    by_hand.save(tmp_path / "right")
    assert Plan.load(tmp_path / "right").tier == (1,)
    with pytest.raises(OperError, match="no figures of its two memories"):
        split_plan(Plan.load(tmp_path / "right"))
    replace(by_hand, tier=(2,)).save(tmp_path / "wrong")
    with pytest.raises(OperError, match="share an arena with others"):
        Plan.load(tmp_path / "wrong")


def wrong(folder: Path, **changes: Any) -> str:
    """What is wrong with the plan after a change of its tier's prediction or of its own fields."""
    plan: Plan = Plan.load(folder)
    assert plan.parts is not None
    tier = plan.parts.tier
    of_tier = {k: v for k, v in changes.items() if hasattr(tier.cost, k)}
    own = {k: v for k, v in changes.items() if k not in of_tier}
    prediction = replace(tier.cost, **of_tier)
    parts = plan.parts._replace(tier=replace(tier, prediction=prediction))
    replace(plan, parts=parts, **own).save(folder, overwrite=True)
    return "; ".join(f"{f.invariant}: {f.wrong}" for f in check(folder) if not f.ok)


def test_check_finds_wrong_figures_of_the_tier(copied: Path) -> None:
    plan = Plan.load(copied)
    assert plan.parts is not None
    tier = plan.host.cost
    assert "memory of the tier of each rank" in wrong(copied, memory_bytes=tier.memory_bytes + 40)
    found = wrong(copied, memory_bytes=tier.memory_bytes, capacity_bytes=tier.memory_bytes - 1)
    assert "memory of the tier is within" in found
    assert "the tier may hold what the hosts have" in found
    found = wrong(copied, capacity_bytes=tier.capacity_bytes, link_seconds=2 * tier.link_seconds)
    assert "tier: link_seconds" in found
    assert "link_seconds of all tables" in found
    assert "owner_accesses" in wrong(
        copied, link_seconds=tier.link_seconds, owner_accesses=plan.owner_accesses + 1
    )
    assert wrong(copied, owner_accesses=plan.owner_accesses) == ""


def test_check_prices_the_tier_by_the_hosts_links(copied: Path) -> None:
    stamp(copied, lambda content: content["topology"].update(host_bandwidth=1e9))
    (found,) = (finding.wrong for finding in check(copied) if not finding.ok)
    assert found == "inconsistent: tier: link_seconds"


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
