"""Findings of parts in a file, from which an interrupted verification goes on.

What another device, other packages or other models gave is not taken over.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tq_onnx.ascend.verification.findings import Request

Findings = dict[str, Any]
"""What the process of a part wrote."""


class KeptParts:
    """The parts that were finished before, and those that are finished now.

    Args:
        path: of the file; None to keep nothing.
        request: what is checked.
        device: what the first part found, by which it is known again.
    """

    def __init__(self, path: Path | None, request: Request, device: Findings) -> None:
        """Read the file, if there is one that belongs to this request and device."""
        self._path = path
        self._of = _fingerprint(request, device)
        self._parts: dict[str, Findings] = {}
        if path is None:
            return
        with suppress(OSError, ValueError, TypeError, KeyError):
            before = json.loads(path.read_text(encoding="utf-8"))
            if before["of"] == self._of:
                self._parts = dict(before["parts"])

    def get(self, part: str) -> Findings | None:
        """Return what a part found before; None if it has not been run."""
        return self._parts.get(part)

    def add(self, part: str, findings: Findings) -> None:
        """Keep what a part found; a file that cannot be written does not end what took minutes."""
        self._parts[part] = findings
        if self._path is None:
            return
        text = json.dumps({"of": self._of, "parts": self._parts})
        new = self._path.with_name(f"{self._path.name}.new")
        with suppress(OSError):
            new.write_text(text, encoding="utf-8")
            new.replace(self._path)


def _fingerprint(request: Request, device: Findings) -> str:
    models = [(str(path.resolve()), *_state(path)) for path in request.models]
    facts = [device["environment"], models, request.brief]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _state(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_size, state.st_mtime_ns
