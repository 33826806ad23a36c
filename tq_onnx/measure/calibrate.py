"""Runs a model over a text and gathers statistics of its keys, values and queries.

The model is converted in memory with the preset ``raw``, which computes what the original computes:
the inputs of its nodes are the model's own keys, values and queries, in one form for every dialect.
Nothing is written, and weights in external data stay where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.calibration import Calibration
from tq_onnx.codec.gathering import Gathering
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.errors import UsageError
from tq_onnx.measure.probe import Probe, expose_internals
from tq_onnx.progress import OnProgress, Progress
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel
from tq_onnx.version import __version__

POSITIONS: Final = 17
"""Position rows of a table: sixteen first positions on their own, and all others."""

_CHUNK: Final = 256
"""Tokens per call, which bounds the memory that keys, values and queries of all layers take."""


def calibrate(
    model: Path,
    tokens: npt.ArrayLike,
    *,
    context: int = 1024,
    begin: Sequence[int] = (),
    library: bool = True,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Gathers the statistics of an original.

    Args:
        model: the file; it is not changed.
        tokens: ids ``[n]``, read in windows that each begin with empty caches.
        context: tokens per window; fewer where the graph has no room for so many.
        begin: tokens that every text begins with, and so every window.
        library: whether kernels run the caches, or function bodies.
        threads: threads within an operator.
        on_progress: called as tokens are read.

    Raises:
        TqOnnxError: the model cannot be converted or run, or the text is too short or not of its
            tokens.
    """
    text = np.asarray(tokens, np.int64)
    prepared = prepare(model, preset="raw")
    probe = expose_internals(model, loaded=prepared.loaded)
    decoder = probe.decoder(library=library, threads=threads)
    opened = OpenModel(model, decoder.session, decoder.signature)
    opened.refuse_text()
    if len(text):
        opened.refuse_tokens(np.concatenate([begin, text]).astype(np.int64))
    context = min(context, opened.room or context)
    new = context - len(begin)
    if new < 1:
        raise UsageError(f"windows of {context} tokens have no room for a text", where=str(model))
    gathering = Gathering(len(probe.layers), POSITIONS)
    read = 0
    for start in range(0, len(text), new):
        window = np.concatenate([begin, text[start : start + new]]).astype(np.int64)
        for position, chunk in _chunks(window, decoder):
            decoder.prefill(chunk[None])
            gathering.count(position, len(chunk))
            _add(gathering, probe, decoder, position)
            read += min(len(chunk), max(0, position + len(chunk) - len(begin)))
            if on_progress is not None:
                on_progress(Progress("Reading the text", read, len(text)))
    digest = hashlib.sha256(text.astype("<i8").tobytes()).hexdigest()
    return gathering.result(
        tokens=read, context=context, tool_version=__version__, text_digest=digest
    )


def _chunks(
    window: npt.NDArray[np.int64], decoder: Decoder
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """What goes into one call each, and where it begins; the decoder is empty at first."""
    decoder.reset()
    once = decoder.signature.first_only
    size = decoder.longest_call or (len(window) if once else _CHUNK)
    for start in range(0, len(window), size):
        chunk = window[start : start + size]
        # A graph that takes so many tokens and no fewer does without the last ones.
        if decoder.longest_call in (None, len(chunk)):
            yield start, chunk


def _add(gathering: Gathering, probe: Probe, decoder: Decoder, start: int) -> None:
    for index, layer in enumerate(probe.layers):
        query, key, value = (
            decoder.watched[name][0]
            for name in (layer.query, layer.key.vectors, layer.value.vectors)
        )
        gathering.add(index, start, query, key, value)
