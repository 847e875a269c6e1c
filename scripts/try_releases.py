"""Build OPER with each release of torch, TorchRec and FBGEMM, and run TorchRec's quick tests.

    python scripts/try_releases.py FOLDER [TORCH ...]      # such as 2.11 2.14; all by default

Each release gets an environment and a clone of the committed checkout in FOLDER, which later runs
use again. The script prints a line per release. It takes gigabytes of disk and some minutes per
release.
"""

import argparse
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent


class Release(NamedTuple):
    """Versions that upstream releases together."""

    torch: str
    torchrec: str
    fbgemm: str


RELEASES = {
    "2.11": Release("2.11.0", "1.6.1", "1.6.0"),
    "2.12": Release("2.12.1", "1.7.0", "1.7.0"),
    "2.13": Release("2.13.0", "1.8.0", "1.8.0"),
    "2.14": Release("2.14.1", "1.9.2", "1.9.0"),
}
# TorchRec's dependencies without FBGEMM, whose CUDA build it declares (as in requirements-cpu.txt).
NEEDS = ("tensordict", "torchmetrics==1.0.3", "pyre-extensions==0.0.32", "iopath==0.1.10", "tqdm")
TOOLS = ("pytest", "hypothesis")
TESTS = ("-m", "not check and not slow", "tests/torchrec")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("torch", nargs="*", help=f"of {', '.join(RELEASES)}")
    options = parser.parse_args(arguments)
    chosen = options.torch or [*RELEASES]
    if unknown := [name for name in chosen if name not in RELEASES]:
        parser.error(f"expected torch of {', '.join(RELEASES)}; got {', '.join(unknown)}")
    outcomes = [try_release(RELEASES[name], options.folder.resolve() / name) for name in chosen]
    return int(any(outcomes))


def try_release(release: Release, folder: Path) -> int:
    """Run the tests with one release, print a line about them, and return their exit status."""
    began = time.monotonic()
    python = environment(release, folder / "venv")
    checkout = folder / "checkout"
    if not checkout.exists():
        run("git", "clone", "--quiet", REPOSITORY, checkout)
    run("git", "-C", checkout, "pull", "--quiet", "--ff-only")
    built = time.monotonic()
    run(python, "setup.py", "--quiet", "build_ext", "--inplace", folder=checkout)
    tested = time.monotonic()
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    (folder / "tests.log").write_text(done.stdout + done.stderr, encoding="utf-8")
    said = done.stdout.strip().splitlines()[-1:] or ["no output"]
    print(
        f"try_releases: torch {release.torch}, TorchRec {release.torchrec}, FBGEMM "
        f"{release.fbgemm}: {said[0]} (set-up {built - began:.0f} s, build {tested - built:.0f} s, "
        f"tests {time.monotonic() - tested:.0f} s; {folder / 'tests.log'})",
        flush=True,
    )
    return done.returncode


def environment(release: Release, folder: Path) -> Path:
    """Return the Python of a release's environment, after making a missing one."""
    python = folder / "bin/python"
    if not (folder / "made").exists():
        run(sys.executable, "-m", "venv", "--clear", folder)
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
        project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
        needs = [*NEEDS, *TOOLS, *project["project"]["dependencies"]]
        needs += project["build-system"]["requires"]
        run(*pip, f"torch=={release.torch}", f"fbgemm-gpu-cpu=={release.fbgemm}", *needs)
        run(*pip, "--no-deps", f"torchrec=={release.torchrec}")
        (folder / "made").touch()
    return python


def run(*command: str | Path, folder: Path = REPOSITORY) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"try_releases: exit status {error.returncode}: {' '.join(map(str, command))}")


if __name__ == "__main__":
    sys.exit(main())
