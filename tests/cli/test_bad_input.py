"""Bad input on the command line: each error names the place and the remedy, and leaves nothing."""

import gzip
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.main import get_command

from oper.cli import app
from tests.support.commands import fine, oper, refused, tree, write_log

# What is refused: status 2, an error that says where and what to do, and nothing left behind


SIMULATE = "simulate log.parquet --columns C*"


@pytest.fixture
def bad_logs(here: Path) -> None:
    lines = ["\t".join(["1", *["2"] * 13, *["0000abcd"] * 26]) for _ in range(300)]
    packed = gzip.compress("\n".join(lines).encode())
    Path("cut.tsv.gz").write_bytes(packed[: len(packed) // 2])
    Path("broken.tsv.gz").write_bytes(packed[:-8] + b"12345678")
    lines[123] += "\textra"
    Path("ragged.tsv").write_text("\n".join(lines))
    whole = Path("log.parquet").read_bytes()
    Path("cut.parquet").write_bytes(whole[: len(whole) // 2])
    Path("broken.parquet").write_bytes(whole[:50] + os.urandom(200) + whole[250:])
    np.savez("jagged.npz", item=np.arange(3000), lengths=np.full(1000, 3))
    whole = Path("jagged.npz").read_bytes()
    Path("cut.npz").write_bytes(whole[: len(whole) // 2])
    np.savez("uneven.npz", item=np.arange(10), lengths=np.full(5, 3))
    Path("ragged.csv").write_text("C1,C2\n1,2\n1,2,3\n")
    Path("text.csv").write_text("C1\n1\nzebra\n")
    Path("empty.csv").write_text("")
    Path("header.csv").write_text("C1,C2\n")
    Path("random.csv").write_bytes(bytes(range(128, 256)) * 10)
    pq.write_table(pa.table({"C1": [3, -7, 2]}), "negative.parquet")
    Path("small.yaml").write_text("- {name: C1, rows: 4}\n")
    Path("minus.yaml").write_text("- name: C1\n  rows: -4\n")
    Path("huge.yaml").write_text(f"- {{name: C1, rows: {10**18}}}\n")


@pytest.mark.usefixtures("bad_logs")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("cut.tsv.gz --ids hash:100", ["cut.tsv.gz", "truncated"]),
        ("broken.tsv.gz --ids hash:100", ["broken.tsv.gz", "damaged"]),
        ("ragged.tsv --ids hash:100", ["ragged.tsv, line 124:", "got 41"]),
        ("cut.parquet", ["cut.parquet", "truncated"]),
        ("broken.parquet", ["broken.parquet", "damaged"]),
        ("cut.npz --values item --lengths lengths", ["cut.npz", "truncated"]),
        ("uneven.npz --values item --lengths lengths", ["uneven.npz, sample 3:", "'lengths'"]),
        ("jagged.npz", ["item, lengths", "--values"]),
        ("ragged.csv", ["ragged.csv, line 3:", "got 3"]),
        ("text.csv --ids dense --tables small.yaml", ["line 3:", "'C1'", "'zebra'"]),
        ("empty.csv", ["empty.csv", "empty"]),
        ("header.csv", ["header.csv", "no samples"]),
        ("random.csv", ["random.csv", "text"]),
        ("negative.parquet", ["row 1:", "'C1'", "-7", "--missing -7"]),
        ("log.parquet --tables small.yaml", ["'C1'", "4 rows", "--on-bad-id skip"]),
        ("log.parquet --tables minus.yaml", ["minus.yaml, line 2", "-4"]),
        ("log.parquet --tables huge.yaml", ["huge.yaml, line 1", "at most"]),
        ("log.parquet --tables criteo-kagle", ["criteo-kagle", "criteo-kaggle"]),
        ("absent.parquet", ["absent.parquet", "no such file"]),
        ("log.parquet --columns Z*", ["--columns 'Z*'", "C1, C2"]),
        ("log.parquet --columns C* --dense C1", ["--columns and --dense", "C1"]),
        ("log.parquet --columns C* --windows 601", ["--windows 601", "600"]),
        ("log.parquet --columns C* --windows 2 --by-column day", ["--windows and --by-column"]),
        ("log.parquet --columns C* --by-column hour", ["'hour'", "day"]),
        ("log.parquet --columns C* --by-column day --every 1y", ["--every '1y'"]),
        ("log.parquet --columns C* --rows 9:3", ["--rows 9:3"]),
        ("log.parquet --columns C* --rows 600:", ["--rows", "600"]),
        ("log.parquet --columns C* --sample 0", ["--sample"]),
        ("log.parquet --columns C* --sample 0.1 --batch-size 8", ["--sample with --batch-size"]),
        ("log.parquet --columns C* --batch-size 601", ["--batch-size 601", "600"]),
        ("log.parquet --columns C* --ids hash", ["--ids hash", "hash:1000000"]),
        ("log.parquet --columns C* --ids vocabulary", ["--ids vocabulary"]),
        ("log.parquet --columns C* --dtype fp13", ["'fp13'", "bf16"]),
        ("log.parquet --columns C* --optimizer lion", ["'lion'", "adam"]),
        (
            "log.parquet --columns C* --on-bad-id ignore",
            ["--on-bad-id 'ignore': expected error or skip"],
        ),
        ("log.parquet --columns C* --memory-limit much", ["--memory-limit 'much'", "64GB"]),
    ],
)
def test_logs_that_cannot_be_profiled(options: str, words: list[str]) -> None:
    refused(f"profile {options} -o new", *words)


NODES = "name: x\nnode_of: [0, 0, 1]\nallreduce_bandwidth: 1GB/s\n"
TOPOLOGIES = {
    "hole.yaml": NODES + "bandwidth: {local: 9GB/s, same_node: 5GB/s}\n",
    "zero.yaml": NODES + "bandwidth: {local: 9GB/s, same_node: 0, other_node: 1GB/s}\n",
    "minus.yaml": NODES + "link_cost: [[1.0, 1.0, 1.0], [1.0, 1.0, -2.0], [1.0, 1.0, 1.0]]\n",
    "torn.yaml": "node_of: [0, 0\n",
}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("absent", ["absent: no such folder", "oper profile LOG -o PROFILE"]),
        ("q", ["q", "profile.json"]),
        ("log.parquet", ["log.parquet: expected a profile", "got a file", "profile it first"]),
        ("p@99", ["p@99", "no windows"]),
        ("w@99", ["w@99", "@0 to @1"]),
        ("p --extra-memory much", ["--extra-memory 'much'", "5%"]),
        ("p --extra-memory 5", ["--extra-memory '5'", "fraction"]),
        ("p --extra-memory -5%", ["--extra-memory '-5%'"]),
        ("p --threshold 0", ["threshold", "above 0"]),
        ("p --dob 101%", ["dob", "at most 1"]),
        ("p --capacity 1kB", ["33,800", "smallest number of ranks", "too few"]),
        ("p --capacity 0.9", ["too few", "1.0"]),
        ("p --capacity 100B", ["260 bytes", "fits on no rank"]),
        ("p --capacity 1MB,1MB", ["2 values", "4 ranks"]),
        ("p --topology dgx-a101", ["'dgx-a101'", "dgx-a100"]),
        ("p --topology cpu:0", ["cpu:0", "1 to"]),
        ("p --topology absent.yaml", ["absent.yaml"]),
        ("p --topology hole.yaml", ["hole.yaml, line 4", "other_node"]),
        ("p --topology zero.yaml", ["zero.yaml, line 4", "same_node", "positive"]),
        ("p --topology minus.yaml", ["minus.yaml, line 4", "[1][2]", "positive"]),
        ("p --topology torn.yaml", ["torn.yaml", "YAML"]),
    ],
)
def test_plans_that_cannot_be_made(here: Path, options: str, words: list[str]) -> None:
    for name, content in TOPOLOGIES.items():
        Path(name).write_text(content)
    topology = "" if "--topology" in options else "--topology 2x2-a100"
    refused(f"plan {options} {topology} -o new", *words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan explain q --table C9 --row 0", ["'C9'", "C1, C2"]),
        ("plan explain q --table C1 --row 90", ["row 90", "0 to 89"]),
        ("plan explain q --table C1 --row -1", ["row -1", "0 to 89"]),
        ("plan show p", ["p", "plan.json"]),
        ("plan diff q absent", ["absent", "no such folder"]),
        ("plan check q absent.parquet", ["absent.parquet"]),
        ("compare p --topology cpu:2 --methods oper,magic", ["'magic'", "table_wise"]),
        ("compare p --topology cpu:2 --methods table-wide", ["'table-wide'", "table_wise"]),
        ("compare p --topology cpu:2 --methods oper,", ["got ''", "table_wise"]),
        ("compare p --topology cpu:2 --methods=", ["got ''", "table_wise"]),
        ("compare p --topology cpu:2 --extra-memory 1,,2%", ["--extra-memory '1,,2%'"]),
        ("compare p --topology cpu:2 --extra-memory 1,2", ["--extra-memory '2'", "fraction"]),
        ("compare p --topology cpu:2 --methods oper --capacity 1kB", ["smallest number of ranks"]),
        ("drift q absent", ["absent"]),
        ("drift q p --worse little", ["--worse 'little'"]),
        ("replan absent p -o new", ["absent"]),
        ("replan q p -o new --max-move 0.05", ["--max-move 0.05", "such as 64MB", "such as 1%"]),
        ("plan check q p", ["p: expected the log that was profiled, got a profile"]),
        ("profile show w@1 --check", ["`oper profiles show w@1 --check`"]),
        ("profile merge w@0 w@1 -o new", ["`oper profiles merge w@0 w@1 -o new`"]),
        ("profile show -o new", ["`oper profiles show -o new`"]),
        ("topology show dgx", ["'dgx'", "dgx-a100"]),
        ("topology measure -o t.yaml", ["--ranks N", "torchrun"]),
        ("synth criteo -o new.parquet", ["'criteo'", "criteo-kaggle"]),
        ("synth avazu -o new.csv", ["new.csv", ".parquet"]),
        ("synth avazu --scale 0 -o new.parquet", ["--scale"]),
        ("synth avazu --scale 0.001 --samples 0 -o new.parquet", ["--samples 0"]),
        ("synth avazu --scale 0.001 --zipf -1 -o new.parquet", ["--zipf"]),
        ("synth avazu --scale 0.001 --drift 2 -o new.parquet", ["--drift"]),
        ("synth avazu --scale 0.001 --order random -o new.parquet", ["--order", "scattered"]),
        ("synth avazu --scale 0.001 --windows 2 -o new.parquet", ["--windows 2", "--counts"]),
        ("synth avazu --scale 1e9 --samples 9 -o new.parquet", ["rows", "at most"]),
        (f"{SIMULATE} --links 5,5", ["--links: expected 1 or 8", "got 2"]),
        (f"{SIMULATE} --links 5,0", ["--links"]),
        (f"{SIMULATE} --links 0", ["--links", "without bandwidth"]),
        (f"{SIMULATE} --links nan", ["--links 'nan'", "Gbit/s"]),
        (f"{SIMULATE} --cache 0", ["--cache 0%"]),
        (f"{SIMULATE} --batch-size 1025", ["--batch-size 1025", "8 workers", "1024 or 1032"]),
        (f"{SIMULATE} --batch-size 4", ["--batch-size 4", "multiple of --workers", "such as 8"]),
        (f"{SIMULATE} --batch 8", ["--batch"]),
        (f"{SIMULATE} --cache 1%", ["--cache 1%", "would be enough"]),
        (f"{SIMULATE} --cache 100% --warm-up 9999", ["--warm-up", "batches"]),
        (f"{SIMULATE} --policy laia,best", ["--policy best", "grouped"]),
        (f"{SIMULATE} --sync het:", ["--sync het:", "het:S"]),
        (f"{SIMULATE} --evict fifo", ["--evict fifo", "lru"]),
        (f"{SIMULATE} --policy laia --sync fae:1%", ["--policy laia", "random or in-order"]),
        (f"{SIMULATE} --sync fae:2", ["--sync fae '2'", "fraction"]),
        (f"{SIMULATE} --optimizer adam --sync bsp,het:1", ["adam", "plain SGD"]),
    ],
)
def test_other_requests_that_cannot_be_met(here: Path, command: str, words: list[str]) -> None:
    refused(command, *words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan p -o new", ["oper plan: --topology NAME|FILE is missing", "`oper plan --help`"]),
        ("plan p --topology cpu:2", ["-o", "--curve"]),
        (
            "plan p -o new --topology",
            ["oper plan: --topology: expected a value (NAME|FILE), got none"],
        ),
        (
            "plan p -o new --topology cpu:2 --batch-size 0",
            ["--batch-size '0': expected a whole number of at least 1"],
        ),
        ("plan p -o new --batch-size=many", ["--batch-size 'many': expected a whole number"]),
        ("plan p -o new --mode train", ["--mode 'train': expected training or inference"]),
        ("plan p -o new --fetch all", ["--fetch 'all': expected raw, distinct, pooled or auto"]),
        ("plan p -o new --balance even", ["--balance 'even': expected time or link"]),
        (
            "plan p q r -o new --topology cpu:2",
            ["'q r' is too much", "oper plan [OPTIONS] PROFILE"],
        ),
        ("plan p --topolgy cpu:2", ["oper plan: no option --topolgy; did you mean --topology?"]),
        ("plan make p --topolgy cpu:2", ["oper plan make: no option --topolgy"]),
        ("plan p --hold-out 20%", ["oper plan: no option --hold-out; `oper profile` has one"]),
        ("plan p --zebra", ["oper plan: no option --zebra; `oper plan --help-all`"]),
        ("plan p --force=yes", ["--force: takes no value"]),
        ("plan shw q", ["oper plan: no folder and no command 'shw'; did you mean show?"]),
        ("plan --batch-size 3", ["oper plan: PROFILE is missing", "oper plan [OPTIONS] PROFILE"]),
        ("plan explain q --table C1 --row x", ["--row 'x': expected a whole number"]),
        ("profiles shw p", ["oper profiles: no command 'shw'; did you mean show?"]),
        ("profiles show --chek p", ["oper profiles show: no option --chek; did you mean --check?"]),
        ("profile log.parquet", ["oper profile: --output FOLDER is missing"]),
        (
            "profile log.parquet -o new --dim 3.5",
            ["--dim '3.5': expected a whole number of at least 1"],
        ),
        ("profile log.parquet -o new --windows 0", ["--windows '0'", "at least 1"]),
        ("profile log.parquet -o new --time-unit h", ["--time-unit 'h': expected s, ms, us or ns"]),
        ("profile log.parquet -o new --ids vocabulary", ["--ids vocabulary", "vocab"]),
        (
            "compare p --topology cpu:2 --time-limit 0",
            ["--time-limit '0': expected a number of at least"],
        ),
        (
            "replan q p -o new --horizon 0",
            ["--horizon '0': expected a whole number from 1 to 1,000,000,000,000"],
        ),
        ("replan q p -o new --horizon 1000000000001", ["number from 1 to 1,000,000,000,000"]),
        (
            "simulate log.parquet --workers 99",
            ["--workers '99': expected a whole number from 1 to 64"],
        ),
        ("simulate absent.parquet --evict fifo", ["--evict fifo", "lru"]),
        ("synth", ["oper synth: WORKLOAD is missing"]),
        ("synth avazu -o new.parquet --scale big", ["--scale 'big': expected a number"]),
        ("frobnicate", ["oper: no command 'frobnicate'; there are profile, profiles, topology"]),
        ("profle log.parquet", ["oper: no command 'profle'; did you mean profile?"]),
        ("--frob", ["oper: no option --frob; `oper --help-all`"]),
    ],
)
def test_usage_errors(here: Path, command: str, words: list[str]) -> None:
    refused(command, *words)


