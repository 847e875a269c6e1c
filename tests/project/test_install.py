"""The set-up where pip's indices lack things, without installing any."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts import install


class Pip:
    """Records what would be run in the environment; what `lacks` names cannot be had."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lacks: str) -> None:
        self.calls: list[list[str]] = []
        self._lacks = lacks
        monkeypatch.setattr(install, "run", self.run)

    def run(self, folder: Path, *arguments: str, stderr: Any = None) -> None:
        self.calls.append(list(arguments))
        for lacking in self._lacks:
            if any(lacking in argument for argument in arguments):
                raise subprocess.CalledProcessError(1, arguments)

    @property
    def installed(self) -> list[str]:
        """What was asked of `pip install`, in order."""
        found = [call[4:] for call in self.calls if call[:3] == ["-m", "pip", "install"]]
        return [argument for call in found for argument in call]


CPU = install.REPOSITORY / "requirements-cpu.txt"


def test_the_cpu_build_where_there_is_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch)
    install.install_dependencies(tmp_path, CPU, "")
    torch, other_platforms, *others = pip.installed
    assert torch.startswith("torch==")
    assert "+cpu" in torch
    assert "+cpu" not in other_platforms
    assert others == ["--requirement", str(CPU), "--no-deps", install.TORCHREC]


def test_the_default_build_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10**6)
    pip = Pip(monkeypatch, "+cpu")
    install.install_dependencies(tmp_path, CPU, "")
    assert ["-c", "import fbgemm_gpu"] in pip.calls
    installed = pip.installed[2:]  # after the attempt
    assert installed[0].startswith("torch==")
    assert "+cpu" not in installed[0]
    assert installed[1:3] == ["--requirement", str(CPU.parent / "requirements.txt")]
    pinned = [line for line in CPU.read_text().splitlines() if line[:1].isalpha()]
    assert installed[3:-2] == [line for line in pinned if not line.startswith("torch==")]
    assert installed[-2:] == ["--no-deps", install.TORCHREC]
    said = capsys.readouterr().out
    assert "torch's CPU build: installing their torch==" in said
    assert "takes 0.0 GB" in said


def test_fbgemm_of_cuda_where_that_of_the_cpu_does_not_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = Pip(monkeypatch, "+cpu", "import fbgemm_gpu")
    install.install_dependencies(tmp_path, CPU, "")
    assert ["-m", "pip", "uninstall", "--quiet", "--yes", "fbgemm-gpu-cpu"] in pip.calls
    assert any(argument.startswith("fbgemm-gpu==") for argument in pip.installed)


def test_an_index_that_was_named_is_the_only_one_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = Pip(monkeypatch, "+cpu")
    with pytest.raises(subprocess.CalledProcessError):
        install.install_dependencies(tmp_path, CPU, "https://torch.example")
    assert "https://torch.example" in pip.installed
