"""The graphs that a decoder calls, and checks of them and of their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnxruntime

from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.plan import Plan
from tq_onnx.runtime.feeding import Feeding
from tq_onnx.runtime.signature import Signature


@dataclass(frozen=True, eq=False)
class Graph:
    """A graph that a decoder calls."""

    session: onnxruntime.InferenceSession
    signature: Signature
    feeding: Feeding


def check_pair(first: Plan | None, then: Plan | None) -> None:
    """Refuse a graph for prompts whose caches mean something else in the other graph."""
    converted = (first is not None) + (then is not None)
    layer = first.unlike(then) if first is not None and then is not None else None
    if converted == 1 or layer is not None:
        where = "" if layer is None else f" in the caches of layer {layer}"
        raise UsageError(
            "the graph for first prompts and the one that continues its caches were not converted "
            f"alike{where}",
            fix="convert both with the same preset, options and calibration file",
        )


def check_logits(shape: Sequence[int], rows: int, tokens: int, where: str) -> None:
    """Refuse a model whose logits are not of the tokens that it was given."""
    if len(shape) != 3 or shape[0] != rows or shape[1] not in (1, tokens):
        raise UnsupportedModelError(
            f"the model gives logits of shape {list(shape)} for ids of shape {[rows, tokens]}",
            where=where,
            fix="export it with logits of the shape [batch, tokens, vocabulary]",
        )


def copies_of(rows: int | None, batch: int, where: str) -> int:
    """Return the number of copies of each sequence in a graph that takes so many rows."""
    if rows is None or rows == batch:
        return 1
    if rows % batch:
        raise UsageError(
            f"{batch} sequences were given to a graph that takes {rows} at a time", where=where
        )
    return rows // batch
