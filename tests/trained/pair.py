"""The bundled Qwen3 and what was made of it, both open, with text that it never saw."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import ROUTES, build_bundled, heldout_text
from tq_onnx.integrations.huggingface import Tokenizer, load_tokenizer
from tq_onnx.measure import divergence
from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted, open_original

#: An export of the trained model; what holds for all exports is shown of one.
ONE_ROUTE = ROUTES[:1]

#: Tokens on which presets are compared with each other.
SAMPLE = 2048


@dataclass(frozen=True, eq=False)
class Pair:
    """An export of the trained model, and its conversion on the library's kernels."""

    original: Path
    converted: Path
    before: OpenModel
    after: OpenModel
    tokenizer: Tokenizer

    @cached_property
    def heldout(self) -> npt.NDArray[np.int64]:
        """All of the held-out text as tokens ``[n]``."""
        return np.asarray(self.tokenizer.encode(heldout_text()), np.int64)

    @cached_property
    def sample(self) -> QualityFigures:
        """Original against converted on a part of the held-out text that is soon read."""
        return self.quality(self.heldout[:SAMPLE])

    def quality(self, tokens: npt.NDArray[np.int64]) -> QualityFigures:
        """Original against converted in windows of 512 tokens, with empty caches each."""
        return divergence.compare(
            self.before.decoder(),
            self.after.decoder(),
            tokens,
            vocabulary=self.before.vocabulary,
            context=512,
            stride=504,
        )

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Prompts of ``length`` tokens from places all over the held-out text."""
        step = len(self.heldout) // count
        return [self.heldout[i * step : i * step + length].tolist() for i in range(count)]


def make_pair(folder: Path, route: str, preset: str) -> Pair:
    """Builds the export if it is not there yet, and converts it beside itself."""
    original = folder / route / "model.onnx"
    if not original.exists():
        build_bundled(route, original.parent)
    converted = original.with_name(f"{preset}.onnx")
    convert(original, converted, preset=preset)
    return Pair(
        original,
        converted,
        open_original(original, threads=2),
        open_converted(converted, threads=2),
        load_tokenizer(original.parent),
    )
