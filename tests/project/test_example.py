"""The examples as a user starts them: from the shell, by themselves and by torchrun."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from tests.support.commands import fine

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "train_dlrm.py"
THREE_COLLECTIONS = REPOSITORY / "examples" / "train_three_collections.py"
STARTS = {
    "itself": [sys.executable],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "2"),
    ],
}


def run(start: str, *command: object) -> str:
    """Run the script, and return its output."""
    done = subprocess.run(
        [*STARTS[start], *map(str, command)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},  # this checkout's, whatever is installed
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """Return the example as a module."""
    spec = importlib.util.spec_from_file_location("train_dlrm", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 16])
@pytest.mark.parametrize("samples", [1, 2, 7, 16, 33, 47, 48])
def test_all_ranks_take_equally_many_steps(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    batch_size: int,
    samples: int,
) -> None:
    def read(*_: object, batch_size: int, **__: object) -> Iterator[SimpleNamespace]:
        for start in range(0, samples, batch_size):
            numbers = np.arange(start, min(start + batch_size, samples))
            yield SimpleNamespace(
                samples=len(numbers), dense=numbers, label=numbers, to_kjt=numbers.copy
            )

    monkeypatch.setattr(example.oper, "read", read)
    monkeypatch.setattr(example.dist, "get_world_size", lambda: ranks)
    plan = SimpleNamespace(workload=SimpleNamespace(batch_size=batch_size), tables=())
    size = max(batch_size // ranks, 1)
    parts = []
    for rank in range(ranks):
        monkeypatch.setattr(example.dist, "get_rank", lambda rank=rank: rank)
        parts.append([ids.tolist() for _, ids, _ in example.batches("log", "plan", plan)])
    steps = samples // (size * ranks)
    assert [len(part) for part in parts] == [steps] * ranks
    trained = [n for step in range(steps) for part in parts for n in part[step]]
    assert trained == list(range(steps * size * ranks))
    if steps:
        example.check_log("log", "plan", plan, ranks)
        return
    with pytest.raises(SystemExit, match=f"log: expected at least {size * ranks} samples, .* got"):
        example.check_log("log", "plan", plan, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_dlrm_is_trained_by_both_plans_and_counted(tmp_path: Path, start: str) -> None:
    log, profile, plan = (str(tmp_path / name) for name in ("log.parquet", "profile", "plan"))
    tables = str(tmp_path / "log.tables.yaml")
    fine("synth", "criteo-kaggle", "-o", log, "--scale", 0.0005, "--samples", 6000)
    fine("profile", log, "-o", profile, "--tables", tables)
    fine("plan", profile, "-o", plan, "--topology", "cpu:2", "--batch-size", 500)
    said = run(start, EXAMPLE, log, plan)
    losses = re.findall(r"(OPER|TorchRec's plan) +[0-9.]+ ms a step, log loss ([0-9.]+)", said)
    assert [name for name, _ in losses] == ["OPER", "TorchRec's plan"]
    # Both train the same model on the same batches, from the same values.
    assert float(losses[0][1]) == pytest.approx(float(losses[1][1]), abs=2e-4)
    (apart,) = re.findall(r"Their losses differ by at most ([0-9.e+-]+)", said)
    assert float(apart) < 2e-4
    # Guessing the share of clicks alone costs 0.53.
    assert all(float(loss) < 0.6 for _, loss in losses), losses
    traffic = re.findall(r"(fetch|gradient) +([0-9.]+) +([0-9.]+)", said)
    assert [name for name, *_ in traffic] == ["fetch", "gradient"]
    assert all(float(b) == pytest.approx(float(a), rel=0.1) for _, a, b in traffic), traffic


@pytest.mark.parametrize(
    "start",
    [
        pytest.param("itself", marks=pytest.mark.check),
        pytest.param("torchrun", marks=pytest.mark.slow),
    ],
)
def test_three_collections_train_by_one_plan_as_the_unsharded_model_does(
    tmp_path: Path, start: str
) -> None:
    plan = tmp_path / "plan"
    said = run(start, THREE_COLLECTIONS, plan)
    losses = [
        (float(found), float(unsharded))
        for found, unsharded in re.findall(r"loss ([0-9.]+), unsharded ([0-9.]+)", said)
    ]
    assert len(losses) == 7
    assert all(found == pytest.approx(unsharded, abs=2e-5) for found, unsharded in losses), losses
    assert losses[-1][0] < 0.55 < 0.65 < losses[0][0], losses  # guessing alone costs 0.69
    assert "the losses of all 60 steps differ by at most" in said
    doctor = fine("doctor", plan, f"{THREE_COLLECTIONS}:make_model", "--json")
    findings = json.loads(doctor)["findings"]
    assert "all 4 of the model's tables" in str(findings)
    shown = json.loads(fine("plan", "show", plan, "--json"))
    assert {t["table"] for t in shown["tables_by_kind"]} == {"user", "region", "item", "topic"}
