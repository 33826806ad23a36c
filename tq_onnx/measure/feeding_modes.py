"""Feeding modes against each other: caches that grow or stay in place, prompts whole or in chunks.

A cache that grows and a cache of fixed capacity must hold the same bytes and lead to the same
tokens, to the bit: the same kernels run on the same numbers. A prompt fed in chunks should leave
the same bytes as a prompt fed whole; there the matrix products have other shapes, and where ONNX
Runtime rounds them differently a code that lies on a boundary may flip. Of caches that hold floats
as they are, a number counts as different if it differs by more than such roundings.

Kernels that multiply integers round queries and weights by the block that they are read with, so
that a few codes of the second layer differ; what that does to the last of many layers says nothing
about the graph. The model should therefore be opened as ``exact``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.spec import Codec, row_layout
from tq_onnx.plan import LayerPlan, Plan
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import OpenModel

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

_FLOATS: Final = {"FLOAT": np.float32, "FLOAT16": np.float16}
_SINGLE_BYTES: Final = np.dtype(np.float32).itemsize
_ROUNDING: Final = {"FLOAT": 1e-4, "FLOAT16": 1e-2}
"""Largest difference that roundings make, relative to the largest number of a cache."""
CHUNK: Final = 16
"""Tokens of a call where a prompt is read in several."""
SAME_NUMBERS: Final = 1e-2
"""Share of the largest number by which caches of an original may differ and be alike: float16."""


@dataclass(frozen=True)
class FeedingFigures:
    """The differences between the feeding modes of a model.

    Attributes:
        prompt_tokens: tokens of the prompt.
        new_tokens: greedy steps after it.
        cache_bytes: bytes of all caches after the prompt.
        fixed_capacity: True if the model takes caches of fixed capacity; if False, the two
            figures about them mean nothing.
        in_place_bytes_differing: bytes of the caches that differ from the growing ones at the end.
        in_place_tokens_equal: True if the greedy tokens are the same.
        chunk: tokens per chunk.
        chunk_bytes_differing: bytes after the prompt in chunks that differ from the bytes after
            the whole prompt.
        chunk_layer: the first layer with any, counted from 0; None if there is none.
        chunk_layer_bytes_differing: those in the caches of that layer.
        chunk_layer_bytes: bytes of the caches of that layer.
        chunk_layer_rows_differing: rows with any of them: one per token, KV head and cache.
        chunk_layer_token_share: the largest share of a token's rows there that differ.
        first_only: True if the graph takes one prompt only, so that nothing was compared.
    """

    prompt_tokens: int
    new_tokens: int
    cache_bytes: int
    fixed_capacity: bool
    in_place_bytes_differing: int
    in_place_tokens_equal: bool
    chunk: int
    chunk_bytes_differing: int
    chunk_layer: int | None = None
    chunk_layer_bytes_differing: int = 0
    chunk_layer_bytes: int = 0
    chunk_layer_rows_differing: int = 0
    chunk_layer_token_share: float = 0.0
    first_only: bool = False


@dataclass(frozen=True)
class CallDistance:
    """How far a cache of an original is after a prompt in chunks from what one call leaves."""

    rms: float  #: root of the squared distance over the squared norm
    largest: float  #: largest difference over the largest number


def chunk_of(model: OpenModel) -> int:
    """Return how many tokens a call has where a prompt is read in several."""
    # A longer call overwrites entries of the window that its own first tokens would have found.
    return 1 if model.plan is not None and model.plan.has_window else CHUNK


def compare_feeding_modes(
    model: OpenModel,
    prompt: npt.NDArray[np.int64],
    *,
    new_tokens: int = 8,
    chunk: int | None = None,
) -> tuple[FeedingFigures, list[npt.NDArray[Any]]]:
    """Feed a prompt to a converted model in every mode.

    Args:
        prompt: ids ``[n]``.
        chunk: tokens per call where it is read in several; by default ``chunk_of`` the model.

    Returns:
        The figures, and the caches after the prompt in chunks, in signature order; none of a graph
        that takes one prompt only.
    """
    if model.signature.first_only:
        return FeedingFigures(len(prompt), 0, 0, False, 0, True, 0, 0, first_only=True), []
    chunk = chunk or chunk_of(model)
    slots = model.signature.slots
    # Where the graph fixes the room or adds pages, the other way is to keep past and present apart.
    growing = model.decoder(alias=False)
    logits = growing.prefill(prompt[None])[0, -1]
    whole = all_caches(growing)
    tokens = _continue(growing, logits, new_tokens)
    final = all_caches(growing)
    chunked = model.decoder()
    chunked.prefill(prompt[None], chunk=chunk)
    differing, equal = 0, True
    if model.signature.fixed_capacity:
        # Room to spare: a slot that is never written must not matter.
        fixed = model.decoder(capacity=slots or len(prompt) + new_tokens + chunk)
        logits = fixed.prefill(prompt[None])[0, -1]
        equal = _continue(fixed, logits, new_tokens) == tokens
        differing = bytes_differing(final, all_caches(fixed))
    pieces = all_caches(chunked)
    counts = _apart(whole, pieces, model.plan)
    at = next((index // 2 for index, count in enumerate(counts) if count.any()), None)
    first = slice(0, 0) if at is None else slice(2 * at, 2 * at + 2)
    chunk_counts = counts[first]
    figures = FeedingFigures(
        prompt_tokens=len(prompt),
        new_tokens=new_tokens,
        cache_bytes=sum(part.nbytes for part in whole),
        fixed_capacity=model.signature.fixed_capacity,
        in_place_bytes_differing=differing,
        in_place_tokens_equal=equal,
        chunk=chunk,
        chunk_bytes_differing=int(sum(count.sum() for count in counts)),
        chunk_layer=at,
        chunk_layer_bytes_differing=int(sum(count.sum() for count in chunk_counts)),
        chunk_layer_bytes=sum(part.nbytes for part in whole[first]),
        chunk_layer_rows_differing=int(sum((count > 0).sum() for count in chunk_counts)),
        chunk_layer_token_share=_token_share(chunk_counts),
    )
    return figures, pieces


def call_distances(
    original: OpenModel, prompt: npt.NDArray[np.int64], chunk: int
) -> list[CallDistance]:
    """Compare what an original caches of a prompt in one call and in chunks, cache by cache.

    A graph that was traced with one token may lack the mask between the tokens of a call.
    """
    if original.signature.first_only:
        return []
    chunk = max(1, min(chunk, len(prompt) // 2))
    whole, parts = original.decoder(), original.decoder()
    whole.prefill(prompt[None])
    parts.prefill(prompt[None], chunk=chunk)
    distances = []
    for before, after in zip(all_caches(whole), all_caches(parts), strict=True):
        expected, computed = before.astype(np.float64), after.astype(np.float64)
        apart = expected - computed
        norm, largest = np.linalg.norm(expected), np.abs(expected).max(initial=0)
        distances.append(
            CallDistance(
                rms=float(np.linalg.norm(apart) / norm) if norm else 0.0,
                largest=float(np.abs(apart).max(initial=0) / largest) if largest else 0.0,
            )
        )
    return distances


def _continue(decoder: Decoder, logits: npt.NDArray[Any], steps: int) -> list[int]:
    tokens: list[int] = []
    for _ in range(steps):
        tokens.append(int(np.argmax(logits)))
        logits = decoder.step([tokens[-1]])[0]
    return tokens


def all_caches(decoder: Decoder) -> list[npt.NDArray[Any]]:
    """Return copies of the used parts of all caches, in signature order."""
    return [decoder.cache(index) for index in range(len(decoder.signature.caches))]


def all_planes(decoder: Decoder) -> list[npt.NDArray[Any]]:
    """Return copies of the used parts of all caches, with the rows of their windows in front."""
    return [decoder.plane(index) for index in range(len(decoder.signature.caches))]


def bytes_differing(some: list[npt.NDArray[Any]], references: list[npt.NDArray[Any]]) -> int:
    """Count the bytes in which arrays differ, pair by pair; all where their sizes do."""
    return sum(
        int((array.view(np.uint8) != reference.view(np.uint8)).sum())
        if array.shape == reference.shape
        else max(array.nbytes, reference.nbytes)
        for array, reference in zip(some, references, strict=True)
    )


def _apart(some: Sequence[Array], references: Sequence[Array], plan: Plan | None) -> list[Counts]:
    """Count differing bytes of each row, but not floats that differ by roundings only.

    Args:
        some: caches ``[B, N, T, W]``, in signature order.

    Returns:
        For each cache, int ``[B, N, T]``; where sizes differ, all bytes of the larger.
    """
    kinds: list[tuple[Codec, LayerPlan] | None] = [None] * len(some)
    if plan is not None:
        kinds = [(codec, layer) for layer in plan.layers for codec in layer.codecs]
    return [
        _apart_in(array, reference, kind)
        if array.shape == reference.shape
        else _all_of(array, reference)
        for array, reference, kind in zip(some, references, kinds, strict=True)
    ]


def _token_share(counts: Sequence[Counts]) -> float:
    """Return the largest share of a token's rows, of caches ``[B, N, T]``, that differ."""
    if len({count.shape for count in counts}) != 1:  # one side lacks tokens, or there is no layer
        return float(any(count.any() for count in counts))
    return float((np.stack(counts) > 0).mean((0, 2)).max(initial=0))


