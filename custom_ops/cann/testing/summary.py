"""Prints what the bench measured as one JSON object on one line.

Usage: summary.py FOLDER. A test that measures a field writes ``<field>.<worker>.json`` there, a
worker being a process of pytest; a field that nothing measured is null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIELDS = (
    "provider",
    "float_nodes_on_cpu",
    "copies_per_step",
    "same_greedy_tokens",
    "cache_bytes_differing",
    "max_logit_error",
    "hazards",
    "cores_used",
    "launches_per_step",
    "mutations_caught",
    "mutations_total",
)


SUMMED = ("hazards",)
"""What every worker counts for its own tests; of the others all must have measured the same."""


def main() -> None:
    found: dict[str, list[Any]] = {}
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        found.setdefault(file.name.split(".")[0], []).append(json.loads(file.read_text()))
    unknown = sorted(set(found) - set(FIELDS))
    several = {name: values for name, values in found.items() if name not in SUMMED}
    apart = sorted(
        name for name, values in several.items() if values.count(values[0]) < len(values)
    )
    if unknown or apart:
        sys.exit(f"unknown fields: {unknown}; fields with several values: {apart}")
    summed = {name: sum(values) if name in SUMMED else values[0] for name, values in found.items()}
    print(json.dumps({field: summed.get(field) for field in FIELDS}))


if __name__ == "__main__":
    main()
