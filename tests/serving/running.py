"""Answers of the Engine, as examples/serving drives it, and those of the Generator."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime_genai as og

from tests.serving.consumers import begin_together
from tq_onnx import Engine, Sampling
from tq_onnx.integrations.bundled import heldout_text
from tq_onnx.language.engine import batching_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "serving"
Tokens = list[int]

MOST_NOISE = 0.5
"""In logits of some 10."""


def example(name: str) -> ModuleType:
    """Imports a script of examples/serving."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def uneven_prompts(count: int, least: int = 4, most: int = 90) -> list[Tokens]:
    """Prompts of different lengths from places all over the held-out text; a token is a byte."""
    text = heldout_text().encode()
    step = len(text) // count
    lengths = np.random.default_rng(20).integers(least, most, count)
    return [list(text[place * step :][:length]) for place, length in enumerate(lengths)]


def answered(
    folder: Path, prompts: list[Tokens], new: int, *, together: bool | None = None
) -> list[Tokens]:
    """Answers of the Engine; prompts go to it together if that is asked for, or is allowed."""
    with Engine(folder) as engine:
        if together is not None:
            batching_with(engine, together=together)
        begin_together(engine, len(prompts))
        greedy, answer_all = Sampling(), example("engine").answer_all
        found: list[Tokens] = answer_all(engine, prompts, max_new_tokens=new, sampling=greedy)
    return found


def batching_with(engine: Engine, **changes: Any) -> None:
    """Has an Engine batch in another way than its folder allows."""
    engine._thread.batching = replace(engine.batching, **changes)


class Alone:
    """The Generator, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = og.Model(str(folder))
        self.rows = batching_of(folder).exact_rows
        """Of exact tokens, which its caches have room for besides the others."""

    def _start(self, tokens: Tokens, new: int) -> Any:
        params = og.GeneratorParams(self.model)
        params.set_search_options(max_length=len(tokens) + new + self.rows, do_sample=False)
        generator = og.Generator(self.model, params)
        generator.append_tokens(np.asarray(tokens, np.int32))
        return generator

    def answer(self, prompt: Tokens, new: int) -> Tokens:
        generator = self._start(prompt, new)
        for _ in range(new):
            if generator.is_done():
                break
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)][len(prompt) :]

    def noise(self, tokens: Tokens) -> float:
        """How far logits move if the last token is computed by itself."""
        whole, apart = self.logits(tokens), self._start(tokens[:-1], 2)
        apart.append_tokens(np.asarray(tokens[-1:], np.int32))
        return float(np.abs(np.asarray(apart.get_logits()).reshape(-1) - whole).max())

    def logits(self, tokens: Tokens) -> npt.NDArray[np.float32]:
        """Of the token that follows."""
        generator = self._start(tokens, 1)
        return np.asarray(generator.get_logits(), np.float32).reshape(-1)


def assert_near_ties_only(
    alone: Alone, prompts: Sequence[Tokens], answers: Sequence[Tokens], new: Sequence[int]
) -> None:
    """Answers are those of prompts that are alone; some may part where two tokens are as good.

    A prompt whose last token is computed by itself rounds differently, too: that measures what is
    near.
    """
    noise = max(alone.noise(prompt) for prompt in prompts)
    assert 0 < noise < MOST_NOISE
    parted = []
    for number, (prompt, answer, most) in enumerate(zip(prompts, answers, new, strict=True)):
        expected = alone.answer(prompt, most)
        assert len(answer) == len(expected) == most
        pairs = enumerate(zip(answer, expected, strict=True))
        place = next((place for place, (one, other) in pairs if one != other), None)
        if place is not None:
            logits = alone.logits(prompt + expected[:place])
            gap = float(logits[expected[place]] - logits[answer[place]])
            assert gap < 2 * noise, f"prompt {number} goes another way at token {place}"
            parted.append(f"prompt {number} at token {place}, a gap of {gap:.4f}")
    assert len(parted) < len(prompts) // 3
    if parted:
        warnings.warn(f"near-ties, noise is {noise:.4f}: {'; '.join(parted)}", stacklevel=1)
