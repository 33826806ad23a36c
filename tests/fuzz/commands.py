"""Runs commands on what a stranger made, and notes each promise that they break.

A command ends with one of its exit codes, within ``MOST_SECONDS`` and the memory of its process,
and says one sentence without control characters. What it was given stays as it was; outputs appear
whole or not at all. ``inspect`` and ``convert`` agree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cli.run import Outcome, run

MOST_SECONDS = 10.0
"""Of processor time: a machine that does other things, too, makes nothing slow."""
REFUSED = (3, 4)


@dataclass
class Case:
    """One input of a lane, and what came of it.

    Attributes:
        folder: whose files the case may change.
        what: the input, in words.
        outcomes: exit codes by command, or whatever a lane counts.
        problems: broken promises; each begins with its kind and a colon.
    """

    folder: Path
    what: str = ""
    outcomes: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, *arguments: object, codes: Iterable[int] = (0, *REFUSED)) -> Outcome:
        """Runs a command, which may end with these codes."""
        name = str(arguments[0])
        begin = time.process_time()
        outcome = run(*arguments)
        seconds = time.process_time() - begin
        self.outcomes[name] = outcome.code
        if outcome.code not in codes:
            self.broken("exit", f"{name} exits with {outcome.code} ({outcome.err.strip()[:400]})")
        if seconds > MOST_SECONDS:
            self.broken("time", f"{name} takes {seconds:.0f} s")
        if not all(char.isprintable() or char in "\n\t" for char in outcome.out + outcome.err):
            self.broken("terminal", f"{name} sends control characters")
        if outcome.code and outcome.err.count("\n") > 1:
            self.broken("sentence", f"{name} says more than a sentence ({outcome.err[:400]})")
        return outcome

    def broken(self, kind: str, text: str) -> None:
        self.problems.append(f"{kind}: {text}")

    @property
    def files(self) -> dict[str, tuple[int, int]]:
        """Files below the folder, with their size and the time of their last change."""
        return _listing(self.folder)

    def convert(self, path: Path, *options: object, preset: str = "int4") -> None:
        """Inspects and converts a model, and compares what both say."""
        before = self.files
        looked = self.run("inspect", path, "--json")
        output = self.folder / "out" / "converted.onnx"
        given = ("--preset", preset, "-o", output, *options)
        done = self.run("convert", path, *given, codes=(0, *REFUSED))
        if looked.code == 0 and looked.document["plan"] is None:
            offers = {each["preset"]: each["refusal"] for each in looked.document["presets"]}
            if (done.code == 0) != (not offers[preset]):
                self.broken(
                    "disagreement",
                    f"inspect offers it, convert exits with {done.code} ({done.err})",
                )
        elif done.code == 0:
            self.broken("disagreement", f"inspect exits with {looked.code} and convert with 0")
        self.written(output, done, before)

    def written(self, output: Path, done: Outcome, before: dict[str, tuple[int, int]]) -> None:
        """Compares the files with those of before; an output is a converted model."""
        found = self.files
        if done.code == 0 and output.exists():
            again = run("inspect", output, "--json")
            if again.code:
                self.broken(
                    "output", f"inspect of the output exits with {again.code} ({again.err})"
                )
        elif done.code == 0:
            self.broken("output", "convert exits with 0 and wrote nothing")
        inside = f"{output.parent.relative_to(self.folder)}/"
        kept = {name: size for name, size in found.items() if not name.startswith(inside)}
        if kept != before:
            changed = sorted(kept.items() ^ before.items())
            self.broken("files", f"what was there has changed ({changed})")
        if done.code and len(kept) != len(found):
            self.broken("output", f"files are left ({sorted(found.keys() - kept.keys())})")


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Files below a folder, with their size and the time of their last change."""
    found = {}
    for path in folder.rglob("*"):
        if not path.is_dir():
            status = path.lstat()
            found[str(path.relative_to(folder))] = (status.st_size, status.st_mtime_ns)
    return found
