"""`oper plan --tier` and the commands that read such plans, as a user meets them."""

import json
from pathlib import Path

import pytest

from tests.support.commands import fine, oper, refused

PLAN = "plan p -o new --topology 2x2-a100"


def test_every_command_reads_a_plan_with_a_tier(here: Path) -> None:
    text = fine(*PLAN.split(), "--tier", "C1", "-v")
    assert "2 tables, 1 in the hosts' memory," in text
    assert "host memory" in text
    assert "C1 in the hosts' memory" in text
    assert "left for caches" in text
    assert "every rank replays the caches of all, in 96 bytes" in " ".join(text.split())
    shown = fine("plan", "show", "new")
    assert "device memory" in shown
    assert "C1 in the hosts' memory" in shown
    content = json.loads(fine("plan", "show", "new", "--json"))
    assert content["tier"] == ["C1"]
    assert content["cache_replay"]["row_bytes"] == 64 + 8 * 4
    devices, hosts = content["memories"]
    assert (devices["name"], hosts["name"]) == ("device", "host")
    assert content["memory_bytes"] == devices["memory_bytes"] != hosts["memory_bytes"]
    assert "all 17 invariants hold" in fine("plan", "check", "new")
    assert "all 18 invariants hold" in fine("plan", "check", "new", "log.parquet")
    explained = fine("plan", "explain", "new", "--table", "C1", "--row", "0")
    assert "in its host's memory (the table is in the tier)" in " ".join(explained.split())
    other = fine("plan", "explain", "new", "--table", "C2", "--row", "0", "--profile", "p")
    assert "tier" not in other
    fine(*PLAN.replace("new", "without").split())
    different = fine("plan", "diff", "without", "new")
    assert "tier of the new plan  C1" in different
    (table,) = (
        entry
        for entry in json.loads(fine("plan", "diff", "without", "new", "--json"))["tables"]
        if entry["table"] == "C1"
    )
    assert table["rows_changed"] == table["rows"]
    fine("drift", "new", "p")
    fine("replan", "new", "w@1", "-o", "again", "--horizon", "1000000")
    assert "all 17 invariants hold" in fine("plan", "check", "again")
    assert json.loads(fine("plan", "show", "again", "--json"))["tier"] == ["C1"]
    assert "nothing moves" in fine("replan", "new", "p", "-o", "same")


def test_all_tables(here: Path) -> None:
    assert "2 tables, all in the hosts' memory," in fine(*PLAN.split(), "--tier", "all")
    text = fine("plan", "show", "new")
    assert "all tables in the hosts' memory" in text
    assert "extra memory" not in text
    fine("plan", "check", "new")
    fine("drift", "new", "w@1")
    fine("replan", "new", "w@1", "-o", "again")
    assert "all 17 invariants hold" in fine("plan", "check", "again")


def test_json_of_a_new_plan_says_what_its_tier_is(here: Path) -> None:
    content = json.loads(fine(*PLAN.split(), "--tier", "C2, C1", "--json"))
    assert content["tier"] == ["C1", "C2"]
    shown = json.loads(fine("plan", "show", "new", "--json"))
    for name in ("memories", "rows", "objective_seconds", "certified_gap", "memory_bytes"):
        assert content[name] == shown[name], name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tier C1,C1", "table 'C1' is named twice"),
        ("--tier c1", "tier: table 'c1' is not in the profile; near it: C1"),
        ("--tier C1,", "--tier 'C1,': expected all, or names of tables separated by commas"),
        ("--tier all,C1", "tier: table 'all' is not in the profile"),
        ("--tier C1 --mode inference", "the caches of a tier are for training"),
        ("--tier C1 --curve", "--curve: is of the devices' memory"),
    ],
)
def test_bad_tiers_end_in_one_line(here: Path, options: str, message: str) -> None:
    refused(f"{PLAN} {options}", message)
    assert not Path("new").exists()


def test_an_empty_tier_is_refused(here: Path) -> None:
    said = oper(*PLAN.split(), "--tier", "")
    assert said.status == 2
    assert said.errors.startswith(
        "error: --tier '': expected all, or names of tables separated by commas"
    )


def test_topologies_without_hosts_say_what_to_add(here: Path) -> None:
    Path("t.yaml").write_text(
        "node_of: [0, 0]\nbandwidth: {local: 1GB/s, same_node: 1GB/s}\nallreduce_bandwidth: 1GB/s\n"
    )
    asked = "plan p -o new --topology t.yaml --tier C1"
    refused(asked, "topology t: has no host_memory")
    with open("t.yaml", "a") as file:
        file.write("host_memory: 1kB\nhost_bandwidth: 1GB/s\n")
    refused(asked, "tier: host_memory of topology t", "too few")
    shown = fine("topology", "show", "t.yaml")
    assert "host memory" in shown
    said = oper("topology", "show", "t.yaml", "--json")
    assert json.loads(said.out)["host_bandwidth"] == 1e9
