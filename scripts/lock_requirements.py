"""Renew the locks, which list the files that `make install` installs, with their SHA-256.

    python -m scripts.lock_requirements INDEX [TORCH_INDEX]

pip resolves each requirements-VARIANT.txt under the Python that runs this: by INDEX alone, and with
torch's CPU build by the indices that it is set up with. The lock lists all packages found, with the
wheels that INDEX has of these versions for Linux on x86-64 and ARM and the supported Pythons (the
source archive, if there are none). INDEX is the address of a package index's pages, which ends in
/simple; it must answer in JSON.

torch's CPU build has a separate lock, because it may be in a separate index. The lock has the
wheels of TORCH_INDEX or, without TORCH_INDEX, the one that pip found, which is for one Python and
machine.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from scripts.install import LOCKED_MACHINES, LOCKED_PYTHONS, REPOSITORY, TORCHREC

TORCH_LOCK = "requirements-torch.lock"
_NO_OTHER = {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": "", "PIP_FIND_LINKS": ""}


def main(index: str, torch_index: str | None) -> None:
    for variant in ("cpu", "gpu", "cuda"):
        source = f"requirements-{variant}.txt"
        # With other indices, "torch==X" may be the CPU build.
        alone = {} if variant == "cpu" else {"PIP_INDEX_URL": index, **_NO_OTHER}
        packages = resolved("-r", source, settings=alone)
        refuse_open({package["name"]: package for package in packages})
        if variant == "cpu":  # without its dependencies: see there
            packages += resolved("--no-deps", TORCHREC)
            (torch,) = (package for package in packages if package["name"] == "torch")
            packages.remove(torch)
            digests = hashes(torch, torch_index) if torch_index else []
            write(TORCH_LOCK, source, [(torch, digests) if digests else only_here(torch)])
        write(f"requirements-{variant}.lock", source, [(p, hashes(p, index)) for p in packages])


def resolved(*arguments: str, settings: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the packages that pip would install: name, version, requirements, and the digest of
    the file."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        asked = [*pip, "--ignore-installed", "--report", report.name, *arguments]
        subprocess.run(asked, cwd=REPOSITORY, check=True, env={**os.environ, **(settings or {})})
        entries = json.load(report)["install"]
    return [
        {
            "name": canonicalize_name(entry["metadata"]["name"]),
            "version": entry["metadata"]["version"],
            "requires": entry["metadata"].get("requires_dist", []),
            "extras": entry.get("requested_extras", []),
            "sha256": entry["download_info"]["archive_info"]["hashes"]["sha256"],
        }
        for entry in entries
    ]


def refuse_open(packages: dict[str, dict[str, Any]]) -> None:
    """Exit if another supported Python needs a package that this one does not."""
    for package in packages.values():
        for requirement in map(Requirement, package["requires"]):
            for minor in LOCKED_PYTHONS:
                marks = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.0"}
                marker = requirement.marker
                needed = marker is None or any(
                    marker.evaluate({**marks, "extra": extra}) for extra in ("", *package["extras"])
                )
                if needed and canonicalize_name(requirement.name) not in packages:
                    sys.exit(f"{package['name']} needs {requirement} under Python 3.{minor}")


def hashes(package: dict[str, Any], index: str) -> list[str]:
    """Return the SHA-256 of the files of a package that a supported machine may install; [] if
    none."""
    address = f"{index.rstrip('/')}/{package['name']}/"
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    with urllib.request.urlopen(urllib.request.Request(address, headers=accept)) as page:
        files = json.load(page)["files"]
    wanted = Version(package["version"])  # as it is spelt in file names: 3.0.0rc1, not 3.0.0-rc1
    wheels, sources = [], []
    for file in files:
        name, digest = file["filename"], file["hashes"]["sha256"]
        try:
            if name.endswith(".whl"):
                _, version, _, tags = parse_wheel_filename(name)
                if version == wanted and any(map(is_supported, tags)):
                    wheels.append(digest)
            elif name.endswith(".tar.gz"):
                _, version = parse_sdist_filename(name)
                if version == wanted:
                    sources.append(digest)
        except ValueError:
            continue  # an old file with an unknown name
    return sorted(wheels or sources)


def only_here(package: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the file that pip found, for this Python and machine, and its digest."""
    here = f'python_version == "3.{sys.version_info[1]}"'
    marker = f'{here} and platform_machine == "{platform.machine()}"'
    return {**package, "marker": marker}, [package["sha256"]]


def is_supported(tag: Any) -> bool:
    """Return whether a wheel's tag is for a supported Python and machine."""
    on = tag.platform
    machine = on == "any" or (
        on.startswith(("manylinux", "linux")) and on.endswith(LOCKED_MACHINES)
    )
    if not machine:
        return False
    if tag.interpreter in ("py3", *(f"py3{minor}" for minor in LOCKED_PYTHONS)):
        return bool(tag.abi == "none")
    if not (python := re.fullmatch(r"cp3(\d+)", tag.interpreter)):
        return False
    minor = int(python[1])
    if tag.abi in ("abi3", "none"):
        return minor <= LOCKED_PYTHONS[-1]
    return minor in LOCKED_PYTHONS and bool(tag.abi == tag.interpreter)


def write(lock: str, source: str, packages: list[tuple[dict[str, Any], list[str]]]) -> None:
    """Write a lock: packages by name, as pip reads them."""
    lines = [
        f"# Made from {source} by scripts/lock_requirements.py. pip install --no-deps",
        f"# --require-hashes -r {lock} installs these files and no others.",
    ]
    for package, digests in sorted(packages, key=lambda entry: str(entry[0]["name"])):
        if not digests:
            sys.exit(f"the index has no file of {package['name']} {package['version']}")
        pin = f"{package['name']}=={package['version']}"
        if "marker" in package:
            pin += f" ; {package['marker']}"
        lines.append(" \\\n    ".join([pin, *(f"--hash=sha256:{digest}" for digest in digests)]))
    (REPOSITORY / lock).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{lock}: {len(packages)} packages")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else None)
