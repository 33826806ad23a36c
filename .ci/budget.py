"""Print the lines of each room and of the last change; fail when a room outgrows its budget.

    python .ci/budget.py                against tests/budget.toml
    python .ci/budget.py --base REV     the change since REV instead of since the last commit
    python .ci/budget.py --write        lower budgets to what the rooms have now

A room is a folder of tests/budget.toml. Raising its number is a line of the commit that needs it,
and the message of that commit says why. Generated files do not count.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Final

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT: Final = Path(__file__).resolve().parents[1]
BUDGET: Final = ROOT / "tests" / "budget.toml"
SOURCES: Final = frozenset({".py", ".cpp", ".h", ".inl", ".mjs", ".sh", ".cmake"})
PROSE: Final = "README.md"
GENERATED: Final = frozenset(
    {"custom_ops/include/tq/codec_spec.h", "custom_ops/include/tq/operators.h"}
)
SLACK: Final = 1.02
"""``--write`` leaves a room this much space, so that small repairs need no new number."""


def git(*arguments: str) -> str:
    """Return what a git command prints in the repository."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


def counts(path: str) -> bool:
    """Return True if the lines of a file count."""
    return path not in GENERATED and (PurePosixPath(path).suffix in SOURCES or path == PROSE)


def room_of(path: str, rooms: dict[str, int]) -> str | None:
    """Return the innermost room that holds a file; None for a file outside all rooms."""
    holders = (room for room in rooms if path == room or path.startswith(f"{room}/"))
    return max(holders, key=len, default=None)


def lines_by_room(rooms: dict[str, int]) -> Counter[str]:
    """Return the lines of the tracked source files of each room."""
    lines: Counter[str] = Counter()
    for path in git("ls-files").splitlines():
        room = room_of(path, rooms)
        if room is not None and counts(path) and (ROOT / path).is_file():
            lines[room] += (ROOT / path).read_bytes().count(b"\n")
    return lines


def change_by_room(rooms: dict[str, int], base: str) -> tuple[Counter[str], Counter[str]]:
    """Return the lines that each room gained and lost since a commit, the working tree included."""
    added: Counter[str] = Counter()
    removed: Counter[str] = Counter()
    fields = iter(git("diff", "--numstat", "--find-renames", "-z", base).split("\0"))
    for field in fields:
        if not field:
            continue
        plus, minus, path = field.split("\t")
        if not path:  # a rename: the old path and the new one follow
            _, path = next(fields), next(fields)
        room = room_of(path, rooms)
        if room is not None and counts(path) and plus != "-":
            added[room] += int(plus)
            removed[room] += int(minus)
    return added, removed


def has_commit(name: str) -> bool:
    """Return True if the repository knows a commit."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0


def write(section: str, numbers: dict[str, int]) -> None:
    """Set the numbers of a section of the budget file; comments stay."""
    head, mark, body = BUDGET.read_text(encoding="utf-8").partition(f"[{section}]\n")
    for room, number in numbers.items():
        line = rf'^("{re.escape(room)}" = )\d+'
        body = re.sub(line, rf"\g<1>{number}", body, count=1, flags=re.MULTILINE)
    BUDGET.write_text(head + mark + body, encoding="utf-8")


def main() -> int:
    """Print the table; return 1 if a room or a sum is over its budget."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="HEAD~1", help="commit that the change is counted from")
    parser.add_argument("--write", action="store_true", help="lower the budgets to today's lines")
    arguments = parser.parse_args()

    budget = tomllib.loads(BUDGET.read_text(encoding="utf-8"))
    rooms: dict[str, int] = budget["rooms"]
    lines = lines_by_room(rooms)
    if arguments.write:
        lower = {room: min(most, round(lines[room] * SLACK)) for room, most in rooms.items()}
        write("rooms", lower)
        return 0
    added, removed = Counter[str](), Counter[str]()
    if has_commit(arguments.base):
        added, removed = change_by_room(rooms, arguments.base)

    over = []
    print(f"{'room':34}{'lines':>8}{'budget':>8}{'change':>15}")
    for room, most in rooms.items():
        change = f"+{added[room]} -{removed[room]}" if added[room] or removed[room] else ""
        print(f"{room:34}{lines[room]:>8,}{most:>8,}{change:>15}")
        if lines[room] > most:
            over.append(f"{room} has {lines[room]:,} lines, {lines[room] - most:,} over its budget")
    product = sum(lines[room] for room in rooms if room.startswith("tq_onnx"))
    for room in rooms:
        if room.startswith("tq_onnx") and lines[room] > budget["largest_share"] * product:
            over.append(f"{room} holds {lines[room] / product:.0%} of the product's Python")
    for message in over:
        print(f"{message}: shorten it, or raise the number in tests/budget.toml and say why")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
