"""Set-up with locks, without them and after an interruption; nothing is installed."""

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from scripts import install

pytestmark = pytest.mark.check


class Pip:
    """A record of the commands for the environment; commands that name a lacking package fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *lacks: str) -> None:
        self.calls: list[list[str]] = []
        self._lacks = lacks
        monkeypatch.setattr(install, "run", self.run)

    def run(self, folder: Path, *arguments: str, stderr: Any = None) -> None:
        self.calls.append(list(arguments))
        for lacking in self._lacks:
            if any(lacking in argument for argument in arguments):
                raise subprocess.CalledProcessError(
                    1, arguments, stderr="WARNING: x\nERROR: a reason\nERROR: more"
                )

    @property
    def installed(self) -> list[str]:
        """Arguments of all `pip install` commands, in order."""
        found = [call[5:] for call in self.calls if call[:3] == ["-m", "pip", "install"]]
        return [argument for call in found for argument in call]


CPU = install.REPOSITORY / "requirements-cpu.txt"


LOCKED = ["--no-deps", "--require-hashes", "--requirement"]
TORCH_LOCK = CPU.with_name("requirements-torch.lock")


def pins(requirements: Path) -> dict[str, str]:
    """Return name -> version of a file of requirements and of the files that it includes."""
    found: dict[str, str] = {}
    for line in requirements.read_text().splitlines():
        if line.startswith("-r "):
            found |= pins(requirements.with_name(line[3:]))
        elif line[:1].isalpha() and 'sys_platform != "linux"' not in line:
            name, version = re.split("==", line.split(" ")[0])
            found[re.sub(r"[-_.]+", "-", name.split("[")[0]).lower()] = version
    return found


def locked(*locks: Path) -> dict[str, list[str]]:
    """Return name and version -> hashes."""
    text = "".join(lock.read_text() for lock in locks)
    entries = re.findall(
        r"^([a-z0-9-]+==\S+)(?: ; [^\\]+)? \\\n((?:    --hash=sha256:[0-9a-f]{64}[ \\]*\n)+)",
        text,
        re.M,
    )
    assert len(entries) == len(re.findall("^[a-z]", text, re.M)), "each has hashes"
    return {pin: re.findall("[0-9a-f]{64}", hashes) for pin, hashes in entries}


@pytest.mark.parametrize("variant", ["cpu", "gpu", "cuda"])
def test_locks_hold_what_is_pinned(variant: str) -> None:
    """After a change of pins: python -m scripts.lock_requirements."""
    requirements = CPU.with_name(f"requirements-{variant}.txt")
    locks = [requirements.with_suffix(".lock"), *([TORCH_LOCK] if variant == "cpu" else [])]
    versions = dict(pin.split("==") for pin in locked(*locks))
    for name, version in pins(requirements).items():
        assert versions[name].removesuffix(".0") == version.removesuffix(".0"), name
    assert len(versions) > len(pins(requirements)), "and what those need"
    if variant == "cpu":
        assert f"torchrec=={versions['torchrec']}" == install.TORCHREC
        assert "fbgemm-gpu" not in versions


def test_the_files_of_the_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pip = Pip(monkeypatch)
    install.install_dependencies(tmp_path, CPU, "")
    assert pip.installed == [*LOCKED, str(TORCH_LOCK), *LOCKED, str(CPU.with_suffix(".lock"))]
    pip = Pip(monkeypatch)
    gpu = CPU.with_name("requirements-gpu.txt")
    install.install_dependencies(tmp_path, gpu, "")
    assert pip.installed == [*LOCKED, str(gpu.with_suffix(".lock"))]
    pip = Pip(monkeypatch)
    install.install_compiler(tmp_path)
    assert pip.installed == [*LOCKED, str(CPU.with_name("requirements-cuda.lock"))]


def test_without_hashes_where_the_indices_have_other_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip(monkeypatch, ".lock")
    install.install_dependencies(tmp_path, CPU, "")
    torch, other_platforms, *others = pip.installed[len(LOCKED) + 1 : -8] + pip.installed[-4:]
    assert torch.startswith("torch==")
    assert "+cpu" in torch
    assert "+cpu" not in other_platforms
    assert others == ["--requirement", str(CPU), "--no-deps", install.TORCHREC]
    said = capsys.readouterr().out
    for lock in ("requirements-torch.lock", "requirements-cpu.lock"):
        assert f"{lock} cannot be used here (a reason)" in said
    assert said.count("without hashes") == 2


def make_wheel(folder: Path) -> str:
    """Write a wheel `tiny` of version 1.0, and return its SHA-256."""
    info = "tiny-1.0.dist-info"
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.mark.parametrize("platform_is_locked", [True, False])
def test_files_of_another_hash_end_the_set_up(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    platform_is_locked: bool,
) -> None:
    """pip's own text shows that the hash differs."""

    def run(folder: Path, *arguments: str, stderr: int | None = None) -> None:
        options = ["--no-index", "--find-links", str(folder), "--target", str(folder / "to")]
        asked = [sys.executable, *arguments, *options]
        subprocess.run(asked, stderr=stderr, text=True, check=True)

    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(install, "is_locked_platform", lambda: platform_is_locked)
    right, lock = make_wheel(tmp_path), tmp_path / "some.lock"
    lock.write_text(f"tiny==1.0 --hash=sha256:{right}\n")
    assert install.install_locked(tmp_path, lock)
    lock.write_text(f"tiny==2.0 --hash=sha256:{right}\n")
    assert not install.install_locked(tmp_path, lock)
    assert "some.lock cannot be used here (Could not find" in capsys.readouterr().out
    lock.write_text(f"tiny==1.0 --hash=sha256:{'0' * 64}\n")
    if platform_is_locked:
        with pytest.raises(SystemExit, match=r"the SHA-256 of tiny==1\.0 from file.*whl is not"):
            install.install_locked(tmp_path, lock)
    else:  # whose files nobody has listed
        assert not install.install_locked(tmp_path, lock)


