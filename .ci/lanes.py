"""What each lane of .ci/run reads, whether the same has passed here, and its CPU seconds.

    python .ci/lanes.py plan LOGS CACHE       end lanes that need not run, and print which those are
    python .ci/lanes.py end LOGS CACHE LANE   print a line on a lane, and keep that it passed

A lane need not run where the contents of its inputs have passed on this machine within a week: what
others publish changes in between. Contents are compared, not history, so a clone of a single commit
will do. A lane that left out tests for want of something has not passed. ``TQ_ALL=1`` runs all.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PASSED: Final = "passed"
"""The folder of the cache with an empty file LANE-DIGEST for each pass."""
WEEK: Final = 7 * 24 * 3600
"""Seconds."""

LIBRARY: Final = (
    *("pyproject.toml", "custom_ops/*", "custom_ops/core/", "custom_ops/ort/"),
    *("custom_ops/include/", "custom_ops/cann/host/", "custom_ops/tests/"),
)
PRODUCT: Final = (*LIBRARY, "tq_onnx/", "models/")
TESTS: Final = (
    *(".ci/run", ".ci/lanes.py", "tests/conftest.py", "tests/tolerances.toml", "tests/fixtures/"),
    "docs/schemas/",
)
_WITHOUT_SERVING: Final = "!tq_onnx/serving/"


@dataclass(frozen=True)
class Lane:
    """A function of .ci/run.

    Attributes:
        inputs: files that it reads: a folder ends in /, a leading ! leaves out what earlier ones
            have, other names are globs within a folder. Python files bring what they import outside
            of ``tq_onnx``. A lane without any always runs.
        serves: lanes for which alone it makes something.
        skips: reasons for which some of its tests are left out everywhere.
    """

    inputs: tuple[str, ...] = ()
    serves: tuple[str, ...] = ()
    skips: tuple[str, ...] = ()


LANES: Final = {
    "install": Lane(),
    "browser": Lane(),
    "exporters": Lane(serves=("exports",)),
    "node-packages": Lane(serves=("javascript",)),
    "server-packages": Lane(serves=("serving",)),
    "bench-environment": Lane(serves=("bench",)),
    "checks": Lane(),
    "tests": Lane(),
    "cpp": Lane((*LIBRARY, ".ci/run", ".ci/lanes.py", "tests/native/test_native.py")),
    "exports": Lane(
        (
            *(*PRODUCT, _WITHOUT_SERVING, "!tq_onnx/cli/"),
            *(*TESTS, "tests/exports/", "examples/"),
        )
    ),
    "javascript": Lane(
        (
            *(*PRODUCT, _WITHOUT_SERVING, *TESTS, "tests/javascript/", "examples/"),
            *("benchmarks/javascript.py", "docs/measurements/javascript.json"),
        )
    ),
    "readme": Lane((*PRODUCT, *TESTS, "README.md", "docs/", "examples/", "tests/docs/")),
    "serving": Lane(
        (*PRODUCT, *TESTS, "tests/serving/", "tests/fuzz/", "examples/", ".ci/genai.py")
    ),
    "fuzz": Lane((*PRODUCT, *TESTS, "tests/fuzz/")),
    "bench": Lane(
        (*PRODUCT, _WITHOUT_SERVING, *TESTS, "custom_ops/cann/", "tests/cann/"),
        skips=("needs TQ_CANN_HEADERS", "2002 moves no rows", "has no operators of CANN"),
    ),
    "release": Lane(),
}
"""In the order in which they are printed."""


def tracked() -> dict[str, Path]:
    """Return the files of the repository by name, with those that git does not know yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = sorted(set(listing.split("\0")) - {""})
    return {name: ROOT / name for name in names if (ROOT / name).is_file()}


def is_matched(name: str, pattern: str) -> bool:
    """Return True if a pattern of ``Lane.inputs``, without its !, has a file."""
    if pattern.endswith("/"):
        return name.startswith(pattern)
    return name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)


@cache
def modules(path: Path) -> frozenset[str]:
    """Return what may be modules, with / for dots: imports anywhere in a file, and its strings."""
    names = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"\w+(?:\.\w+)+", node.value))
    parts = [name.split(".") for name in names]
    return frozenset("/".join(part[:many]) for part in parts for many in range(1, len(part) + 1))


def imports(names: set[str], files: dict[str, Path]) -> set[str]:
    """Return files that Python files import, directly or not, with the ``conftest.py`` of each."""
    folders = ("", "custom_ops/cann/testing/", "benchmarks/", "docs/", "models/", ".ci/")
    closed, pending = set(names), list(names)
    while pending:
        name = pending.pop()
        if not name.endswith(".py") or name.startswith("tq_onnx/"):
            continue
        paths = modules(files[name])
        likely = {f"{folder}{path}.py" for folder in folders for path in paths}
        packages = [*paths, *map(str, Path(name).parents)]
        likely.update(f"{path}/{of}.py" for path in packages for of in ("__init__", "conftest"))
        fresh = likely.intersection(files) - closed
        closed |= fresh
        pending += fresh
    return closed


