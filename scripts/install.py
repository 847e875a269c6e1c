"""Set-up behind `make install`: environment, pinned dependencies, extension, project.

    python3 scripts/install.py VENV auto|cpu|gpu
    python3 scripts/install.py VENV compiler        for the tests: a CUDA compiler as well
    python3 scripts/install.py VENV browser         for the tests: Chromium, if apt has it

Each step leaves a stamp, the hash of its inputs, and is skipped while they are unchanged; setup.py
keeps the extension's objects. An interrupted set-up continues at the interrupted step. Only the
standard library is used, because nothing else is installed yet.
"""

from __future__ import annotations  # an older Python must reach the error message

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

REPOSITORY = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
# The locks list files for these; for others pip finds files that no lock lists.
LOCKED_PYTHONS = (11, 12, 13)  # 3.11, …
LOCKED_MACHINES = ("x86_64", "aarch64")  # under Linux
TORCHREC = "torchrec==1.8.0"
BROWSER_PACKAGES = ("--no-install-recommends", "chromium", "chromium-driver", "fonts-dejavu-core")
APT_SECONDS = 600
LOCK_SECONDS = 3600  # a set-up on a busy machine of two cores took 26 minutes


def main(folder: Path, variant: str, torch_index: str) -> None:
    check_tools(variant)
    if variant == "auto":
        variant = "gpu" if has_cuda_device() else "cpu"
    if not (folder / "bin" / "pip").exists():  # the last file that venv writes
        say(f"creating {folder} with Python {sys.version.split()[0]}")
        try:
            venv.create(folder, with_pip=True)
        except OSError as problem:
            fail(f"VENV: expected a folder to write to, got {folder}: {problem}")

    requirements = REPOSITORY / f"requirements-{variant}.txt"
    locks = [requirements.with_suffix(".lock")]
    if variant == "cpu":
        locks.append(REPOSITORY / "requirements-torch.lock")
    pinned = [REPOSITORY / "requirements.txt", requirements, *locks]
    pins = contents_hash(Path(__file__), *pinned)
    if is_stale(folder / "dependencies.stamp", pins):
        say(f"installing what {requirements.name} pins (some minutes, once)")
        install_dependencies(folder, requirements, torch_index)
        compile_bytecode(folder)
        (folder / "dependencies.stamp").write_text(pins)

    # Here and not by pip, which would hide the progress.
    run(folder, "setup.py", "--quiet", "build_ext", "--inplace")
    metadata = contents_hash(REPOSITORY / "pyproject.toml", REPOSITORY / "setup.py")
    if is_stale(folder / "project.stamp", metadata):
        say("installing oper from this checkout")
        pip(folder, "--no-deps", "--no-build-isolation", "--editable", str(REPOSITORY))
        (folder / "project.stamp").write_text(metadata)
    say(f"oper is ready in {folder} ({variant})")


