"""`oper checkpoint`: what it prints, its exit statuses, and that it writes whole or not at all."""

import json
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint.delta_folders import write_base, write_delta
from tests.support.checkpoint.saved_folders import STATE, WEIGHT, Part, write
from tests.support.commands import fine, oper, refused


@pytest.fixture(autouse=True)
def _checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory has a checkpoint, of torch's, with a long name in it."""
    name = f"model.{'deep.' * 40}weight"
    tensors = {
        WEIGHT: (torch.rand(2000, 4), [Part((0, 900)), Part((900, 2000))]),
        STATE: (torch.rand(2000), [Part((0, 2000))]),
        name: (torch.rand(5), [Part((0, 5))]),
    }
    write(tmp_path / "made", tensors, {"optimizer.lr": 0.5})
    monkeypatch.chdir(tmp_path)


def test_inspect_prints_tables_of_100_columns_and_json() -> None:
    text = fine("checkpoint", "inspect", "made")
    table = text.partition("\n\n")[2].partition("\n\n")[0]
    assert max(map(len, table.splitlines())) <= 100
    assert "2,000" in table
    assert "momentum1" in table
    assert "without a step or checksums" in text
    found = json.loads(fine("checkpoint", "inspect", "made", "--json"))
    assert found["tables"][0]["rows"] == 2000
    fine("checkpoint", "reshard", "made", "-o", "other", "--ranks", "3")
    found = json.loads(fine("checkpoint", "inspect", "other", "--json"))
    assert (found["ranks"], found["files"]) == (3, 3)


def test_verify_ends_with_1_where_a_file_is_damaged() -> None:
    assert "whole" in fine("checkpoint", "verify", "made")
    file = Path("made/__1_0.distcp")
    file.write_bytes(file.read_bytes()[:-9])
    said = oper("checkpoint", "verify", "made")
    assert said.status == 1
    assert "__1_0.distcp" in said.out
    said = oper("checkpoint", "verify", "made", "--json")
    assert said.status == 1
    assert not json.loads(said.out)["ok"]


def test_reshard_and_export_write_whole_or_not_at_all() -> None:
    content = json.loads(
        fine("checkpoint", "reshard", "made", "-o", "other", "--ranks", "2", "--json")
    )
    assert content["output"] == "other"
    refused("checkpoint reshard made -o other --ranks 2", "other", "--force")
    fine("checkpoint", "reshard", "made", "-o", "other", "--ranks", "4", "--force")
    # torch wrote it: oper did not.
    refused("checkpoint reshard other -o made --ranks 2 --force", "made", "not written by oper")
    refused("checkpoint export made --table u -o u.parquet", "'u'", "'t'")
    refused("checkpoint export made --table t -o t.csv", "t.csv", ".parquet")
    content = json.loads(
        fine("checkpoint", "export", "other", "--table", "t", "-o", "t.parquet", "--json")
    )
    assert (content["rows"], content["dim"], content["states"]) == (2000, 4, ["momentum1"])
    refused("checkpoint export made --table t -o t.parquet", "t.parquet", "--force")
    Path("made/__0_0.distcp").unlink()
    refused("checkpoint export made --table t -o again.safetensors", "__0_0.distcp")
    left = {path.name for path in Path().iterdir()}
    assert left == {"made", "other", "t.parquet"}


def test_a_folder_that_is_none_is_refused() -> None:
    for verb in ("inspect none", "verify none", "reshard none -o x --ranks 1"):
        refused(f"checkpoint {verb}", "none", "no such folder")
    Path("made/.metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    refused("checkpoint inspect made", "os.system", "was not run")
    assert not Path("ran").exists()


def test_a_delta_is_described_verified_and_made_whole() -> None:
    run = Path("run")
    base = write_base(run / "step-0", torch.rand(2000, 4), torch.rand(2000))
    ids, values = torch.tensor([3, 1999]), torch.ones(2, 4)
    write_delta(run / "step-1", ("step-0", base), ids, values, torch.ones(2), 2000)
    text = fine("checkpoint", "inspect", "run")
    assert "delta upon step-0, step 1" in text
    assert "2 of 2,000" in text
    assert "touched.t" not in text
    assert "whole" in fine("checkpoint", "verify", "run")
    fine("checkpoint", "reshard", "run", "-o", "made-whole", "--ranks", "2")
    found = json.loads(fine("checkpoint", "inspect", "made-whole", "--json"))
    assert (found["upon"], found["step"], found["tables"][0]["rows"]) == (None, 1, 2000)
    refused("checkpoint reshard run -o run/step-0 --ranks 2 --force", "step-1 is a delta upon it")
    file = run / "step-0" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-9])
    assert oper("checkpoint", "verify", "run").status == 1
    (run / "step-0").rename("elsewhere")
    refused("checkpoint verify run", "is a delta upon step-0", "put it back there")
    refused("checkpoint export run --table t -o t.parquet", "is a delta upon step-0")