def inputs(lane: Lane, files: dict[str, Path]) -> set[str]:
    """Return the names of the files that a lane reads."""
    names: set[str] = set()
    for pattern in lane.inputs:
        matched = {name for name in files if is_matched(name, pattern.lstrip("!"))}
        names = names - matched if pattern.startswith("!") else names | matched
    return imports(names, files)


def machine() -> str:
    """Return what passing depends on beside the files: system, Python, compiler, instructions."""
    compiler, processor = "", Path("/proc/cpuinfo")
    try:
        command = [os.environ.get("CXX", "c++"), "--version"]
        compiler = subprocess.run(command, check=False, capture_output=True, text=True).stdout
    except OSError:
        pass
    text = processor.read_text(encoding="utf-8") if processor.exists() else ""
    flags = re.search(r"^(flags|Features)\s*:.*$", text, re.MULTILINE)
    return "\n".join([platform.platform(), sys.version, compiler, flags[0] if flags else ""])


def digest(lane: Lane, files: dict[str, Path], surroundings: str) -> str:
    """Return a digest of the contents of a lane's inputs, and of the machine."""
    state = hashlib.sha256(surroundings.encode())
    for name in sorted(inputs(lane, files)):
        content = hashlib.sha256(files[name].read_bytes()).hexdigest()
        state.update(f"\n{name} {os.access(files[name], os.X_OK)} {content}".encode())
    return state.hexdigest()[:16]


def has_passed(records: Path, name: str, state: str) -> bool:
    """Return True if a lane has passed in a state, within a week."""
    record = records / PASSED / f"{name}-{state}"
    return record.exists() and time.time() - record.stat().st_mtime < WEEK


def plan(logs: Path, records: Path) -> None:
    """Note the state of each lane, and end those that need not run."""
    files, surroundings, skipped = tracked(), machine(), {}
    for name, lane in LANES.items():
        if lane.inputs:
            state = digest(lane, files, surroundings)
            (logs / f"{name}.digest").write_text(state, encoding="utf-8")
            if not os.environ.get("TQ_ALL") and has_passed(records, name, state):
                skipped[name] = f"skipped: its inputs have passed on this machine ({state})"
    for name, lane in LANES.items():
        if lane.serves and all(user in skipped for user in lane.serves):
            skipped[name] = f"skipped, as {' and '.join(lane.serves)} is"
    for name, reason in skipped.items():
        (logs / f"{name}.log").write_text(f"{reason}\n", encoding="utf-8")
        (logs / f"{name}.status").write_text("0\n", encoding="utf-8")
        print(f"{name}: {reason}")


def seconds(times: str) -> float:
    """Return the sum of what bash's ``times`` prints: of the shell and its children."""
    parts = re.findall(r"(\d+)m(\d+)[.,](\d+)s", times)
    return sum(
        60 * int(minutes) + float(f"{whole}.{fraction}") for minutes, whole, fraction in parts
    )


def budget(name: str) -> int | None:
    """Return the CPU seconds of a lane in tests/budget.toml."""
    text = (ROOT / "tests" / "budget.toml").read_text(encoding="utf-8").partition("[seconds]\n")[2]
    line = re.search(rf"^{name} = (\d+)$", text, re.MULTILINE)
    return int(line[1]) if line else None


def is_whole(log: str, lane: Lane) -> bool:
    """Return True if a lane left out nothing but what is left out everywhere."""
    lines = re.findall(r"^skipped.*$|^SKIPPED.*$", log, re.MULTILINE)
    return all(any(reason in line for reason in lane.skips) for line in lines)


def end(logs: Path, records: Path, name: str) -> None:
    """Print what a lane took and said; keep its state if that passed, as a whole and unchanged."""
    lane, log = LANES[name], (logs / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    times, note = logs / f"{name}.times", logs / f"{name}.digest"
    result = re.findall(r"^.*\d+ (?:passed|failed|error|errors|skipped).* in [\d.]+s.*$", log, re.M)
    if not times.exists():
        print(f"{name}: {log.strip()}")
        return
    used, most = seconds(times.read_text(encoding="utf-8")), budget(name)
    over = f", over the {most:,} of tests/budget.toml" if most is not None and used > most else ""
    print(f"{name}: {used:,.0f} CPU s{over}{'; ' if result else ''}{''.join(result[-1:])}")
    passed = (logs / f"{name}.status").read_text(encoding="utf-8").strip() == "0"
    if not passed or not note.exists() or not is_whole(log, lane):
        return
    state = note.read_text(encoding="utf-8")
    if digest(lane, tracked(), machine()) == state:
        (records / PASSED).mkdir(parents=True, exist_ok=True)
        (records / PASSED / f"{name}-{state}").touch()


if __name__ == "__main__":
    action, folders = sys.argv[1], [Path(argument) for argument in sys.argv[2:4]]
    {"plan": plan, "end": end}[action](*folders, *sys.argv[4:])