@pytest.mark.parametrize(
    ("python", "machine", "system", "locked"),
    [
        ((3, 11, 4), "x86_64", "linux", True),
        ((3, 13, 0), "aarch64", "linux", True),
        ((3, 14, 0), "x86_64", "linux", False),
        ((3, 12, 0), "ppc64le", "linux", False),
        ((3, 12, 0), "x86_64", "darwin", False),
    ],
)
def test_platforms_of_the_locks(
    monkeypatch: pytest.MonkeyPatch, python: Any, machine: str, system: str, locked: bool
) -> None:
    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert install.is_locked_platform() == locked


def test_torch_where_its_lock_is_for_another_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """pip skips the line without a message."""
    pip = Pip(monkeypatch, "importlib.metadata")
    install.install_dependencies(tmp_path, CPU, "")
    torch = pip.installed[len(LOCKED) + 1]
    assert torch.startswith("torch==")
    assert "without its hash" in capsys.readouterr().out


def test_the_default_build_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10**6)
    pip = Pip(monkeypatch, "+cpu", "torch.lock")
    install.install_dependencies(tmp_path, CPU, "")
    assert ["-c", "import fbgemm_gpu"] in pip.calls
    installed = pip.installed[len(LOCKED) + 3 :]  # after the attempts
    assert installed[0].startswith("torch==")
    assert "+cpu" not in installed[0]
    assert installed[1:] == [*LOCKED, str(CPU.with_suffix(".lock"))]
    pip = Pip(monkeypatch, "+cpu", ".lock")
    install.install_dependencies(tmp_path, CPU, "")
    installed = pip.installed[2 * len(LOCKED) + 5 :]
    assert installed[:2] == ["--requirement", str(CPU.parent / "requirements.txt")]
    pinned = [line for line in CPU.read_text().splitlines() if line[:1].isalpha()]
    assert installed[2:-2] == [line for line in pinned if not line.startswith("torch==")]
    assert installed[-2:] == ["--no-deps", install.TORCHREC]
    said = capsys.readouterr().out
    assert "torch's CPU build: installing their torch==" in said
    assert "takes 0.0 GB" in said


