"""The documents name what is there: files that exist, and code where they say it is."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from oper.cli import VERBS
from oper.plan.row_moves import ENTRY
from tests.support.commands import fine, make_folder

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        REPOSITORY / "benchmarks" / "README.md",
    ]
)
# by commands
MADE = {"benchmarks/data/", "benchmarks/results/", "oper/_cuda.so", "oper/_nvshmem.so"}
SOURCE = re.compile(r"(?:oper|tests|benchmarks|scripts|examples|docs)/[\w/.-]*\w/?")
BARE_SOURCE = re.compile(r"\w+\.(?:py|h|cpp)")  # a module by its name alone
GLOSSARY = REPOSITORY / "docs" / "glossary.md"


def code_spans(text: str) -> list[str]:
    """Return the texts in backticks, without blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def is_there(name: str) -> bool:
    """Return whether a file of that name is at the top or in a folder of sources."""
    folders = ("oper", "tests", "benchmarks", "scripts", "examples")
    inside = (found for folder in folders for found in (REPOSITORY / folder).rglob(name))
    return (REPOSITORY / name).exists() or next(inside, None) is not None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_that_a_document_names_is_there(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = {span for span in code_spans(text) if SOURCE.fullmatch(span)}
    missing = [name for name in named if not (REPOSITORY / name).exists()]
    missing = [name for name in missing if name not in MADE and "NAME" not in name]
    missing += [
        name for name in code_spans(text) if BARE_SOURCE.fullmatch(name) and not is_there(name)
    ]
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    missing += [link for link in links if not (document.parent / link).exists()]
    assert not missing, missing


def glossary_entries() -> list[tuple[str, str]]:
    """Return (name, file) for every name in the last columns; the file is the next in the line."""
    found = []
    for line in GLOSSARY.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| ") or line.startswith("| ---"):
            continue
        names: list[str] = []
        for span in code_spans(line.replace(r"\|", "").split("|")[-2]):
            if SOURCE.fullmatch(span):
                found += [(name, span) for name in names]
                names = []
            else:
                names.append(span)
        assert not names, f"{line}: no file follows {names}"
    return found


def test_every_name_in_the_glossary_is_in_the_file_beside_it() -> None:
    entries = glossary_entries()
    assert len(entries) > 50
    missing = []
    for name, file in entries:
        path = REPOSITORY / file
        files = path.rglob("*.py") if path.is_dir() else [path]
        text = "\n".join(found.read_text(encoding="utf-8") for found in files)
        missing += [
            f"{part} ({name}) in {file}"
            for part in name.split(".")
            if not re.search(rf"\b{re.escape(part)}\b", text)
        ]
    assert not missing, missing


def names_in(content: object) -> set[str]:
    """Return all keys of JSON objects, at any depth, except names of files."""
    if isinstance(content, dict):
        keys = {key for key in content if "." not in key}
        return keys.union(*map(names_in, content.values()))
    return set().union(*map(names_in, content)) if isinstance(content, list) else set()


def test_the_format_of_plans_and_profiles_is_described_in_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path)  # profiles p and w (windows), plans q (training) and r (inference)
    spans = " ".join(code_spans((REPOSITORY / "docs" / "plan-format.md").read_text("utf-8")))
    known = set(re.findall(r"\w+(?:\.\w+)?", spans))
    fine("replan", "q", "w@1", "-o", "again")
    fine("profile", "log.parquet", "-o", "s", "--columns", "C1", "--sample", "0.5")
    fine("profile", "log.parquet", "-o", "d", "--columns", "C1", "--batch-size", 60)
    found = set()
    for folder in (tmp_path / name for name in ("p", "w", "q", "r", "s", "d", "again")):
        for path in folder.rglob("*.*"):
            found.add(re.sub("[0-9]{5}", "NNNNN", path.name))
            if path.suffix == ".json":
                found |= names_in(json.loads(path.read_text(encoding="utf-8")))
            if path.suffix == ".safetensors":
                found |= {re.sub("[0-9]{5}", "NNNNN", name) for name in load_file(path)}
    found |= set(ENTRY.names or ())
    # Kinds of links, which docs/topology.md describes.
    assert found - known - {"local", "same_node", "other_node"} == set()


