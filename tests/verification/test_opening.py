"""Each command reads each file once, and makes one session for each way in which a model runs."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.runtime.models import DYNAMO, converted, ids, original
from tq_onnx.files import load
from tq_onnx.quality.calibrate import calibrate
from tq_onnx.quality.report import report
from tq_onnx.speed.bench import bench
from tq_onnx.verification.verify import verify

TEXT = ids(48, seed=7)[0]
MODELS = original(DYNAMO), converted(DYNAMO)
IN_MEMORY = "in memory"


class Openings:
    """How often each file was read, and how many sessions were made of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: Counter[str] = Counter()
        self.sessions: Counter[str] = Counter()
        locate, session = load._locate, onnxruntime.InferenceSession

        def count_read(path: Path, where: str) -> Any:
            self.reads[path.name] += 1
            return locate(path, where)

        def count_session(source: str | bytes, *arguments: Any, **options: Any) -> Any:
            self.sessions[Path(source).name if isinstance(source, str) else IN_MEMORY] += 1
            return session(source, *arguments, **options)

        monkeypatch.setattr(load, "_locate", count_read)
        monkeypatch.setattr(onnxruntime, "InferenceSession", count_session)


@pytest.fixture
def openings(monkeypatch: pytest.MonkeyPatch) -> Openings:
    return Openings(monkeypatch)


ORIGINAL, CONVERTED = (path.name for path in MODELS)


@pytest.mark.parametrize(("library", "plain", "exposed"), [(True, 2, 4), (False, 1, 3)])
def test_verify(
    openings: Openings, library: bool, plain: int, exposed: int, tmp_path: Path
) -> None:
    """The kernels run as they are and with exact products; kernels and bodies are exposed.

    In memory, too: what reads the text of the check "quality", and the original with its caches
    converted to ``raw``.
    """
    options: dict[str, Any] = {"library": library, "threads": 1, "new_tokens": 2}
    # A copy: tests read the fixture itself once for all of them (tests/remembering.py).
    own = Path(shutil.copyfile(MODELS[0], tmp_path / ORIGINAL))
    assert verify(own, MODELS[1], TEXT, source="", **options).holds
    assert openings.reads == {ORIGINAL: 1, CONVERTED: 1}
    assert openings.sessions == {ORIGINAL: 1, CONVERTED: plain, IN_MEMORY: exposed}


def test_report(openings: Openings) -> None:
    report(MODELS[0], [MODELS[1]], TEXT, source="", context=24, threads=1)
    assert openings.reads == {ORIGINAL: 1, CONVERTED: 1}
    # In memory: the original without codecs, and the layers of the conversion.
    # The original is closed while its conversions are compared with it.
    assert openings.sessions == {ORIGINAL: 2, CONVERTED: 1, IN_MEMORY: 2}


def test_bench(openings: Openings) -> None:
    options: dict[str, Any] = {"preset": "int4", "contexts": (16,), "tokens": 1, "threads": 1}
    bench(*MODELS, **options)
    assert openings.reads == {ORIGINAL: 1, CONVERTED: 1}
    assert openings.sessions == {ORIGINAL: 1, CONVERTED: 1}
    bench(MODELS[0], **options)
    assert openings.reads == {ORIGINAL: 2, CONVERTED: 1}
    assert openings.sessions == {ORIGINAL: 2, CONVERTED: 1, IN_MEMORY: 1}


def test_calibrate(openings: Openings) -> None:
    calibrate(MODELS[0], np.tile(TEXT, 2), threads=1)
    assert openings.reads == {ORIGINAL: 1}
    assert openings.sessions == {IN_MEMORY: 1}
