"""``calibrate``: statistics of a model's keys, values and queries on a text.

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
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.probe import Probe
from tq_onnx.progress import OnProgress, Progress
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel
from tq_onnx.version import __version__

POSITIONS: Final = 17
"""Position rows of a table: one for each of the first sixteen positions, one for all others."""

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
    """Gather the statistics of an original.

    Args:
        model: the file; it is not changed.
        tokens: ids ``[n]``, read in windows that each begin with empty caches.
        context: tokens per window; fewer where the graph has no room for so many.
        begin: tokens that every text, and so every window, begins with.
        library: True to run the library's kernels, False to run the function bodies.
        threads: threads within an operator.
        on_progress: called as tokens are read.

    Raises:
        TqOnnxError: the model cannot be converted or run, the text is too short, or it has ids that
            the model does not know.
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
    """Empty the decoder, and yield the tokens of each call with their position."""
    decoder.reset()
    for call in decoder.calls(len(window), _CHUNK):
        chunk = window[call]
        # A graph that takes so many tokens and no fewer does without the last ones.
        if decoder.longest_call in (None, len(chunk)):
            yield call.start, chunk


def _add(gathering: Gathering, probe: Probe, decoder: Decoder, start: int) -> None:
    for index, layer in enumerate(probe.layers):
        query, key, value = (
            decoder.watched[name][0]
            for name in (layer.query, layer.key.vectors, layer.value.vectors)
        )
        gathering.add(index, start, query, key, value)
