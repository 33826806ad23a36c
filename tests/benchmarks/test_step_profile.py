"""The profile of a step adds up, on a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.models import GENAI, converted

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_profile.py"


def test_every_node_is_counted() -> None:
    command = [sys.executable, str(SCRIPT), str(converted(GENAI)), "--contexts", "40,64"]
    done = subprocess.run(
        [*command, "--threads", "1", "--steps", "3", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["context"] for row in rows] == [40, 64]
    for row in rows:
        spent = row["operators"]
        assert row["nodes"] == rows[0]["nodes"] > 0
        assert sum(spent.values()) + row["rest_ms"] == pytest.approx(row["ms"])
        own = spent["TurboQuantEncode"] + spent["TurboQuantDequantAttention"]
        assert row["own_share"] == pytest.approx(own / row["ms"])
