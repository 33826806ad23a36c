"""The trained Qwen3 as every exporter writes it: one model, before and after conversion."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.agreement.harness import CHUNKS, agreement, difference, edges
from tests.agreement.tolerances import allowed
from tests.exports.conftest import Exports
from tests.tolerances import bounds
from tq_onnx.conversion.options import Options
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.measure import divergence
from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.opening import open_model
from tq_onnx.verification.verify import verify

pytestmark = [
    pytest.mark.exports,
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the exporters' pins need Python 3.11"),
]

LAYERS = 4
VOCABULARY = 260
#: Held-out text; a token is a byte.
TEXT = np.frombuffer(heldout_text().encode()[:4096], np.uint8).astype(np.int64)
CONTEXT = 512
BOUNDS = bounds("exports")


@dataclass(frozen=True)
class File:
    """A graph that a route writes.

    Attributes:
        route: one of the routes of ``models/make_exports.py``.
        dialect: what its attention is recognised as.
        name: the file, without ``.onnx``.
    """

    route: str
    dialect: str
    name: str = "model"

    def __str__(self) -> str:
        """Names it in reports."""
        return self.route if self.name == "model" else f"{self.route}-{self.name}"


FILES = [
    File("dynamo", "decomposed"),
    File("legacy", "decomposed"),
    File("transformers", "decomposed", "prefill"),
    File("transformers", "decomposed", "decode"),
    File("genai", "gqa"),
    File("mobius", "onnx"),
    File("optimum", "decomposed"),
    File("genai09", "gqa"),
]
each = pytest.mark.parametrize("file", FILES, ids=str)


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the export that the product builds without torch."""
    folder = tmp_path_factory.mktemp("bundled") / "dynamo"
    build_bundled("dynamo", folder)
    return folder


@pytest.fixture(scope="session")
def reference(bundled: Path) -> QualityFigures:
    """What the figures of every route must be."""
    return verified(bundled, "model", "int4")


def converted(folder: Path, preset: str) -> Path:
    """The converted folder, beside the original; folders of genai have no window by default."""
    made = folder.with_name(f"{folder.name}-{preset}")
    if not made.exists():
        convert_folder(
            folder, made, preset=preset, options=Options(residual_length=0, sink_tokens=0)
        )
    return made


def verified(folder: Path, name: str, preset: str) -> QualityFigures:
    """Quality of one graph's conversion, once all else that ``verify`` looks at holds."""
    report = verify(
        *(folder / f"{name}.onnx", converted(folder, preset) / f"{name}.onnx", TEXT),
        source="the held-out text",
        new_tokens=8,
        context=CONTEXT,
        threads=2,
    )
    assert [check for check in report.checks if not check.holds] == []
    return report.quality


def harmless(found: QualityFigures) -> bool:
    """Whether no more is lost than int4 may lose."""
    change = abs(found.perplexity_change)
    return change <= BOUNDS["perplexity_change"] and found.kl_mean <= BOUNDS["kl_mean"]


def same_story(found: QualityFigures, reference: QualityFigures) -> None:
    """It is one model, whoever exported it, and one conversion of it."""
    assert found.positions == len(TEXT) - 1
    assert harmless(found), found
    expected = pytest.approx(reference.original_perplexity, rel=BOUNDS["same_perplexity"])
    assert found.original_perplexity == expected
    # Not zero either: from a 4-bit cache, predictions are not the original's to the last bit.
    assert found.kl_mean == pytest.approx(reference.kl_mean, rel=BOUNDS["same_kl"])


@each
def test_a_raw_conversion_is_its_original(file: File, exports: Exports) -> None:
    found = agreement(exports(file.route) / f"{file.name}.onnx", "raw", library=True)

    assert found.refusal == ""
    assert (found.layers, found.dialects) == (LAYERS, file.dialect)
    assert found.worst <= allowed(found, "raw"), found.figures
    assert ("chunks" in found.figures) == (file.name != "prefill")
    print(f"{file}: {found.layers} layers, {found.dialects}, raw {found.worst:.1e}")  # pytest -rP


@each
def test_int4_tells_the_same_story(file: File, exports: Exports, reference: QualityFigures) -> None:
    found = verified(exports(file.route), file.name, "int4")

    same_story(found, reference)
    print(f"{file}: perplexity {found.perplexity_change:+.3%}, KL {found.kl_mean:.6f}")


def pair(folder: Path) -> Decoder:
    """A prompt by one graph, what follows by the other."""
    first, then = (open_model(folder / f"{name}.onnx") for name in ("prefill", "decode"))
    return then.decoder(first=first)


def test_the_raw_conversion_of_a_pair_is_the_pair(exports: Exports) -> None:
    folder = exports("transformers")
    own, other = (
        np.concatenate([decoder.prefill(TEXT[None, a:b])[0] for a, b in edges(CHUNKS)])
        for decoder in (pair(folder), pair(converted(folder, "raw")))
    )

    assert difference(own, other) <= bounds("agreement")["float32"]
    assert difference(own, other[::-1]) > bounds("agreement")["float32"]


def test_int4_of_a_pair_tells_the_same_story(exports: Exports, reference: QualityFigures) -> None:
    folder = exports("transformers")
    found = divergence.compare(
        pair(folder),
        pair(converted(folder, "int4")),
        TEXT,
        vocabulary=VOCABULARY,
        context=CONTEXT,
        stride=CONTEXT // 2,
    )

    same_story(found, reference)
    print(f"pair: perplexity {found.perplexity_change:+.3%}, KL {found.kl_mean:.6f}")


def test_the_bounds_tell_int3_from_int4(bundled: Path, reference: QualityFigures) -> None:
    assert harmless(reference)
    assert not harmless(verified(bundled, "model", "int3"))
