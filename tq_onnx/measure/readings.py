"""Readings of a short prompt: logits, caches and inner values, and how far two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from tq_onnx.errors import UnsupportedModelError
from tq_onnx.files.load import LoadedModel
from tq_onnx.graph.copying import copy_graph
from tq_onnx.measure.probe import LayerNames
from tq_onnx.measure.rawform import has_codes, multiply_floats
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.session import make_session
from tq_onnx.targets.paged.logits import keep_all

_STEPS: Final = 2
_PADDING: Final = 5
"""Tokens of the prompt that are read as padding on the left, once more."""

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Reading:
    """The results of a model that has read a prompt, in two calls and a few steps."""

    logits: Floats  #: of all calls, ``[1, T, V]``
    caches: list[Array]  #: all tokens that are in the caches ``[1, N, S, W]``, in signature order
    watched: dict[str, Array]  #: inner values of all calls, by name
    #: what follows the first tokens of the prompt if they are padding on the left; None of a graph
    #: that takes none
    padded: Reading | None = None


def read_original(floats: OpenModel, prompt: npt.NDArray[np.int64]) -> Reading:
    """Read a prompt with an original.

    Args:
        prompt: ids ``[n]``.
    """
    reading = read(floats.decoder(), prompt)
    numbers = [array for array in (reading.logits, *reading.caches) if array.dtype.kind == "f"]
    if any(np.isnan(array).any() for array in numbers):
        raise UnsupportedModelError(
            "the original computes NaN, with which nothing can be compared",
            where=str(floats.path),
            fix="check the export",
        )
    # Queries that see no key may be NaN, and spoil what is behind them.
    spoilt = reading.padded is not None and np.isnan(reading.padded.logits).any()
    return replace(reading, padded=None) if spoilt else reading


def with_float_products(
    opened: OpenModel,
    loaded: LoadedModel,
    *,
    library: bool,
    threads: int | None = None,
    exact: bool = False,
) -> OpenModel:
    """Return a model that multiplies quantised weights as floats; itself if it does so already.

    Args:
        loaded: its graph; it is not changed.
    """
    model = multiply_floats(loaded.model)
    if model is loaded.model and not has_codes(model):
        return opened
    options = {"library": library, "threads": threads, "exact": exact, "keeps_codes": False}
    return _with_graph(opened, loaded, model, **options)


def with_all_logits(
    opened: OpenModel, loaded: LoadedModel, *, library: bool, threads: int | None = None
) -> OpenModel:
    """Return a model that gives the logits of all tokens of a call; itself if it does so already.

    One whose caches lie in pages gives those of the last tokens only. The arguments are those of
    ``with_float_products``.
    """
    if not opened.signature.is_paged:
        return opened
    model = copy_graph(loaded.model)
    keep_all(model, opened.signature.interface.logits)
    options = {"library": library, "threads": threads, "memory_reuse": library}
    return _with_graph(opened, loaded, model, **options)


def _with_graph(
    opened: OpenModel, loaded: LoadedModel, model: ir.Model, **options: Any
) -> OpenModel:
    content = ir.to_proto(model).SerializeToString()
    session = make_session(content, external_data=loaded.path.parent, **options)
    return replace(opened, session=session)


def read(
    decoder: Decoder, prompt: npt.NDArray[np.int64], layers: Sequence[LayerNames] = ()
) -> Reading:
    """Feed a prompt in two calls and steps; a graph for first prompts takes it at once.

    It is fed again with padding on the left, if the graph takes that and calls of any length.

    Args:
        decoder: batch 1, with empty caches; it watches what ``layers`` name.
        prompt: ids ``[n]``.
    """
    count = len(prompt)
    ends = [count]
    if not decoder.signature.first_only:
        ends = [(count - _STEPS) * 3 // 4, *range(count - _STEPS, count + 1)]
    names = [name for layer in layers for _, name in values_of(layer)]
    reading = _read(decoder, prompt, ends, names)
    if not decoder.takes_padding or decoder.longest_call or not ends[0] > _PADDING:
        return reading
    decoder.reset()
    return replace(reading, padded=_read(decoder, prompt, ends, names, padding=_PADDING))


def _read(
    decoder: Decoder,
    prompt: npt.NDArray[np.int64],
    ends: Sequence[int],
    names: Sequence[str],
    *,
    padding: int = 0,
) -> Reading:
    """Feed a prompt in calls that end there; return what is behind the padding on its left."""
    mask = np.ones((1, len(prompt)), np.int64)
    mask[:, :padding] = 0
    logits: list[Array] = []
    watched: dict[str, list[Array]] = {name: [] for name in names}
    start = 0
    for end in ends:
        for piece in decoder.calls(end - start):
            tokens = prompt[start:end][piece]
            padded = mask[:, start:end][:, piece] if padding else None
            logits.append(decoder.prefill(tokens[None], padded).astype(np.float64))
            for name, parts in watched.items():
                parts.append(decoder.watched[name])
        start = end
    count = len(decoder.signature.caches)
    caches = [decoder.cache(index)[:, :, padding:] for index in range(count)]
    joined = {name: np.concatenate(parts, axis=2) for name, parts in watched.items()}
    behind = {name: values[:, :, padding:] for name, values in joined.items()}
    return Reading(np.concatenate(logits, axis=1)[:, padding:], caches, behind)


def values_of(layer: LayerNames) -> Iterator[tuple[str, str]]:
    """Yield what is compared of a layer, with its names, in the order of computation."""
    yield "queries", layer.query
    yield "keys", layer.key.vectors
    yield "values", layer.value.vectors
    yield "results of attention", layer.output


def distance(expected: Array, computed: Array) -> float:
    """Return the relative distance of arrays that mean the same; infinite if they cannot."""
    if expected.shape != computed.shape:
        return float("inf")
    left, right = (np.asarray(array, np.float64) for array in (expected, computed))
    equal = np.array_equal(left, right, equal_nan=True)
    with np.errstate(all="ignore"):
        energy = max(float((left**2).sum()), 1e-300)
        return 0.0 if equal else float(np.sqrt(((left - right) ** 2).sum() / energy))


def widened(rows: Array, size: int) -> Array:
    """Return rows with the zeros behind them that a conversion puts behind narrow values."""
    missing = size - rows.shape[-1]
    return np.pad(rows, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing > 0 else rows
