"""Count names that are no nouns, and refuse riddles in what people read.

    python .ci/words.py            against [names] of tests/budget.toml
    python .ci/words.py --write    lower those budgets to what the rooms have now

A variable or a parameter is a noun. Each room may have as many of ``WORDS`` as its budget says,
which only falls; fields of classes do not count, as files and callers depend on them. README.md,
docs/*.md and the strings of the product have none of ``PHRASES``, and rooms below cli no flags.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from budget import BUDGET, ROOT, git, room_of, tomllib, write

WORDS: Final = frozenset(
    (
        *("one", "other", "others", "own", "its", "their", "theirs", "here", "there"),
        *("found", "given", "told", "made", "wanted", "asked", "had", "done", "taken", "left"),
        *("kept", "nothing", "both", "rest", "more", "same", "such"),
    )
)
PHRASES: Final = (
    *("is told", "are told", "not told", "is asked", "are asked", "asked of", "as asked for"),
    *("than the wanted", "for ever", "beside it stands", "nobody", "without theirs"),
    *("is none of", "are none of", "that is none", "tell anything", "nothing tells"),
)
FOREIGN: Final = "check|extra_options|static-cache|no-deps|only-binary|platform"  # other programs'
_FLAG: Final = re.compile(rf"(?<![\w-])--(?!(?:{FOREIGN})\b)([a-z][\w-]*)")
_RIDDLE: Final = re.compile(
    r"\b(" + "|".join(phrase.replace(" ", r"\s+") for phrase in PHRASES) + r")\b", re.IGNORECASE
)


def bound(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each variable and parameter of a module."""
    fields = {
        id(node)
        for record in ast.walk(tree)
        if isinstance(record, ast.ClassDef)
        for statement in record.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Store) and id(node) not in fields:
                yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield those of ``bound`` that are in ``WORDS``; ``left`` beside ``right`` is a side."""
    places = set(bound(tree))
    for line, name in sorted(places):
        if name.strip("_").lower() in WORDS and not (name == "left" and (line, "right") in places):
            yield line, name


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string of a module that is no docstring."""
    nodes = list(ast.walk(tree))
    documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in documentation:
            yield node.lineno, node.value


def riddles(line: int, text: str, pattern: re.Pattern[str] = _RIDDLE) -> Iterator[tuple[int, str]]:
    """Yield the line and the phrase of each riddle, or flag, in a text that begins in a line."""
    for match in pattern.finditer(text):
        yield line + text.count("\n", 0, match.start()), " ".join(match[1].split())


def main() -> int:
    """Print what is wrong; return 1 if there are more names than a budget allows, or a riddle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="lower the budgets to today's names")
    arguments = parser.parse_args()

    rooms: dict[str, int] = tomllib.loads(BUDGET.read_text(encoding="utf-8"))["names"]
    places: dict[str, list[str]] = defaultdict(list)
    wrong = []
    for path in git("ls-files", "*.py", "README.md", "docs/*.md").splitlines():
        room = room_of(path, rooms)
        if not (ROOT / path).is_file() or (room is None and path.endswith(".py")):
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        texts = [(1, text)]
        if path.endswith(".py"):
            tree = ast.parse(text)
            places[room or ""] += [f"{path}:{line}: {name}" for line, name in names(tree)]
            texts = list(strings(tree)) if path.startswith("tq_onnx/") else []
        for start, prose in texts:
            wrong += [f"{path}:{line}: {phrase!r}" for line, phrase in riddles(start, prose)]
        if path.startswith("tq_onnx/") and not re.search(r"/cli/|ascend/command\.py", path):
            wrong += [f"{path}:{line}: --{flag}" for line, flag in riddles(1, text, _FLAG)]
    if arguments.write:
        write("names", {room: min(most, len(places[room])) for room, most in rooms.items()})
        return 0
    for room, most in rooms.items():
        if len(places[room]) > most:
            print(*places[room], sep="\n")
            wrong.append(f"{room} has {len(places[room])} names that are no nouns, not {most}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
