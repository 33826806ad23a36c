"""The text that models read, and its windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.errors import UsageError
from tq_onnx.runtime.model import OpenModel

MIN_TOKENS: Final = 16
"""Tokens of the shortest text that is compared."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """One stretch of text that is read with empty caches."""

    start: int  #: its first token
    stop: int  #: the position after its last token
    scored: int  #: the first position whose prediction counts; earlier ones only give context


def text_of(original: OpenModel, tokens: Sequence[int] | npt.NDArray[np.int64] | int) -> Ids:
    """Return the ids ``[n]`` of a text that a model can read."""
    if isinstance(tokens, int):
        tokens = np.random.default_rng(0).integers(0, original.vocabulary, tokens)
    text = np.asarray(tokens, np.int64)
    if len(text) < MIN_TOKENS:
        raise UsageError(
            f"a text of {len(text)} tokens is too short", fix=f"give {MIN_TOKENS} or more"
        )
    original.refuse_tokens(text)
    return text


def windows(tokens: int, context: int, stride: int) -> list[Window]:
    """Lay windows over a text; every position but the first is scored exactly once."""
    if tokens < 2:
        raise UsageError(f"a text of {tokens} tokens predicts nothing", fix="give a longer text")
    if context < 2 or not 0 < stride < context:
        raise UsageError(f"windows of {context} tokens cannot advance by {stride}")
    result = [Window(0, min(context, tokens), 0)]
    while result[-1].stop < tokens:
        last = result[-1]
        stop = min(last.stop + stride, tokens)
        start = stop - context
        # The prediction made at position p is for p + 1; the last window's final one is still due.
        result.append(Window(start, stop, last.stop - 1))
    return result


def blocks(tokens: int, context: int) -> list[Window]:
    """Lay windows side by side; every prediction of a token inside its window is scored.

    Tokens after the last whole window are not read; a text shorter than a window is one window.
    """
    if tokens < 2:
        raise UsageError(f"a text of {tokens} tokens predicts nothing", fix="give a longer text")
    if context < 2:
        raise UsageError(f"windows of {context} tokens predict nothing")
    size = min(context, tokens)
    return [Window(start, start + size, start) for start in range(0, tokens - size + 1, size)]
