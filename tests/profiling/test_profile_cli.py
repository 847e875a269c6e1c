"""`oper profile` and `oper profiles`, as a user calls them."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from oper.base.errors import OperError
from oper.cli.profile_commands import profile as cli_profile
from oper.cli.profile_commands import profiles as cli_profiles
from oper.files.manifest import write_manifest
from oper.profiling import counting
from oper.profiling.profile import FORMAT, Profile
from oper.profiling.row_counters import RowCounters


@pytest.fixture
def run() -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    cli_profile.register(app)
    cli_profiles.register(app)

    def call(*arguments: object, command: str = "profile") -> dict[str, Any]:
        result = CliRunner().invoke(app, [command, *map(str, arguments), "--json"])
        if isinstance(result.exception, OperError):
            raise result.exception
        assert result.exit_code == 0, (result.output, result.exception)
        content: dict[str, Any] = json.loads(result.stdout)
        return content

    return call


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """1,000 samples of two columns, -1 for no id in one of them."""
    random = np.random.default_rng(0)
    columns = {
        "C1": (random.zipf(1.3, 1000) - 1) % 40,
        "C2": random.integers(-1, 9, 1000),
        "day": np.arange(1000) // 100 * 86_400,
    }
    pq.write_table(pa.table(columns), tmp_path / "log.parquet")
    return tmp_path / "log.parquet"


CRITEO = ("--columns", "C*", "--missing", "-1")


def test_profile_says_what_it_counted(run: Any, log: Path, tmp_path: Path) -> None:
    said = run(log, "-o", tmp_path / "p", *CRITEO, "--dim", 16, "--optimizer", "adam")
    opened = Profile.load(tmp_path / "p", check=True)
    columns = pq.read_table(log)
    kept = columns["C2"].to_numpy()
    np.testing.assert_array_equal(opened.table_accesses(1), np.bincount(kept[kept >= 0]))
    assert {(t.dim, t.optimizer, t.ids.missing) for t in opened.tables} == {(16, "adam", "-1")}
    assert said["samples"] == opened.samples == 1000
    assert said["rows"] == opened.rows
    assert said["accesses"] == opened.accesses.sum()
    assert said["rows_never_accessed"] == (opened.accesses == 0).sum()
    hottest = np.sort(opened.table_accesses(0))[::-1]
    share = 0.01 * len(hottest) * hottest[0] / hottest.sum()
    assert said["tables"][0]["hot_accesses_share"] == pytest.approx(share)
    assert [t["name"] for t in said["tables"]] == ["C1", "C2"]
    assert (said["sampled"], said["distinct"], said["skipped_ids"]) == (None, None, {})
    assert said["seconds"] > 0
    again = run("show", tmp_path / "p", "--check", command="profiles")
    assert {k: said[k] for k in again} == {**again, "profile": said["profile"]}


def test_text_is_a_table_of_at_most_100_columns(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.callback()(lambda: None)
    cli_profile.register(app)
    arguments = [str(log), "-o", "p", "--force", *CRITEO, "--batch-size", "100"]
    for more in ([], ["--windows", "3"], ["--by-column", "day", "--time-unit", "s"]):
        result = CliRunner().invoke(app, ["profile", *arguments, *more])
        assert result.exit_code == 0, result.output
        assert max(map(len, result.stdout.splitlines())) <= 100
        assert "C2" in result.stdout
    sampled = [*arguments[:-2], "--sample", "0.5"]
    result = CliRunner().invoke(app, ["profile", *sampled])
    assert "hot set" in result.stdout
    assert "balance" in result.stdout
    assert result.stderr == ""  # no progress where it is no terminal


def test_lengths_of_bags_are_shown(run: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    lengths = random.integers(0, 12, 400)
    bags = [random.integers(0, 9, n).tolist() for n in lengths]
    pq.write_table(pa.table({"one": np.arange(400) % 7, "basket": bags}), tmp_path / "b.parquet")
    said = run(tmp_path / "b.parquet", "-o", tmp_path / "p", "--hold-out", "25%", "--columns", "*")
    filled = (lengths[:300] > 0).sum()
    by_name = {table["name"]: table["bag_lengths"] for table in said["tables"]}
    assert by_name == {
        "one": {
            "bags": 300,
            "empty_share": 0,
            "mean": 1,
            "percentile_99": 1,
            "longest": 1,
            "new_share": 1,
        },
        "basket": {
            "bags": 300,
            "empty_share": (lengths[:300] == 0).mean(),
            "mean": pytest.approx(lengths[:300].mean()),
            "percentile_99": np.percentile(lengths[:300], 99, method="inverted_cdf"),
            "longest": lengths[:300].max(),
            "new_share": (sum(len(set(bag)) for bag in bags[:300]) - filled)
            / (lengths[:300].sum() - filled),
        },
    }
    last = Profile.load(tmp_path / "p").following
    assert last is not None
    assert last.bag_lengths is not None
    assert last.bag_lengths.mean_lengths[1] == pytest.approx(lengths[300:].mean())
    app = typer.Typer()
    app.callback()(lambda: None)
    cli_profiles.register(app)
    text = CliRunner().invoke(app, ["profiles", "show", str(tmp_path / "p")]).stdout
    (line,) = [line.split() for line in text.splitlines() if line.startswith("basket ")][1:]
    assert line[1] == "300"
    assert line[-2] == str(lengths[:300].max())
    assert max(map(len, text.splitlines())) <= 100
    (tmp_path / "p" / "bag_lengths.npy").unlink()  # as of a profile of an earlier oper
    marker = json.loads((tmp_path / "p" / "profile.json").read_text())
    del marker["files"]["bag_lengths.npy"]
    write_manifest(tmp_path / "p", FORMAT, marker)
    assert Profile.load(tmp_path / "p").bag_lengths is None
    again = run("show", tmp_path / "p", command="profiles")
    assert [table["bag_lengths"] for table in again["tables"]] == [None, None]


def test_a_part_of_the_log_has_the_tables_of_the_whole(run: Any, log: Path, tmp_path: Path) -> None:
    run(log, "-o", tmp_path / "whole", *CRITEO)
    run(log, "-o", tmp_path / "part", *CRITEO, "--rows", "0:10%")
    whole, part = Profile.load(tmp_path / "whole"), Profile.load(tmp_path / "part")
    assert part.tables == whole.tables
    assert part.samples == 100


def test_parts_merge_to_the_whole(run: Any, log: Path, tmp_path: Path) -> None:
    run(log, "-o", tmp_path / "whole", *CRITEO)
    run(log, "-o", tmp_path / "a", *CRITEO, "--rows", ":400")
    run(log, "-o", tmp_path / "b", "--missing", -1, "--rows", "400:", "--tables", tmp_path / "a")
    run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "both", command="profiles")
    assert Profile.load(tmp_path / "both").digest == Profile.load(tmp_path / "whole").digest
    windows = run(log, "-o", tmp_path / "w", *CRITEO, "--windows", 4)["windows"]
    assert [w["samples"] for w in windows] == [250] * 4
    assert Profile.load(tmp_path / "w").digest == Profile.load(tmp_path / "whole").digest
    spans = ("--by-column", "day", "--every", "2d", "--time-unit", "s")
    by_day = run(log, "-o", tmp_path / "d", *CRITEO, *spans)
    assert [w["samples"] for w in by_day["windows"]] == [200] * 5
    assert Profile.load(f"{tmp_path / 'd'}@4").samples == 200


@pytest.mark.parametrize("windows", [(), ("--windows", 2)])
def test_counters_in_files_make_the_same_profile(
    run: Any, log: Path, tmp_path: Path, windows: tuple[object, ...]
) -> None:
    run(log, "-o", tmp_path / "memory", *CRITEO, *windows)
    run(log, "-o", tmp_path / "files", *CRITEO, *windows, "--memory-limit", "0B")
    for path in (tmp_path / "memory").rglob("*.*"):
        other = tmp_path / "files" / path.relative_to(tmp_path / "memory")
        assert other.read_bytes() == path.read_bytes()
    assert len(list((tmp_path / "files").rglob("*"))) == len(list((tmp_path / "memory").rglob("*")))


def test_vocabularies_lie_beside_and_are_kept(run: Any, tmp_path: Path) -> None:
    values = ["red", "blue", "red", "green", "red", "blue"]
    pq.write_table(pa.table({"f": values}), tmp_path / "log.parquet")
    run(tmp_path / "log.parquet", "-o", tmp_path / "p", "--min-count", 2)
    opened = Profile.load(tmp_path / "p")
    assert opened.accesses.tolist() == [1, 3, 2]  # what is rarer, red, blue
    assert (tmp_path / "p" / "vocab" / "f.parquet").is_file()
    pq.write_table(pa.table({"f": ["blue", "white"]}), tmp_path / "more.parquet")
    run(tmp_path / "more.parquet", "-o", tmp_path / "q", "--tables", tmp_path / "p")
    assert Profile.load(tmp_path / "q").accesses.tolist() == [1, 0, 1]
    run("merge", tmp_path / "p", tmp_path / "q", "-o", tmp_path / "sum", command="profiles")
    merged = Profile.load(tmp_path / "sum")
    assert merged.accesses.tolist() == [2, 3, 3]
    assert merged.prepared().vocabularies["f"]["value"].to_pylist() == ["red", "blue"]
    run(tmp_path / "log.parquet", "-o", tmp_path / "w", "--min-count", 2, "--windows", 2)
    assert "f" in Profile.load(f"{tmp_path / 'w'}@1").prepared().vocabularies
    pq.write_table(pa.table({"f": ["blue", "blue", "red"]}), tmp_path / "other.parquet")
    run(tmp_path / "other.parquet", "-o", tmp_path / "r", "--tables", _tables(tmp_path, 3))
    with pytest.raises(OperError, match="in number 2,"):
        run("merge", tmp_path / "p", tmp_path / "r", "-o", tmp_path / "bad", command="profiles")
    assert not (tmp_path / "bad").exists()


def _tables(folder: Path, rows: int) -> Path:
    content = [{"name": "f", "rows": rows, "ids": {"kind": "vocab", "min_count": 2}}]
    (folder / "tables.json").write_text(json.dumps(content))
    return folder / "tables.json"


def test_rules_for_all_tables(run: Any, log: Path, tmp_path: Path) -> None:
    run(log, "-o", tmp_path / "p", *CRITEO, "--ids", "hash:7")
    assert [(t.rows, t.ids.kind) for t in Profile.load(tmp_path / "p").tables] == [(7, "hash")] * 2
    run(log, "-o", tmp_path / "v", *CRITEO, "--ids", "vocab", "--min-count", 50)
    assert {t.ids.kind for t in Profile.load(tmp_path / "v").tables} == {"vocab"}
    for ids in ("hash", "hash:0", "hash:x", "vocab:3", "raw"):
        with pytest.raises(OperError, match=r"`ids`|ids="):
            run(log, "-o", tmp_path / "q", *CRITEO, "--ids", ids)


def test_bad_ids_stop_or_are_counted(run: Any, log: Path, tmp_path: Path) -> None:
    (tmp_path / "t.yaml").write_text("- {name: C1, rows: 40}\n- {name: C2, rows: 5}\n")
    arguments = (log, "-o", tmp_path / "p", *CRITEO, "--tables", tmp_path / "t.yaml")
    with pytest.raises(
        OperError, match=r"log\.parquet, row \d+: expected ids .* in column 'C2', .*got [5-8];"
    ):
        run(*arguments)
    assert not (tmp_path / "p").exists()
    said = run(*arguments, "--on-bad-id", "skip")
    values = pq.read_table(log)["C2"].to_numpy()
    assert said["skipped_ids"] == {"C2": int((values >= 5).sum())}
    assert said["tables"][1]["accesses"] == ((values >= 0) & (values < 5)).sum()
    assert run("show", tmp_path / "p", command="profiles")["skipped_ids"] == said["skipped_ids"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--sample", "0.5", "--batch-size", "10"), "`sample` with `batch_size`"),
        (("--sample", "2"), "`sample`"),
        (("--batch-size", "1001"), "batch_size=1001"),
        (("--windows", "1001"), "windows=1001"),
        (("--windows", "2", "--by-column", "day"), "give one of them"),
        (("--by-column", "absent"), "absent"),
        (("--by-column", "day", "--every", "x"), "`every`"),
        (("--tables", "absent"), "absent"),
        (("--memory-limit", "some"), "`memory_limit`"),
        (("--rows", "5:5"), "rows="),
    ],
)
def test_impossible_requests_leave_nothing(
    run: Any, log: Path, tmp_path: Path, arguments: tuple[str, ...], named: str
) -> None:
    with pytest.raises(OperError) as raised:
        run(log, "-o", tmp_path / "p", *CRITEO, *arguments)
    assert named in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["log.parquet"]


def test_damaged_logs_leave_nothing(run: Any, tmp_path: Path) -> None:
    lines = "".join("\t".join(["1", *["2"] * 13, *["0a"] * 26]) + "\n" for _ in range(5000))
    packed = gzip.compress(lines.encode())
    (tmp_path / "day.gz").write_bytes(packed[: len(packed) // 2])
    for place in ("p", "q"):
        with pytest.raises(OperError, match=r"day\.gz"):
            run(tmp_path / "day.gz", "-o", tmp_path / place)
    assert [p.name for p in tmp_path.iterdir()] == ["day.gz"]


def test_interrupted_in_the_middle(
    run: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(log, "-o", tmp_path / "p", *CRITEO)
    before = Profile.load(tmp_path / "p").digest

    class Interrupted(RowCounters):
        def add(self, *_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(counting, "RowCounters", Interrupted)
    with pytest.raises(AssertionError, match=r"KeyboardInterrupt|130|Abort"):
        run(log, "-o", tmp_path / "p", "--force", *CRITEO, "--memory-limit", "0B")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.parquet", "p"]
    assert Profile.load(tmp_path / "p", check=True).digest == before


def test_other_folders_are_not_overwritten(run: Any, log: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(OperError, match="not overwritten"):
        run(log, "-o", tmp_path / "mine", *CRITEO)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"


def test_windows_are_not_counted_under_torchrun(
    run: Any, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(OperError, match="not under torchrun"):
        run(log, "-o", tmp_path / "p", *CRITEO, "--windows", 2)