@pytest.mark.parametrize(
    "typed",
    [
        ("profile", "", "-o", "new"),
        ("profile", "log.parquet", "", "-o", "new"),
        ("profile", "log.parquet", "-o", ""),
        ("profile", "log.parquet", "--output="),
        ("profile", "log.parquet", "-o", "new", "--tables", ""),
        ("profile", "log.parquet", "-o", "new", "--config", ""),
        ("profiles", "show", ""),
        ("profiles", "merge", "p", "", "-o", "new"),
        ("plan", "", "--topology", "cpu:2", "-o", "new"),
        ("plan", "p", "--topology", "", "-o", "new"),
        ("plan", "show", ""),
        ("plan", "diff", "q", ""),
        ("plan", "check", "q", ""),
        ("plan", "explain", "q", "--table", "C1", "--row", "0", "--profile", ""),
        ("compare", "", "--topology", "cpu:2"),
        ("doctor", "", "model.py:make"),
        ("doctor", "q", ""),
        ("drift", "q", ""),
        ("replan", "", "p", "-o", "new"),
        ("report", "q", "--drift", "", "-o", "new.html"),
        ("simulate", ""),
        ("synth", "avazu", "-o", ""),
        ("topology", "show", ""),
    ],
)
def test_an_empty_path_is_not_the_current_folder(here: Path, typed: tuple[str, ...]) -> None:
    before = tree(here)
    said = oper(*typed)
    assert (said.status, said.out) == (2, "")
    assert re.fullmatch(
        r"error: \S+ '': expected a (name or a )?path; the current folder is '\.'\n", said.errors
    )
    assert tree(here) == before


