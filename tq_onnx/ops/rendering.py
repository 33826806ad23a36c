"""Write or check a header that Python renders for C++: the command line of all that do."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path


def write_or_check(
    module: str,
    description: str | None,
    render: Callable[[], str],
    arguments: Sequence[str] | None,
) -> int:
    """Run the command line of a module that renders one header.

    Args:
        module: what Python runs.
        description: the module's docstring; help shows its first line.
        render: returns the text of the header.
        arguments: as ``argparse`` takes them.

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
    if options.check:
        return 0 if path.is_file() and path.read_text(encoding="utf-8") == text else 1
    path.write_text(text, encoding="utf-8", newline="\n")
    return 0
