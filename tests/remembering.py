"""What a process of tests computes once: it changes nothing but the time."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import onnxruntime
import pytest

from tq_onnx.codec import rotation
from tq_onnx.verification.baseline import Baseline

FIXTURES = Path(__file__).parent / "fixtures"


class OneThread(onnxruntime.SessionOptions):
    """One thread where a test asks for no number, and threads that wait without spinning.

    A machine has as many workers as processors; what a session does with more is asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.intra_op_num_threads = 1
        self.add_session_config_entry("session.intra_op.allow_spinning", "0")


@contextmanager
def remembering() -> Iterator[None]:
    """Makes each rotation once, reads each fixture that verify compares with once, and more.

    onnx-ir lists the members of its protocols wherever it serialises; Python remembers them from
    3.12 on. Originals outside of the fixtures are read as the product reads them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "SessionOptions", OneThread)
        read = Baseline.of
        kept = cache(lambda path, threads: read(path, threads=threads, is_kept=True))

        def baseline(path: Path, *, threads: int | None = None, is_kept: bool = False) -> Baseline:
            if path.parent == FIXTURES:
                return kept(path, threads)
            return read(path, threads=threads, is_kept=is_kept)

        patch.setattr(Baseline, "of", baseline)
        patch.setattr(rotation, "make_rotation", cache(rotation.make_rotation))
        if sys.version_info < (3, 12):
            patch.setattr(typing, "_get_protocol_attrs", cache(typing._get_protocol_attrs))
        yield
