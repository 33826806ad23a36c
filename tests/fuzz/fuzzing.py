"""Fuzz one lane: ``python -m tests.fuzz LANE``, by numbers or guided by coverage.

With ``--numbers FIRST LAST`` the case of each number is the same at every time: a campaign can be
run in pieces, and a finding has a number. Without them atheris looks for cases that reach new code
for ``--seconds``; where it is not installed, numbers are counted up for as long.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.fuzz import guided
from tests.fuzz.lanes import LANES, Lane, lane
from tests.fuzz.pool import Answer, Limits, work
from tests.fuzz.summary import Summary
from tests.remembering import remembering


def by_numbers(
    chosen: Lane, numbers: range, jobs: int, seconds: float, limits: Limits
) -> dict[str, Any]:
    """Runs the cases of numbers; tells what came of them, and which number is the next."""

    def task(number: int, folder: Path) -> Answer:
        return chosen.check(random.Random(number), folder).answer

    chosen.warm()
    summary = Summary()
    begin = time.monotonic()
    ahead, following = set[int](), numbers.start  # numbers that were done, from the first gap on
    for done in work(task, numbers, jobs, seconds, limits):
        ahead.add(done.number)
        while following in ahead:
            ahead.remove(following)
            following += 1
        for problem in summary.take(done, limits.bytes):
            print(f"{done.number}: {problem}", file=sys.stderr, flush=True)
    took = time.monotonic() - begin
    return {
        "lane": chosen.name,
        "first": numbers.start,
        "next": following,
        "jobs": jobs,
        "seconds": round(took, 1),
        "cases_per_second": round(summary.cases / max(took, 1e-9), 1),
        **summary.document(),
    }


def by_coverage(name: str, jobs: int, seconds: float, corpus: Path | None) -> dict[str, Any]:
    """Runs the cases that atheris makes up; tells what came of them."""
    with tempfile.TemporaryDirectory() as folder:
        summary = guided.fuzz(name, seconds, jobs, corpus or Path(folder))
    found = {"lane": name, "jobs": jobs, "seconds": seconds, **summary.document()}
    for finding in found["findings"]:
        print(finding["examples"][0], file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Fuzzes a lane; the exit code is 1 if it found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("lane", choices=LANES)
    parser.add_argument("--numbers", nargs=2, type=int, metavar=("FIRST", "LAST"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--memory", type=int, default=2048, help="MiB of a process; the sanitizers need more"
    )
    parser.add_argument("--corpus", type=Path, help="a folder that atheris keeps its cases in")
    parser.add_argument("--summary", type=Path, help="a file for all that was counted, as JSON")
    given = parser.parse_args()
    if given.numbers is None and guided.is_there():
        found = by_coverage(given.lane, given.jobs, given.seconds, given.corpus)
    else:
        numbers = range(*(given.numbers or (0, 1 << 62)))
        with remembering():
            limits = Limits(bytes=given.memory << 20)
            found = by_numbers(lane(given.lane), numbers, given.jobs, given.seconds, limits)
    if given.summary:
        given.summary.write_text(json.dumps(found, indent=2) + "\n")
    print(
        f"{given.lane}: {found['cases']} cases in {found['seconds']:.0f} s, "
        f"{sum(found['problems'].values())} broken promises"
    )
    return 1 if found["problems"] else 0
