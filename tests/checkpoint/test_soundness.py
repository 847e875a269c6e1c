"""Every reader refuses a checkpoint whose files, markers and rows do not belong together."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oper.base.errors import OperError
from oper.checkpoint.describe import describe
from oper.checkpoint.export import export
from oper.checkpoint.marker import FORMAT, Marker, newest
from oper.checkpoint.reshard import reshard
from oper.checkpoint.saved_index import INDEX
from oper.checkpoint.soundness import open_chain
from oper.checkpoint.verify import verify
from oper.files.manifest import describe_files
from tests.checkpoint.test_chain import chain_of_two
from tests.support.checkpoint.delta_folders import write_base, write_delta
from tests.support.checkpoint.saved_folders import STATE, WEIGHT


def without_marker(run: Path) -> None:
    (run / "delta" / FORMAT.marker).unlink()


def remarked(run: Path, **changes: Any) -> None:
    """The delta's marker with other fields, and a digest that is right."""
    marker = Marker.read(run / "delta")
    (run / "delta" / FORMAT.marker).unlink()
    replace(marker, **changes).write(run / "delta")


def marker_of_a_whole_one(run: Path) -> None:
    remarked(run, delta=None)


def with_tables(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        delta = Marker.read(run / "delta").delta
        assert delta is not None
        tables = json.loads(json.dumps(delta.tables))
        change(tables)
        remarked(run, delta=replace(delta, tables=tables))

    return damage


def copied_marker(run: Path) -> None:
    shutil.copy(run / "base" / FORMAT.marker, run / "delta" / FORMAT.marker)


def marker_of_another_step(run: Path) -> None:
    """Return the marker of a delta of the same base with the same rows."""
    base = Marker.read(run / "base")
    given = (torch.tensor([2, 5, 9]), torch.rand(3, 2), torch.rand(3))
    write_delta(run.parent / "other", ("base", base), *given, 10, [2], step=2)
    (run.parent / "other" / "__5_0.distcp").write_bytes(b"")  # no reader looks at it
    shutil.copy(run.parent / "other" / FORMAT.marker, run / "delta" / FORMAT.marker)


def index_of_another_step(run: Path) -> None:
    marker_of_another_step(run)
    marker = Marker.read(run / "delta")
    remarked(run, files={**marker.files, INDEX: marker.files[INDEX] | {"sha256": "0" * 64}})


def cut(run: Path) -> None:
    file = run / "delta" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])


def removed(run: Path) -> None:
    (run / "base" / "__0_0.distcp").unlink()


def unlisted(run: Path) -> None:
    files = Marker.read(run / "delta").files
    remarked(run, files={name: files[name] for name in files if name != "__0_0.distcp"})


def long_name(run: Path) -> None:
    delta = Marker.read(run / "delta").delta
    assert delta is not None
    remarked(run, delta=replace(delta, upon="x" * 6000))


def long_file(run: Path) -> None:
    remarked(run, files={"y" * 6000: {"bytes": 1, "sha256": "0" * 64}})


def no_base(run: Path) -> None:
    shutil.rmtree(run / "base")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "without a marker": (
        without_marker,
        "delta: has the files of a delta, and its .* is missing",
    ),
    "a whole one's marker": (
        marker_of_a_whole_one,
        "whole checkpoint, and the files are of a delta",
    ),
    "a copied marker": (copied_marker, "it was changed, or is of another checkpoint"),
    "a marker of another step": (marker_of_another_step, r"is not that of this \.metadata"),
    "an index of another step": (index_of_another_step, r"is not that of this \.metadata"),
    "a file cut": (cut, r"__0_0\.distcp: .* truncated"),
    "a file removed": (removed, r"__0_0\.distcp: is missing"),
    "a file unlisted": (unlisted, r"does not list '__0_0\.distcp'"),
    "no base": (no_base, "is a delta upon base, and .* holds no checkpoint"),
    "a long name": (long_name, "invalid or missing step, plan, ranks, files, delta or ids"),
    "a long file": (long_file, "is no file of the folder"),
    "a table unnamed": (with_tables(lambda t: t.pop("t")), "lacks the table 't'"),
    "a state unnamed": (with_tables(lambda t: t["t"]["tensors"].remove(STATE)), "lacks 'optimizer"),
    "a weight unnamed": (with_tables(lambda t: t["t"]["tensors"].remove(WEIGHT)), "lacks 'model"),
    "a tensor too many": (with_tables(lambda t: t["t"]["tensors"].append("x")), "has no 'x'"),
    "rows too many": (with_tables(lambda t: t["t"].update(rows=11)), "have row 10"),
    "rows too few": (with_tables(lambda t: t["t"].update(rows=9)), "it has row 9 of 9"),
}


def assert_refused(folder: Path, run: Path, message: str) -> None:
    """All readers refuse a checkpoint by the same words, and write nothing."""
    output = run.parent / "output"
    readers: list[Callable[[], object]] = [
        lambda: open_chain(folder),
        lambda: describe(folder),
        lambda: reshard(folder, output, 2),
        lambda: export(folder, "t", run.parent / "t.parquet"),
    ]
    for read in readers:
        with pytest.raises(OperError, match=message):
            read()
    assert not output.exists()
    assert not (run.parent / "t.parquet").exists()
    try:
        problems = verify(folder).problems
    except OperError as error:
        problems = [str(error)]
    assert any(re.search(message, problem) for problem in problems), problems


@pytest.mark.parametrize("name", DAMAGES)
def test_all_readers_refuse_what_does_not_belong_together(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    run = tmp_path / "run"
    delta, _ = chain_of_two(run)
    assert verify(delta).ok
    damage(run)
    assert_refused(delta, run, message)


@pytest.mark.parametrize("ids", [[5, 2, 9], [2, 2, 9], [-1, 2, 9], [2, 5, 10]])
def test_all_readers_refuse_rows_that_no_saver_writes(tmp_path: Path, ids: list[int]) -> None:
    delta, _ = chain_of_two(tmp_path / "run", ids)
    assert_refused(delta, tmp_path / "run", "'touched.t': its rows do not ascend|has row 10 of 10")


def test_a_delta_without_its_marker_is_never_passed_over(tmp_path: Path) -> None:
    run = tmp_path / "run"
    chain_of_two(run)
    without_marker(run)
    for folder in (run, run / "delta"):
        with pytest.raises(OperError, match="delta: has the files of a delta, and its checkpoint"):
            newest(folder)


def test_a_shard_file_of_another_save_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        write_base(tmp_path / f"base-{number}", torch.rand(10, 2), torch.rand(10))
        reshard(tmp_path / f"base-{number}", tmp_path / "run" / str(number), 2)
    assert verify(tmp_path / "run" / "1").ok
    shutil.copy(tmp_path / "run" / "0" / "__1_0.distcp", tmp_path / "run" / "1" / "__1_0.distcp")
    assert_refused(tmp_path / "run" / "1", tmp_path / "run", r"__1_0\.distcp: is of another save")


def test_checkpoints_of_older_versions_are_read(tmp_path: Path) -> None:
    """Their markers have no bytes of the save, and a delta's files no name of the base."""
    delta, base = chain_of_two(tmp_path / "run")
    assert base.save is None
    assert '"save"' not in (delta / FORMAT.marker).read_text()
    assert verify(delta).ok
    assert Marker.read(delta).files.keys() == describe_files(delta).keys() - {FORMAT.marker}