def check_tools(variant: str) -> None:
    if variant not in ("auto", "cpu", "gpu"):
        fail(f"VARIANT: expected auto, cpu or gpu, got {variant!r}")
    if sys.version_info < OLDEST_PYTHON:
        fail(
            f"expected Python {'.'.join(map(str, OLDEST_PYTHON))} or newer, got "
            f"{sys.version.split()[0]} ({sys.executable}): name another, as in make install "
            "PYTHON=python3.12"
        )
    # Debian and Ubuntu have parts of Python in separate packages.
    if importlib.util.find_spec("ensurepip") is None:
        fail(
            f"expected {sys.executable} to make environments with pip; found no ensurepip: "
            "install it (Debian, Ubuntu: apt-get install python3-venv)"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        fail(
            f"expected the headers of {sys.executable}; found no {header}: install them (Debian, "
            "Ubuntu: apt-get install python3-dev)"
        )
    compiler = os.environ.get("CXX", "").strip() or "c++"
    if shutil.which(compiler.split()[0]) is None:
        fail(f"expected a C++20 compiler; found no {compiler}: install one, or set CXX to its name")


def has_cuda_device() -> bool:
    """Return whether the driver shows a device and nvcc is there to build for it."""
    if shutil.which("nvidia-smi") is None or shutil.which("nvcc") is None:
        return False
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return listing.returncode == 0 and "GPU" in listing.stdout


def install_dependencies(folder: Path, requirements: Path, torch_index: str) -> None:
    """Install the files in the lock of `requirements`. If pip cannot, print that and install the
    pinned versions from its indices."""
    default_torch = False
    if requirements.name == "requirements-cpu.txt":
        default_torch = install_torch(folder, requirements, torch_index)
    if not install_locked(folder, requirements.with_suffix(".lock")):
        install_unlocked(folder, requirements, default_torch)
    if not default_torch:
        return
    try:
        run(folder, "-c", "import fbgemm_gpu", stderr=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        fbgemm = next(line for line in pins_of(requirements) if line.startswith("fbgemm-gpu-cpu=="))
        of_cuda = fbgemm.replace("-cpu", "")
        say(f"{fbgemm} does not load under that torch: installing {of_cuda} in its place")
        run(folder, "-m", "pip", "uninstall", "--quiet", "--yes", "fbgemm-gpu-cpu")
        pip(folder, of_cuda)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(f"{folder} takes {size / 1e9:.1f} GB")


def install_locked(folder: Path, lock: Path, *options: str) -> bool:
    """Install the files of `lock`, which lists all packages that are needed, and return whether pip
    could. End the set-up if a file that the lock should list has another SHA-256."""
    try:
        locked = ("--no-deps", "--require-hashes", "--requirement", str(lock), *options)
        pip(folder, *locked, stderr=subprocess.PIPE)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "").splitlines()
        if any("DO NOT MATCH THE HASHES" in line for line in said) and is_locked_platform():
            files = [line.split("(from -r")[0].strip() for line in said if " (from -r " in line]
            fail(
                f"{lock.name}: the SHA-256 of {' and '.join(files)} is not among those listed: "
                "somebody changed the file, or pip's index has another build. Nothing of it was "
                "installed. If you trust that index, renew the locks by it: "
                "python3 -m scripts.lock_requirements INDEX (see CONTRIBUTING.md)"
            )
        errors = [line for line in said if line.startswith("ERROR:")]
        reason = errors[0].removeprefix("ERROR:").strip() if errors else "pip failed"
        say(f"{lock.name} cannot be used here ({reason}): installing these versions without hashes")
        return False
    return True


def is_locked_platform() -> bool:
    """Return whether the locks list files for this Python and machine."""
    locked = sys.version_info[0] == 3 and sys.version_info[1] in LOCKED_PYTHONS
    return locked and sys.platform == "linux" and platform.machine() in LOCKED_MACHINES


def install_unlocked(folder: Path, requirements: Path, default_torch: bool) -> None:
    """Install the pinned versions and the dependencies that pip finds for them."""
    if default_torch:
        pip(folder, "--requirement", str(requirements.with_name("requirements.txt")))
        pip(folder, *(pin for pin in pins_of(requirements) if not pin.startswith("torch==")))
    else:
        pip(folder, "--requirement", str(requirements))
    if requirements.name == "requirements-cpu.txt":
        # With its dependencies it would bring fbgemm-gpu: see requirements-cpu.txt.
        pip(folder, "--no-deps", TORCHREC)


def install_torch(folder: Path, requirements: Path, torch_index: str) -> bool:
    """Install torch's CPU build, locked or not. Return True if the indices have no CPU build: then
    torch is their default, for Linux mostly a CUDA build, which runs on CPUs too."""
    # The CPU build may be in a separate index, which is used for torch alone: if it were
    # unreachable, pip would wait for it once per package.
    index = ("--extra-index-url", torch_index) if torch_index else ()
    lock = requirements.with_name("requirements-torch.lock")
    torch = [line for line in pins_of(requirements) if line.startswith("torch==")]
    if install_locked(folder, lock, *index):
        if has_version(folder, "torch", torch[0].split(" ;")[0].removeprefix("torch==")):
            return False
        say(f"{lock.name} has no file for this Python: installing that version without its hash")
    if torch_index:
        pip(folder, *torch, *index)
        return False
    try:
        pip(folder, *torch, stderr=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        cpu_build = torch[0].split(" ;")[0]
        default = cpu_build.split("+")[0]
        say(
            f"pip's indices have no {cpu_build}, torch's CPU build: installing their {default}, "
            "which runs on CPUs too and may bring 3 GB of CUDA libraries. For the small one: "
            "make install TORCH_INDEX=URL, with the index that PyTorch's installation page names"
        )
        pip(folder, default)
        return True
    return False


def has_version(folder: Path, package: str, version: str) -> bool:
    """Return whether a package is installed: pip skips a lock's lines for other Pythons."""
    has = f"import importlib.metadata as m; assert m.version({package!r}) == {version!r}"
    try:
        run(folder, "-c", has, stderr=subprocess.DEVNULL)
    except subprocess.CalledProcessError:
        return False
    return True


def pins_of(requirements: Path) -> list[str]:
    """Return the requirements in a file, without comments and included files."""
    lines = requirements.read_text().splitlines()
    return [line for line in lines if line and not line.startswith(("#", "-r "))]


def install_compiler(folder: Path) -> None:
    """Install a CUDA compiler. Without it device kernels are tested in the emulator only."""
    requirements = REPOSITORY / "requirements-cuda.txt"
    lock = requirements.with_suffix(".lock")
    pins = contents_hash(requirements, lock)
    if not is_stale(folder / "compiler.stamp", pins):
        return
    say(f"installing what {requirements.name} pins: a CUDA compiler, which needs no device")
    try:
        if not install_locked(folder, lock):
            pip(folder, "--requirement", str(requirements), stderr=subprocess.DEVNULL)
        (folder / "compiler.stamp").write_text(pins)
    except subprocess.CalledProcessError:
        say(
            f"pip finds no {requirements.name} here: the tests that compile kernels for devices "
            "use nvcc of the path or of /usr/local/cuda, or are skipped"
        )


def install_browser() -> None:
    """Install Chromium and its driver from the system's packages: tests open reports in it."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if not missing:
        return
    by_hand = "apt-get install chromium chromium-driver"
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        say(f"no {' and no '.join(missing)}: tests of pages are skipped; on Debian: {by_hand}")
        return
    say("installing Chromium, in which the tests open reports")
    for command in (["update"], ["install", "--yes", *BROWSER_PACKAGES]):
        try:
            subprocess.run(
                ["apt-get", "--quiet", "--quiet", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                timeout=APT_SECONDS,
                check=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            say(f"apt-get {command[0]} failed: tests of pages are skipped; by hand: {by_hand}")
            return


def compile_bytecode(folder: Path) -> None:
    """Compile the packages on all processors. pip would use one, and take more time for it than for
    everything else. Packages' own tests are a fifth of the files and are skipped; so are files for
    other Pythons, which do not compile."""
    run(
        folder,
        "-c",
        "import compileall, re, sysconfig\n"
        "packages, tests = sysconfig.get_path('purelib'), re.compile('/tests?/')\n"
        "compileall.compile_dir(packages, rx=tests, quiet=2, workers=0)",
    )


def pip(folder: Path, *arguments: str, stderr: int | None = None) -> None:
    command = ("-m", "pip", "install", "--quiet", "--no-compile")
    run(folder, *command, *arguments, stderr=stderr)


def run(folder: Path, *arguments: str, stderr: int | None = None) -> None:
    """Run the environment's Python."""
    command = [str(folder / "bin" / "python"), *arguments]
    subprocess.run(command, cwd=REPOSITORY, stderr=stderr, text=True, check=True)


def contents_hash(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(REPOSITORY)).encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def is_stale(stamp: Path, contents: str) -> bool:
    return not stamp.exists() or stamp.read_text() != contents


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock of the checkout, because two set-ups would build the same files, and a folder
    for the temporary files of pip and of compilers: a killed set-up leaves them to the next one."""
    temporary = REPOSITORY / "build/temporary"
    temporary.parent.mkdir(exist_ok=True)
    with open(REPOSITORY / "build/install.lock", "a+") as lock:
        take(lock)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        try:
            yield
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def take(lock: TextIO) -> None:
    """Lock a file and write the id of this process into it. End the set-up if another one holds the
    lock for longer than LOCK_SECONDS."""
    deadline = time.monotonic() + LOCK_SECONDS
    waited = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            lock.seek(0)
            other = f"the set-up of process {lock.read() or 'unknown'}, which uses this checkout"
        if not waited:
            say(f"waiting for {other}, for at most {LOCK_SECONDS / 60:.0f} minutes")
            waited = True
        if time.monotonic() > deadline:
            fail(
                f"expected an end of {other}; it still runs after {LOCK_SECONDS / 60:.0f} minutes: "
                "end that process or wait for it, then run this again"
            )
        time.sleep(1)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()


def say(message: str) -> None:
    print(f"[install] {message}", flush=True)


def fail(message: str) -> NoReturn:
    sys.exit(f"[install] {message}")


if __name__ == "__main__":
    environment = Path(sys.argv[1]).absolute()
    try:
        with one_at_a_time():
            if sys.argv[2] == "compiler":
                install_compiler(environment)
            elif sys.argv[2] == "browser":
                install_browser()
            else:
                main(environment, sys.argv[2], *sys.argv[3:] or [""])
    except subprocess.CalledProcessError as error:
        fail(f"failed with exit status {error.returncode}: {' '.join(map(str, error.cmd))}")
    except KeyboardInterrupt:
        fail("interrupted; run it again to go on from the last finished step")