def test_fbgemm_of_cuda_where_that_of_the_cpu_does_not_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = Pip(monkeypatch, "+cpu", "torch.lock", "import fbgemm_gpu")
    install.install_dependencies(tmp_path, CPU, "")
    assert ["-m", "pip", "uninstall", "--quiet", "--yes", "fbgemm-gpu-cpu"] in pip.calls
    assert any(argument.startswith("fbgemm-gpu==") for argument in pip.installed)


def test_an_index_that_was_named_is_the_only_one_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = Pip(monkeypatch, "+cpu", "torch.lock")
    with pytest.raises(subprocess.CalledProcessError):
        install.install_dependencies(tmp_path, CPU, "https://torch.example")
    assert "https://torch.example" in pip.installed


@pytest.fixture
def checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder that set-ups take for their checkout, with the files that they read."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("requirements*", "pyproject.toml", "setup.py"):
        for path in install.REPOSITORY.glob(name):
            shutil.copy(path, folder)
    (folder / "scripts").mkdir()
    script = shutil.copy(install.__file__, folder / "scripts")
    monkeypatch.setattr(install, "REPOSITORY", folder)
    monkeypatch.setattr(install, "__file__", str(script))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # which the set-up changes
    return folder


def test_the_extension_is_built_before_pip_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, checkout: Path, tmp_path: Path
) -> None:
    """pip hides the output of builds, so a set-up leaves it nothing to compile."""
    environment = tmp_path / "venv"
    made: list[Path] = []

    def create(folder: Path, with_pip: bool) -> None:
        made.append(folder)
        assert with_pip
        (folder / "bin").mkdir(parents=True, exist_ok=True)
        (folder / "bin/python").touch()
        if len(made) == 1:
            raise KeyboardInterrupt
        (folder / "bin/pip").touch()

    monkeypatch.setattr("venv.create", create)
    build, editable = ["setup.py", "--quiet", "build_ext", "--inplace"], "--editable"
    with pytest.raises(KeyboardInterrupt):
        install.main(environment, "cpu", "")
    # An environment without pip is made again.
    pip = Pip(monkeypatch)
    install.main(environment, "cpu", "")
    assert made == [environment, environment]
    assert pip.calls.index(build) == len(pip.calls) - 2
    assert editable in pip.calls[-1]
    # The next set-up only looks for changes of the sources.
    pip = Pip(monkeypatch)
    install.main(environment, "cpu", "")
    assert pip.calls == [build]
    (checkout / "pyproject.toml").write_text("")
    pip = Pip(monkeypatch)
    install.main(environment, "cpu", "")
    assert pip.calls[0] == build
    assert editable in pip.calls[1]


def test_temporary_files_of_a_set_up_do_not_outlive_the_next(
    checkout: Path, tmp_path: Path
) -> None:
    """A killed set-up cannot remove its own files."""
    before = sorted(tmp_path.iterdir())
    leave = [sys.executable, "-c", "import tempfile; print(tempfile.mkdtemp())"]
    killed = checkout / "build/temporary/killed"
    killed.mkdir(parents=True)
    with install.one_at_a_time():
        assert not killed.exists()
        left = subprocess.run(leave, capture_output=True, text=True, check=True).stdout.strip()
        assert Path(left).parent == checkout / "build/temporary"
        assert Path(left).is_dir()
    assert not Path(left).exists()
    with suppress(KeyboardInterrupt), install.one_at_a_time():
        left = subprocess.run(leave, capture_output=True, text=True, check=True).stdout.strip()
        assert Path(left).is_dir()
        raise KeyboardInterrupt
    assert not Path(left).exists()
    assert sorted(tmp_path.iterdir()) == before


