"""The memory that is available to this process, limits of containers included."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUPS: Final = Path("/proc/self/cgroup")
_MOUNT: Final = Path("/sys/fs/cgroup")
_V1: Final = "memory"
_UNLIMITED: Final = 1 << 60
"""Version 1 of control groups writes a number like this for no limit."""


def free_memory() -> int | None:
    """Return the bytes that this process can still take; None where the system does not say.

    The least of what is free on the machine and what the control groups of the process, versions 1
    and 2, leave: a container has its limits there. File pages that can be dropped count as free.
    """
    sizes = [size for size in (_free_on_machine(), *_left_in_groups()) if size is not None]
    return min(sizes) if sizes else None


def _free_on_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvail"))
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _left_in_groups() -> list[int]:
    """Return what each limit above the process leaves."""
    try:
        lines = _CGROUPS.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            limits += _left(_MOUNT, path, *names)
        elif _V1 in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            limits += _left(_MOUNT / _V1, path, *names)
    return limits


def _left(mount: Path, path: str, limit: str, usage: str, droppable: str) -> list[int]:
    """Return what the limits of a group and of those around it leave.

    In a container, the path is often one of the host, and its own group is the mount itself.
    """
    group = mount / path.strip("/")
    limits = []
    for folder in dict.fromkeys((group, *group.parents, mount)):
        if not folder.is_relative_to(mount):
            continue
        try:
            most = int((folder / limit).read_text())
            used = int((folder / usage).read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        if most < _UNLIMITED:
            limits.append(max(most - used + _droppable(folder / "memory.stat", droppable), 0))
    return limits


def _droppable(statistics: Path, name: str) -> int:
    try:
        lines = (line.split() for line in statistics.read_text().splitlines())
        return next(int(line[1]) for line in lines if line[0] == name)
    except (OSError, ValueError, IndexError, StopIteration):
        return 0
