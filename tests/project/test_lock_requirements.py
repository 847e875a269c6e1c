"""Which files of a package index get into the locks: by a page of an index, as indices write it."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import install, lock_requirements
from scripts.lock_requirements import hashes, refuse_open

pytestmark = pytest.mark.check

# File -> whether its hash belongs into the lock of thing 2.0.0rc1, of which there are wheels.
PAGE = {
    "thing-2.0.0rc1-cp311-cp311-manylinux_2_28_x86_64.whl": True,
    "thing-2.0.0rc1-cp312-cp312-manylinux2014_aarch64.manylinux_2_17_aarch64.whl": True,
    "thing-2.0.0rc1-cp313-cp313-linux_x86_64.whl": True,
    "thing-2.0.0rc1-cp39-abi3-manylinux_2_28_x86_64.whl": True,
    "thing-2.0.0rc1-py3-none-any.whl": True,
    "thing-2.0.0rc1-py2.py3-none-any.whl": True,
    "thing-2.0.0rc1-py3-none-manylinux2014_x86_64.whl": True,
    "thing-2.0.0rc1-1-py3-none-any.whl": True,  # a build number
    "thing-2.0.0rc1-cp310-cp310-manylinux_2_28_x86_64.whl": False,
    "thing-2.0.0rc1-cp314-cp314-manylinux_2_28_x86_64.whl": False,
    "thing-2.0.0rc1-cp313-cp313t-manylinux_2_28_x86_64.whl": False,
    "thing-2.0.0rc1-cp314-abi3-manylinux_2_28_x86_64.whl": False,
    "thing-2.0.0rc1-pp311-pypy311_pp73-manylinux_2_28_x86_64.whl": False,
    "thing-2.0.0rc1-cp311-cp311-musllinux_1_2_x86_64.whl": False,
    "thing-2.0.0rc1-cp311-cp311-manylinux_2_28_ppc64le.whl": False,
    "thing-2.0.0rc1-cp311-cp311-macosx_11_0_arm64.whl": False,
    "thing-2.0.0rc1-cp311-cp311-win_amd64.whl": False,
    "thing-2.0.0-py3-none-any.whl": False,
    "thing-2.0.0rc1+cpu-py3-none-any.whl": False,
    "thing-2.0.0rc1.tar.gz": False,
    "thing-2.0.0.tar.gz": False,
    "thing-of-old.tar.gz": False,
    "thing-2.0.0rc1.linux-x86_64.exe": False,
    "thing-old_1-py3.whl": False,
}
DIGESTS = {name: f"{number:064x}" for number, name in enumerate(PAGE)}


def serve(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> list[Any]:
    """Answer with a page of these files; the list that comes back gets what was asked for."""
    asked: list[Any] = []
    files = [{"filename": name, "hashes": {"sha256": DIGESTS[name]}} for name in names]

    def urlopen(request: Any) -> io.BytesIO:
        asked.append(request)
        return io.BytesIO(json.dumps({"name": "thing", "files": files}).encode())

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    return asked


def package(version: str, name: str = "thing", **more: Any) -> dict[str, Any]:
    found = {"name": name, "version": version, "requires": [], "extras": [], "sha256": "f" * 64}
    return found | more


# A package's own metadata may spell its version in other ways than its files.
@pytest.mark.parametrize("version", ["2.0.0rc1", "2.0.0-rc.1", "2.0.0RC1", "v2.0.0.rc1", "2.0rc1"])
def test_the_wheels_of_supported_platforms(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    asked = serve(monkeypatch, list(PAGE))
    expected = sorted(DIGESTS[name] for name, wanted in PAGE.items() if wanted)
    assert hashes(package(version), "https://index.example/simple/") == expected
    assert asked[0].full_url == "https://index.example/simple/thing/"
    assert "json" in asked[0].get_header("Accept")


def test_the_source_archive_where_there_is_no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [name for name, wanted in PAGE.items() if not wanted]
    serve(monkeypatch, others)
    archive = DIGESTS["thing-2.0.0rc1.tar.gz"]
    assert hashes(package("2.0.0-rc1"), "https://index.example/simple") == [archive]
    serve(monkeypatch, [name for name in others if DIGESTS[name] != archive])
    assert hashes(package("2.0.0-rc1"), "https://index.example/simple") == []


def test_what_another_python_needs_is_refused() -> None:
    needs = ['rest >= 1; python_version < "3.12"', 'more; extra == "all"', "Same_Thing"]
    found = {"thing": package("1", requires=needs), "same-thing": package("2", "same-thing")}
    with pytest.raises(SystemExit, match=r"thing needs rest.*under Python 3\.11"):
        refuse_open(found)
    found["rest"] = package("1", "rest")
    refuse_open(found)
    found["thing"]["extras"] = ["all"]
    with pytest.raises(SystemExit, match="thing needs more"):
        refuse_open(found)
    never = package("1", requires=['old; python_version < "3.11"', 'x; sys_platform == "win32"'])
    refuse_open({"thing": never})


def test_locks_of_what_pip_and_the_index_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch's lock has its wheels, or the one that pip found, for its Python and machine."""
    monkeypatch.setattr(lock_requirements, "REPOSITORY", tmp_path)
    thing, torch = package("2.0.0rc1"), package("2.0.0rc1", "torch")

    def resolved(*arguments: str, settings: Any = None) -> list[dict[str, Any]]:
        return [torch] if arguments == ("-r", "requirements-cpu.txt") else [thing]

    monkeypatch.setattr(lock_requirements, "resolved", resolved)
    serve(monkeypatch, list(PAGE))
    lock_requirements.main("https://index.example/simple", None)
    line = (tmp_path / "requirements-torch.lock").read_text().split("\n")[2:]
    python = f'python_version == "3.{sys.version_info[1]}" and platform_machine == "'
    assert line[0].startswith(f"torch==2.0.0rc1 ; {python}")
    assert line[1:] == [f"    --hash=sha256:{'f' * 64}", ""]
    lock_requirements.main("https://index.example/simple", "https://torch.example/simple")
    wheels = {DIGESTS[name] for name, wanted in PAGE.items() if wanted}
    for lock, pin in [("torch", "torch"), ("cpu", "thing"), ("gpu", "thing"), ("cuda", "thing")]:
        text = (tmp_path / f"requirements-{lock}.lock").read_text()
        assert f"\n{pin}==2.0.0rc1 \\\n" in text
        assert set(re.findall("sha256:([0-9a-f]{64})", text)) == wheels
    serve(monkeypatch, [])
    with pytest.raises(SystemExit, match=r"the index has no file of thing 2\.0\.0rc1"):
        lock_requirements.main("https://index.example/simple", None)
    assert install.LOCKED_PYTHONS == (11, 12, 13)  # which the page above is made for
