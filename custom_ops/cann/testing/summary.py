"""Prints what the bench measured as one JSON object on one line.

Usage: summary.py FOLDER. A test that measures a field writes ``<field>.json`` there; a field that
nothing measured is null.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FIELDS = (
    "provider",
    "float_nodes_on_cpu",
    "copies_per_step",
    "same_greedy_tokens",
    "cache_bytes_differing",
    "max_logit_error",
    "hazards",
    "mutations_caught",
    "mutations_total",
)


def main() -> None:
    folder = Path(sys.argv[1])
    measured = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    unknown = sorted(set(measured) - set(FIELDS))
    if unknown:
        sys.exit(f"unknown fields: {', '.join(unknown)}")
    print(json.dumps({field: measured.get(field) for field in FIELDS}))


if __name__ == "__main__":
    main()