@pytest.mark.parametrize("command", ["", "plan", "profiles", "topology"])
def test_a_command_without_arguments_prints_its_help(command: str) -> None:
    said = oper(*command.split())
    assert said.errors == fine(*command.split(), "--help")
    assert (said.status, said.out) == (2, "")


def test_usage_is_of_its_own_parse_whatever_was_parsed_since() -> None:
    plan: Any = get_command(app).commands["plan"]  # type: ignore[attr-defined]
    groups = [
        plan.make_context("plan", line, resilient_parsing=True)
        for line in (["--topology", "x"], ["make", "--topology", "x"], ["--topology", "x"])
    ]
    shown = []
    for group in groups:
        name, command, rest = plan.resolve_command(group, [*group._protected_args, *group.args])
        shown.append(command.make_context(name, rest, group, resilient_parsing=True).command_path)
    assert shown == ["plan", "plan make", "plan"]


# Damage


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "emptied"])
@pytest.mark.parametrize(
    ("folder", "commands"),
    [
        ("p", ["plan p --topology cpu:2 -o new", "drift q p", "replan q p -o new"]),
        ("w/window-001", ["plan w --topology cpu:2 -o new", "profiles merge w@0 w@1 -o sum"]),
        ("w/window-001/first-part", ["drift q w@1", "replan q w@1 -o new"]),
        ("q", ["plan show q", "plan check q", "drift q p", "replan q p -o new", "plan diff q r"]),
    ],
)
def test_damaged_folders(here: Path, folder: str, commands: list[str], damage: str) -> None:
    for file in sorted(filter(Path.is_file, Path(folder).iterdir())):
        whole = file.read_bytes()
        if damage == "cut":
            file.write_bytes(whole[: len(whole) // 2])
        elif damage == "emptied":
            file.write_bytes(b"")
        elif damage == "gone":
            file.unlink()
        elif file.suffix == ".json":
            file.write_bytes(re.sub(rb'"version": \d', b'"version": 9', whole))
        else:
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        for command in commands:
            refused(command, file.name)
        file.write_bytes(whole)
    for number, command in enumerate(commands):
        fine(*command.replace("-o new", f"-o new{number}").split())


def test_a_log_that_the_plan_is_not_of(here: Path) -> None:
    write_log(Path("other.parquet"), seed=1)
    said = oper("plan", "check", "q", "other.parquet")
    assert said.status == 1
    assert "WRONG a replay of the log" in said.out
    assert "1 of 13 invariants do not hold" in said.out
