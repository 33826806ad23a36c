"""Write or check a header that Python renders for C++: the command line of all that do."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path


def write_or_check(
    module: str,
    description: str | None,
    render: Callable[[], str],
    arguments: Sequence[str] | None,
) -> int:
    """Run the command line of a module that renders one header.

    Returns:
        The exit status: 1 if the header was to be compared only and differs.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=(description or "").split("\n", 1)[0]
    )
    parser.add_argument("path", type=Path, help="the header file")
    parser.add_argument("--check", action="store_true", help="only compare; status 1 if it differs")
    options = parser.parse_args(arguments)
    path: Path = options.path
    text = render()
    if not options.check:
        path.write_text(text, encoding="utf-8", newline="\n")
        return 0
    difference = _difference(path, text)
    if difference:
        print(f"{path}: {difference}; run python -m {module} {path}")
    return 1 if difference else 0


def _difference(path: Path, text: str) -> str:
    """Return where a file differs from a text; empty for nowhere."""
    if not path.is_file():
        return "there is no such file"
    pairs = zip_longest(path.read_text(encoding="utf-8").split("\n"), text.split("\n"))
    for number, (line, expected) in enumerate(pairs, 1):
        if line != expected:
            shown = [
                "the end of the file" if one is None else repr(one) for one in (line, expected)
            ]
            return f"line {number} is {shown[0]}, and should be {shown[1]}"
    return ""
