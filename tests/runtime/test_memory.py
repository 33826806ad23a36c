"""What a process may still take: the machine, and the limits of containers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tq_onnx.runtime import memory


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 100 kB\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_MOUNT", tmp_path / "mount")
    return tmp_path


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_max", ".max").replace("_current", ".current")).write_text(
            f"{text}\n"
        )


def test_without_groups_the_machine_counts(groups: Path) -> None:
    assert memory.free_memory() == 100 << 10
    (groups / "meminfo").write_text("nothing\n")
    assert memory.free_memory() is None


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../../elsewhere"])
def test_version_2(groups: Path, path: str) -> None:
    """In a container, the path is often one that only the host knows."""
    (groups / "cgroup").write_text(f"0::{path}\n")
    write(groups / "mount", memory_max=50_000, memory_current=20_000)
    assert memory.free_memory() == 30_000
    (groups / "mount" / "memory.stat").write_text("anon 1\ninactive_file 5000\n")
    assert memory.free_memory() == 35_000
    write(groups / "mount", memory_max="max")
    assert memory.free_memory() == 100 << 10


def test_a_group_around_it_counts_too(groups: Path) -> None:
    (groups / "cgroup").write_text("0::/a/b\n")
    write(groups / "mount" / "a" / "b", memory_max=90_000, memory_current=10_000)
    assert memory.free_memory() == 80_000
    write(groups / "mount" / "a", memory_max=60_000, memory_current=70_000)
    assert memory.free_memory() == 0


def test_version_1(groups: Path) -> None:
    (groups / "cgroup").write_text("5:cpu,memory:/box\n4:pids:/box\n")
    folder = groups / "mount" / "memory" / "box"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("70000")
    (folder / "memory.usage_in_bytes").write_text("30000")
    assert memory.free_memory() == 40_000
    (folder / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert memory.free_memory() == 100 << 10
