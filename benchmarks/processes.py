"""The driver's end of a worker: starts its process, asks, and waits until its threads are quiet."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from registry import Named

FOLDER = Path(__file__).resolve().parent
LONGEST_SECONDS = 300.0
"""A worker that takes longer for one answer is given up."""

SPIN_SECONDS = 0.3
"""The longest that a pool's threads are waited for."""

_LOOK_SECONDS = 0.005


class WorkerError(RuntimeError):
    """A worker says why it cannot, or has ended."""


class WorkerProcess:
    """One peer's process."""

    def __init__(self, named: Named, python: str) -> None:
        """Starts it; ``open`` says whether the peer is installed there."""
        self.named = named
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        environment = os.environ | named.environment
        # The worker finds tq_onnx where this process found it, installed or not.
        environment["PYTHONPATH"] = os.pathsep.join([str(FOLDER), *filter(None, sys.path[1:])])
        if python != sys.executable:
            environment["PYTHONPATH"] = str(FOLDER)
        self._process = subprocess.Popen(
            [python, str(FOLDER / "worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            encoding="utf-8",
            env=environment,
        )

    def open(self) -> str:
        """Version of what is measured.

        Raises:
            WorkerError: it is not installed.
        """
        named = self.named
        peer = {"module": named.module, "kind": named.kind, "arguments": named.arguments}
        return str(self.ask(do="open", peer=peer)["version"])

    def ask(self, **message: Any) -> dict[str, Any]:
        """One answer.

        Raises:
            WorkerError: the worker says why not, has ended, or takes too long.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        guard = threading.Timer(LONGEST_SECONDS, self._process.kill)
        guard.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        finally:
            guard.cancel()
        if not line:
            raise WorkerError(f"its process ended with status {self._process.wait()}{self._last()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def wait_until_quiet(self) -> None:
        """Returns when its threads no longer spin on the cores of whoever is next."""
        end = time.perf_counter() + SPIN_SECONDS
        before = self._ran()
        if before is None:
            time.sleep(SPIN_SECONDS / 3)
            return
        while time.perf_counter() < end:
            time.sleep(_LOOK_SECONDS)
            after = self._ran()
            if after is None or after - before < 0.1 * _LOOK_SECONDS:
                return
            before = after

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ran(self) -> float | None:
        """Seconds that its threads have run; None where the system does not tell."""
        try:
            tasks = list(Path(f"/proc/{self._process.pid}/task").iterdir())
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9
        except (OSError, ValueError, IndexError):
            return None

    def _last(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()}" if lines else ""