def test_a_set_up_waits_for_another_of_its_checkout(
    monkeypatch: pytest.MonkeyPatch, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ExitStack() as first:
        first.enter_context(install.one_at_a_time())
        monkeypatch.setattr("time.sleep", lambda seconds: first.close())
        with install.one_at_a_time():
            assert (checkout / "build/temporary").is_dir()
    message = f"waiting for the set-up of process {os.getpid()}, which uses this checkout"
    assert capsys.readouterr().out == f"[install] {message}, for at most 60 minutes\n"


def test_a_set_up_waits_for_another_until_a_deadline(
    monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    monkeypatch.setattr(install, "LOCK_SECONDS", 0.6)
    with install.one_at_a_time():
        file = checkout / "build/temporary/of the first"
        file.touch()
        with pytest.raises(SystemExit) as ended, install.one_at_a_time():
            pytest.fail("two set-ups have the lock")
        assert file.exists()
    assert f"expected an end of the set-up of process {os.getpid()}," in str(ended.value)
    with install.one_at_a_time():
        assert not file.exists()


@pytest.mark.parametrize(
    ("cxx", "found"), [("", "c++"), ("  ", "c++"), ("clang++-99 -stdlib=x", "clang++-99")]
)
def test_a_set_up_without_a_compiler_says_which_one_it_looked_for(
    monkeypatch: pytest.MonkeyPatch, cxx: str, found: str
) -> None:
    monkeypatch.setenv("CXX", cxx)
    asked: list[str] = []
    monkeypatch.setattr("shutil.which", lambda name: asked.append(name))
    with pytest.raises(SystemExit) as refused:
        install.check_tools("cpu")
    assert f"expected a C++20 compiler; found no {cxx.strip() or 'c++'}:" in str(refused.value)
    assert asked == [found]


@pytest.mark.parametrize("part", ["ensurepip", "Python.h"])
def test_a_set_up_without_a_part_of_python_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    """Debian has both in packages of their own."""
    if part == "ensurepip":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    else:
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match=rf"found no .*{part}: install .*apt-get install python3-"):
        install.check_tools("cpu")


def test_a_place_that_cannot_be_written_to_is_named(checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"VENV: expected a folder to write to, got .*/file/venv"):
        install.main(tmp_path / "file/venv", "cpu", "")


BROWSER = ("chromium", "chromedriver")


def browser_setup(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], root: bool, fails: str = ""
) -> list[list[str]]:
    """Return the commands that the set-up runs if `there` is on the path and the command `fails`
    fails."""
    ran = []

    def run(command: list[str], **options: Any) -> None:
        ran.append(command)
        if fails and fails in command:
            raise subprocess.CalledProcessError(100, command)

    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)
    monkeypatch.setattr("subprocess.run", run)
    install.install_browser()
    return ran


@pytest.mark.parametrize(
    ("there", "root", "fails", "commands", "said"),
    [
        (BROWSER, True, "", [], ""),
        (("apt-get",), True, "", ["update", "install"], "installing Chromium"),
        (("apt-get", "chromium"), True, "", ["update", "install"], "installing Chromium"),
        (("apt-get",), True, "update", ["update"], "apt-get update failed"),
        (("apt-get",), True, "install", ["update", "install"], "apt-get install failed"),
        (("apt-get",), False, "", [], "no chromium and no chromedriver"),
        (("chromium",), True, "", [], "no chromedriver: tests of pages are skipped"),
    ],
)
def test_the_browser_is_installed_where_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: tuple[str, ...],
    root: bool,
    fails: str,
    commands: list[str],
    said: str,
) -> None:
    ran = browser_setup(monkeypatch, there, root, fails)
    assert [next(part for part in command if part in ("update", "install")) for command in ran] == (
        commands
    )
    printed = capsys.readouterr().out
    assert said in printed
    assert bool(printed) == bool(said)