def _all_of(array: Array, reference: Array) -> Counts:
    larger = max(array, reference, key=lambda each: each.nbytes)
    return np.full(larger.shape[:-1], larger.shape[-1] * larger.itemsize)


def _apart_in(array: Array, reference: Array, kind: tuple[Codec, LayerPlan] | None) -> Counts:
    """Count the bytes of each row that differ."""
    if kind is None:
        return _differing(array.view(np.uint8), reference.view(np.uint8))
    codec, layer = kind
    layout = row_layout(codec, layer.head_size)
    exact = np.ones(array.shape[-1], np.bool_)
    floats = [
        (field.offset, field.offset + field.count * field.size, "FLOAT")
        for field in layout.fields
        if field.size == _SINGLE_BYTES
    ]
    if codec.is_raw:
        floats = [(0, layout.row_bytes, layer.dtype)]
    count = np.zeros(array.shape[:-1], np.int64)
    for start, stop, dtype in floats:
        exact[start:stop] = False
        count += _floats_apart(array[..., start:stop], reference[..., start:stop], dtype)
    return count + _differing(array[..., exact], reference[..., exact])


def _differing(array: Array, reference: Array) -> Counts:
    count: Counts = np.sum(array != reference, axis=-1, dtype=np.int64)
    return count


def _floats_apart(array: Array, reference: Array, dtype: str) -> Counts:
    """Count the bytes of floats of each row that differ by more than roundings."""
    floats = _FLOATS[dtype]
    first, second = (
        np.ascontiguousarray(part).view(floats).astype(np.float64) for part in (array, reference)
    )
    apart = np.abs(first - second) > _ROUNDING[dtype] * np.abs(first).max(initial=0)
    count: Counts = np.dtype(floats).itemsize * np.sum(apart, axis=-1, dtype=np.int64)
    return count