def commands_of(document: str) -> list[list[str]]:
    """Return the commands in a document's blocks, as arguments."""
    text = (REPOSITORY / document).read_text("utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("oper ")]


def test_the_readme_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (REPOSITORY / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150, "move details to docs/, so that the README is read whole"
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "examples", "examples")
    printed = [fine(*command[1:]) for command in commands_of("README.md")]
    assert len(printed) == 3
    output = re.findall(r"\n\n```\n(.*?)```", text, flags=re.DOTALL)[0]
    said = "".join(printed)
    for line in output.splitlines():
        assert line.rstrip() in said
    (example,) = python_of(text)
    source = Path("examples/quick_start.py").read_text("utf-8")
    assert source.partition('"""\n\n')[2] == example
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "examples/quick_start.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert ran.returncode == 0, ran.stderr
    losses = [float(line.split()[-1]) for line in ran.stdout.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < 0.9 * losses[0]


def test_the_log_of_the_quick_start_is_what_synth_writes(tmp_path: Path) -> None:
    shipped = REPOSITORY / "examples" / "clicks.parquet"
    assert shipped.stat().st_size <= 2 << 20
    options = "--scale 0.0005 --samples 18000 --churn 0.4"
    fine("synth", "criteo-kaggle", *options.split(), "-o", tmp_path / "clicks.parquet")
    assert pq.read_table(tmp_path / "clicks.parquet").equals(pq.read_table(shipped))
    tables = "clicks.tables.yaml"
    assert (tmp_path / tables).read_text() == shipped.with_name(tables).read_text()


def test_the_demo_ends_with_what_it_wrote_and_commands_that_exist() -> None:
    steps, _, end = (REPOSITORY / "scripts/demo.sh").read_text("utf-8").partition("<<'END'")
    written = set(re.findall(r"(?:-o|--counters) (demo/\S+)", steps.replace("\\\n", " ")))
    named = set(re.findall(r"demo/[\w.-]+", end))
    assert {"demo/plan.html", "demo/plan-cpu.html"} <= named
    assert named - {"demo/plan-of-2-nodes"} <= written
    commands = re.findall(r"^  (oper [\w ]+)", end, flags=re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert command.split()[1] in VERBS


def test_the_commands_of_the_tour_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in one folder, on logs like those in the text, and overwrite nothing."""
    commands = commands_of("docs/tour.md")
    assert len(commands) > 14
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(0)

    def clicks(rows: int) -> pa.Table:
        ids = {f"C{n}": (random.zipf(1.2, 9000) - 1) % rows for n in range(1, 5)}
        ids["C3"][:rows] = np.arange(rows)
        return pa.table(ids | {"C4": np.where(random.random(9000) < 0.1, -1, ids["C4"])})

    pq.write_table(clicks(5000), "clicks.parquet")
    pq.write_table(clicks(6000), "grown.parquet")
    lengths = random.integers(1, 9, 9000)
    items = (random.zipf(1.3, lengths.sum()) - 1) % 3000
    np.savez("retailrocket.npz", item=items, lengths=lengths)
    for before, needed in (
        (["plan", "diff"], "plan profile --topology dgx-a100 --extra-memory 5% -o other-plan"),
        (["replan", "plan"], "profile grown.parquet --missing -1 -o grown-profile"),
    ):
        at = next(n for n, command in enumerate(commands) if command[1:3] == before)
        commands.insert(at, ["oper", *needed.split()])
    for command in commands:
        fine(*command[1:])


def test_the_python_of_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torchrec import KeyedJaggedTensor

    import oper

    section = (REPOSITORY / "docs/tour.md").read_text("utf-8").partition("## From Python")[2]
    example = python_of(section)[0]
    monkeypatch.chdir(tmp_path)
    a_click_log()
    tables = [oper.Table(name, rows=100, dim=8) for name in ("a", "b", "c")]
    ids = torch.arange(3 * 64) % 100
    lengths = torch.ones(3 * 64, dtype=torch.int32)
    batch = KeyedJaggedTensor(["a", "b", "c"], ids, lengths=lengths)
    names: dict[str, Any] = {"batches": [batch], "tables": tables, "ids": torch.tensor([0, 99, 7])}
    exec(compile(example, "docs/tour.md", "exec"), names)
    assert names["addresses"].shape == (3,)
    assert [window.samples for window in names["windows"]] == [50] * 4


def test_the_python_of_the_document_of_profiles_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    import oper

    monkeypatch.chdir(tmp_path)
    a_click_log()
    config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    model = EmbeddingBagCollection([config])
    batch = KeyedJaggedTensor(["f"], torch.arange(9), lengths=torch.ones(9, dtype=torch.int32))
    train = lambda model: model(batch)  # noqa: E731
    names: dict[str, Any] = {"oper": oper, "model": model, "train": train, "rank": 0}
    for example in python_of((REPOSITORY / "docs" / "profile.md").read_text("utf-8")):
        exec(compile(example, "docs/profile.md", "exec"), names)
    assert names["profile"].samples == 200
    assert len(names["windows"]) == 2
    assert 0 < names["sampled"].samples < 200
    assert oper.Profile.load("profile-0").accesses.tolist() == [1] * 9


def test_the_python_of_the_document_of_checkpoints_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

    import oper

    monkeypatch.chdir(tmp_path)
    config = EmbeddingBagConfig(9, 4, name="C1", feature_names=["C1"])
    module = nn.Sequential(EmbeddingBagCollection([config]))
    batch = KeyedJaggedTensor(["C1"], torch.arange(9), lengths=torch.ones(9, dtype=torch.int32))
    profile = oper.profile([batch], module)
    workload = oper.Workload("training", batch_size=9)
    model = oper.shard(module, oper.make_plan(profile, oper.Topology.load("cpu:1"), workload))
    oper.save(model, "checkpoint")
    text = (REPOSITORY / "docs" / "checkpoints.md").read_text("utf-8")
    (example,) = (each for each in python_of(text) if "oper.checkpoint" in each)
    exec(compile(example, "docs/checkpoints.md", "exec"), {})
    assert pq.read_table("C1.parquet").num_rows == 9
    assert len(list(Path("checkpoint-of-8").glob("*.distcp"))) == 8


def python_of(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def a_click_log() -> None:
    """Write the log `clicks.parquet` of the documents: 200 samples in a day."""
    ids = {f"C{i}": np.arange(200) * i % 50 - 1 for i in range(1, 4)}
    times = np.datetime64("2026-01-01T00:00", "s") + np.arange(200) * 432
    pq.write_table(pa.table({**ids, "time": times}), "clicks.parquet")
