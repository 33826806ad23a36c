"""What many cases came to, as JSON: outcomes, the slowest, the largest, and each finding once."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.pool import Done

SHOWN = 5
"""Of the slowest, the largest, and the numbers of a finding."""


@dataclass
class Summary:
    """Takes cases one by one."""

    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, int]] = field(default_factory=list)
    largest: list[tuple[int, int]] = field(default_factory=list)
    findings: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    counted: Counter[str] = field(default_factory=Counter)
    cases: int = 0

    def take(self, done: Done, most_bytes: int) -> list[str]:
        """Counts a case; tells its problems."""
        self.cases += 1
        for name, outcome in done.answer.get("outcomes", {}).items():
            self.outcomes[f"{name} {outcome}"] += 1
        self.slowest = sorted([*self.slowest, (round(done.seconds, 2), done.number)])[-SHOWN:]
        self.largest = sorted([*self.largest, (done.peak_bytes, done.number)])[-SHOWN:]
        problems = list(done.answer.get("problems", []))
        if done.death:
            problems.append(f"death: {done.death}")
        if done.peak_bytes > most_bytes:
            problems.append(f"memory: {done.peak_bytes >> 20} MiB")
        what = done.answer.get("what", "")
        for problem in problems:
            self.kinds[problem.partition(":")[0]] += 1
            same = _without_details(problem)
            self.counted[same] += 1
            if len(self.findings[same]) < SHOWN:
                self.findings[same].append({"number": done.number, "what": what, "is": problem})
        return problems

    def document(self) -> dict[str, Any]:
        """All of it."""
        return {
            "cases": self.cases,
            "outcomes": dict(sorted(self.outcomes.items())),
            "problems": dict(self.kinds),
            "slowest": [{"number": n, "seconds": seconds} for seconds, n in self.slowest[::-1]],
            "largest": [{"number": n, "MiB": size >> 20} for size, n in self.largest[::-1]],
            "findings": [
                {"count": count, "examples": self.findings[same]}
                for same, count in self.counted.most_common()
            ],
        }


def _without_details(problem: str) -> str:
    """What findings of one cause share: no numbers, names and paths."""
    return re.sub(r"\d+|'[^']*'|\"[^\"]*\"|/\S+", "#", problem[-300:])
