"""A process that registered the schemas ends cleanly."""

from __future__ import annotations

import subprocess
import sys


def test_a_process_with_registered_schemas_exits_cleanly() -> None:
    code = "from tq_onnx.ops.schema import register_schemas; register_schemas()"

    finished = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)

    assert (finished.returncode, finished.stderr) == (0, b"")
