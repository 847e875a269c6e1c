"""The memory of this machine, and how much of it is free, also under each control group's limit.

Free memory is available to this process without swapping. The page cache that a control group is
charged for can be dropped, so it counts as free, like in the kernel's own MemAvailable.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FreeMemory:
    """Bytes left under one limit, which other processes may share."""

    limited_by: str  # the machine, or a control group, for messages
    identity: str  # equal in all processes under the same limit, whatever path they see it by
    free_bytes: int


def machine_memory_bytes() -> int:
    """Return the physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(proc: Path = Path("/proc")) -> list[FreeMemory]:
    """Return the memory left under each limit of this process, the machine's first."""
    free = machine_memory_bytes()
    with contextlib.suppress(OSError):
        free = min(free, 1024 * _numbers(proc / "meminfo").get("MemAvailable:", free))
    return [FreeMemory("the machine", "machine", free), *_control_groups(proc)]


def _control_groups(proc: Path) -> Iterator[FreeMemory]:
    """Yield control groups (v1 and v2) with a limit, from this process's own to the outermost
    visible."""
    try:
        groups = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    path_of = {}  # by kind of file system: hierarchy-ID:controllers:path
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if not controllers:
            path_of["cgroup2"] = path
        elif "memory" in controllers.split(","):
            path_of["cgroup"] = path
    for mount in mounts:
        # ID parent major:minor root mount-point options [tags] - type source super-options
        before, _, after = mount.partition(" - ")
        kind, _, options = after.split(maxsplit=2)
        if kind not in path_of or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, mounted_at = (Path(_unescape(field)) for field in before.split()[3:5])
        # In a container the group's path may be outside of the mount: then the mount itself is the
        # group.
        ours = Path(path_of[kind])
        inside = ours.relative_to(root) if ours.is_relative_to(root) else Path()
        for parent in (inside, *inside.parents):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
                group = mounted_at / parent
                identity = group.stat()
                yield FreeMemory(
                    f"the control group {group}",
                    f"{identity.st_dev}:{identity.st_ino}",
                    _free_of_group(group, kind),
                )


def _free_of_group(group: Path, kind: str) -> int:
    limit_name, used_name, total = (
        ("memory.max", "memory.current", "")
        if kind == "cgroup2"
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    )
    limit, used = (int((group / name).read_text()) for name in (limit_name, used_name))
    statistics = _numbers(group / "memory.stat")
    cache = sum(statistics.get(f"{total}{kind}_file", 0) for kind in ("inactive", "active"))
    return max(limit - max(used - cache, 0), 0)


def _numbers(file: Path) -> dict[str, int]:
    """Return lines `name number [unit]` as a dictionary."""
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {fields[0]: int(fields[1]) for fields in lines if len(fields) > 1}


def _unescape(field: str) -> str:
    r"""Return a path of mountinfo, which writes blanks as \040, in plain text."""
    return field.encode("ascii", "backslashreplace").decode("unicode_escape")
