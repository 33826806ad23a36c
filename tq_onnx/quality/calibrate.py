"""``calibrate``: statistics of a model's keys, values and queries on a text.

The model is converted in memory with the preset ``raw``, which computes what the original computes:
the inputs of its nodes are the model's own keys, values and queries, in one form for every dialect.
Nothing is written, and weights in external data stay where they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.calibration import Calibration
from tq_onnx.codec.gathering import Gathering
from tq_onnx.codec.rotaryangles import Measurement
from tq_onnx.conversion.branches import load_decoder
from tq_onnx.conversion.original import Original, recognise_original
from tq_onnx.conversion.pipeline import Prepared, prepare
from tq_onnx.errors import UsageError
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.probe import Probe
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.quality.rotaries import measure_rotaries
from tq_onnx.recognise.positions import table_positions
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.fingerprint import fingerprint_tokens
from tq_onnx.runtime.model import OpenModel
from tq_onnx.targets.angles_at_any_length import length_complaints
from tq_onnx.version import __version__

POSITIONS: Final = 17
"""Position rows of a table: one for each of the first sixteen positions, one for all others."""

_BEGINNINGS: Final = 64
"""Windows that have to begin somewhere in the text: means of the first positions over a few windows
are noise. Where long windows are fewer, the beginnings of others are read besides."""

_PARTS: Final = (1, 2, 4)
_SHORTEST_PART: Final = 256
"""Windows are whole, halves and quarters by turns, where quarters have so many tokens. Keys turn
with their positions, and all contexts begin with the first ones, however long they become. SmolLM2
in int4 has a tenth less KL divergence than after windows of 2,048 alone, in those of 1,024 and of
2,048 tokens."""

_CHUNK: Final = 256
"""Tokens per call, which bounds the memory that keys, values and queries of all layers take."""


def calibrate(
    model: Path,
    tokens: npt.ArrayLike,
    *,
    original: Original | None = None,
    context: int = 2048,
    begin: Sequence[int] = (),
    library: bool = True,
    threads: int | None = None,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Gather the statistics of an original.

    Args:
        model: the file; it is not changed.
        tokens: ids ``[n]``, read in windows that each begin with empty caches; beginnings of more
            windows are read again, for the means of the first positions.
        context: tokens of the longest windows; fewer where the graph has no room for so many.
        begin: tokens that every text, and so every window, begins with.
    """
    text = np.asarray(tokens, np.int64)
    original = original or recognise_original(load_decoder(model), model)
    prepared = prepare(model, preset="raw", original=original)
    probe = expose_internals(model, loaded=prepared.loaded)
    decoder = probe.decoder(library=library, threads=threads)
    positions = table_positions(prepared.loaded.model, decoder.signature.interface)
    opened = OpenModel(model, decoder.session, decoder.signature, positions=positions)
    opened.refuse_text()
    if len(text):
        opened.refuse_tokens(np.concatenate([begin, text]).astype(np.int64))
    context = min(context, opened.longest or context)
    new = context - len(begin)
    if new < 1:
        raise UsageError(f"windows of {context} tokens have no room for a text", where=str(model))
    measured = _measured(opened, probe, decoder, text, prepared)
    gathering = Gathering(len(probe.layers), POSITIONS, measured)
    tell = on_progress or silent
    whole = _windows(len(text), new)
    read = 0
    for part in whole:
        window = np.concatenate([begin, text[part]]).astype(np.int64)
        for position, chunk in _chunks(window, decoder):
            _gather(gathering, probe, decoder, chunk, position)
            read += min(len(chunk), max(0, position + len(chunk) - len(begin)))
            tell(Progress("Reading the text", read, len(text)))
    beginnings = _beginnings(len(text), len(whole)) if context >= POSITIONS else []
    for index, start in enumerate(beginnings):
        length = POSITIONS - 1 - len(begin)
        window = np.concatenate([begin, text[start : start + max(length, 0)]])[: POSITIONS - 1]
        for position, chunk in _chunks(window.astype(np.int64), decoder):
            _gather(gathering, probe, decoder, chunk, position)
        tell(Progress("Reading the beginnings of windows", index + 1, len(beginnings)))
    digest = hashlib.sha256(text.astype("<i8").tobytes()).hexdigest()
    statistics = gathering.result(
        tokens=read,
        context=min(context, len(begin) + len(text)),  # no window was longer than the text
        tool_version=__version__,
        text_digest=digest,
    )
    ids = fingerprint_tokens(opened.vocabulary, opened.longest)
    return _with_fingerprint(statistics, probe, decoder, ids)


def _measured(
    opened: OpenModel,
    probe: Probe,
    decoder: Decoder,
    text: npt.NDArray[np.int64],
    prepared: Prepared,
) -> list[Measurement]:
    """Measure how the keys of each layer turn with their position, at any length of a text."""
    model = prepared.loaded.model

    def read(window: npt.NDArray[np.int64]) -> Iterator[dict[str, npt.NDArray[Any]]]:
        for _, chunk in _chunks(window, decoder):
            decoder.prefill(chunk[None])
            yield decoder.watched

    measured = measure_rotaries(probe, read, text, model, longest=opened.longest)
    doubts = length_complaints(model, prepared.plan, opened.positions)
    return [
        replace(one, rotary=None, doubt=doubt) if doubt and one.rotary is not None else one
        for one, doubt in zip(measured, doubts, strict=True)
    ]


def _with_fingerprint(
    found: Calibration, probe: Probe, decoder: Decoder, ids: npt.NDArray[np.int64]
) -> Calibration:
    """Add what tells the model from others: what it caches for the last of some ids."""
    fed = 0
    for position, chunk in _chunks(ids, decoder):
        decoder.prefill(chunk[None])
        fed = position + len(chunk)
    layers = []
    for statistics, layer in zip(found.layers, probe.layers, strict=True):
        key, value = (
            decoder.watched[names.vectors][0, :, -1].astype(np.float64) for names in layer.caches
        )
        layers.append(replace(statistics, k_fingerprint=key, v_fingerprint=value))
    return replace(found, layers=tuple(layers), fingerprint_tokens=tuple(ids[:fed].tolist()))


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


def _windows(tokens: int, longest: int) -> list[slice]:
    """Return the parts of a text that are windows, of several lengths if they can be long."""
    sizes = [longest // part for part in _PARTS]
    if sizes[-1] < _SHORTEST_PART:
        sizes = [longest]
    slices: list[slice] = []
    start = 0
    while start < tokens:
        size = sizes[len(slices) % len(sizes)]
        slices.append(slice(start, start + size))
        start += size
    return slices


def _beginnings(tokens: int, windows: int) -> list[int]:
    """Return where windows begin besides those that are read as a whole, spread over the text."""
    count = max(0, min(_BEGINNINGS, tokens // _BEGINNINGS) - windows)
    return [(2 * index + 1) * tokens // (2 * count) for index in range(count)]


def _gather(
    gathering: Gathering,
    probe: Probe,
    decoder: Decoder,
    chunk: npt.NDArray[np.int64],
    start: int,
) -> None:
    """Read one call's tokens, which begin at a position, and add what the layers made of them."""
    decoder.prefill(chunk[None])
    gathering.count(start, len(chunk))
    for index, layer in enumerate(probe.layers):
        query, key, value = (
            decoder.watched[name][0]
            for name in (layer.query, layer.key.vectors, layer.value.vectors)
        )
        gathering.add(index, start, query, key, value)
