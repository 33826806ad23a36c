"""The oracle: kernels and function bodies against the numpy reference, node by node.

Every TurboQuant node of the exposed layers is judged on its own inputs, taken from the running
model:

- encode: codes and fields of the new rows against ``codec.reference.encode``
  (``tq_onnx.codec.acceptance``);
- attention: the result against float64 attention over the decoded cache.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec import paged, reference
from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.rounding import EXACT, Rounding
from tq_onnx.codec.window import NO_WINDOW, ExactTokens
from tq_onnx.measure.probe import LayerNames, Probe
from tq_onnx.measure.reconstruction import ReconstructionFigures, reconstruction
from tq_onnx.progress import OnProgress, Progress
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.library import library_info
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.runtime.variables import PRODUCTS

KERNEL: Final = "kernel"
BODY: Final = "function body"
DEVICE: Final = "kernel on {}"
"""Name of the backend that an execution provider with its own memory is."""

ORACLE_TOKENS: Final = 128
"""Tokens of the prompt that every backend reads."""

ORACLE_QUERIES: Final = 32
"""Queries of a call whose attention is compared: float64 attention over all keys is slow."""

PAIRED_BITS: Final = 4
"""Codes of at most so many bits are multiplied as integers by prompts."""

ROUNDING_SHOWS: Final = 1e-4
"""Larger errors are compared with what rounding the queries does."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OracleFigures:
    """One backend against the reference, on one layer.

    Attributes:
        layer: index of the layer.
        backend: ``KERNEL``, ``BODY`` or ``DEVICE``.
        codes: codes compared, keys and values.
        codes_differing: codes that differ.
        ties: codes, those behind offsets more often, of which a share may be ties.
        codes_wrong: codes that differ and are no boundary ties.
        scale_steps: largest distance of a field, in steps of its type.
        attention_error: largest absolute error over the largest absolute value of the result.
        rounding: how far the reference itself moves, likewise, if queries and weights are rounded
            as kernels round them, or queries not rounded where function bodies read them: scores in
            the hundreds make much of little. 0 where the error is small.
        scores: the largest scores that queries and new keys of such lengths can have.
    """

    layer: int
    backend: str
    codes: int
    codes_differing: int
    ties: float
    codes_wrong: int
    scale_steps: int
    attention_error: float
    rounding: float = 0.0
    scores: float = 0.0

    def with_call(self, call: OracleFigures) -> OracleFigures:
        """Return the figures of this and another call of the same layer on the same backend."""
        return replace(
            self,
            codes=self.codes + call.codes,
            codes_differing=self.codes_differing + call.codes_differing,
            ties=self.ties + call.ties,
            codes_wrong=self.codes_wrong + call.codes_wrong,
            scale_steps=max(self.scale_steps, call.scale_steps),
            attention_error=float(np.maximum(self.attention_error, call.attention_error)),
            rounding=max(self.rounding, call.rounding),
            scores=max(self.scores, call.scores),
        )


@dataclass(frozen=True)
class BackendFigures:
    """All backends of a model against the reference and against each other."""

    layers: tuple[OracleFigures, ...]  #: every backend on every layer
    #: every cache of the first backend after the whole text
    reconstruction: tuple[ReconstructionFigures, ...]
    #: largest relative difference of the last logits between kernels and function bodies; None if
    #: only one of them ran
    logit_gap: float | None


@dataclass(frozen=True)
class _Backend:
    """A way to run the TurboQuant nodes of a model."""

    name: str
    library: bool
    ep: ExecutionProvider = CPU


def judge_backends(
    probe: Probe,
    text: npt.NDArray[np.int64],
    *,
    library: bool,
    ep: ExecutionProvider = CPU,
    threads: int | None = None,
    quick: bool = False,
    on_progress: OnProgress,
) -> BackendFigures:
    """Run a model on every backend and compare all its layers with the reference.

    Each backend reads a prompt and one more token; the first one also reads all of the text, for
    the statistics of reconstruction.

    Args:
        text: ids ``[n]``.
        quick: whether only the first backend runs, and reads nothing but the prompt and the token.
    """
    judged: list[OracleFigures] = []
    losses: list[ReconstructionFigures] = []
    logits: list[npt.NDArray[np.float64]] = []
    backends = _backends(library, ep, has_bodies=not probe.plan.block_size)[: 1 if quick else None]
    count, total = 0, (2 * len(backends) + (not quick)) * len(probe.layers)
    prompt = text[:ORACLE_TOKENS]
    for backend in backends:
        decoder = probe.decoder(
            library=backend.library, threads=threads, ep=backend.ep, most=len(prompt)
        )
        by_layer: dict[int, OracleFigures] = {}
        calls = [prompt] if decoder.signature.first_only else [prompt[:-1], prompt[-1:]]
        if not (losses or quick):
            calls.insert(0, text)
        for call in calls:
            if len(call) > 1:
                decoder.reset()
            last, vectors = _feed(decoder, call, probe)
            for layer in probe.layers:
                figures, caches = judge_layer(decoder, layer, backend.name)
                before = by_layer.get(figures.layer)
                by_layer[figures.layer] = before.with_call(figures) if before else figures
                if call is text:
                    losses += reconstruction(vectors, layer, caches)
                count += 1
                on_progress(Progress("Comparing the layers with the reference", count, total))
        logits.append(last)
        judged += by_layer.values()
    return BackendFigures(tuple(judged), tuple(losses), _logit_gap(backends, logits))


def judge_layer(
    decoder: Decoder, layer: LayerNames, backend: str
) -> tuple[OracleFigures, tuple[Array, Array]]:
    """Compare one layer with the reference on the decoder's last call.

    Returns:
        The figures, and the caches' used parts: key rows and value rows ``[1, N, S, W]``.
    """
    seen = decoder.watched
    length = np.asarray(seen[layer.key.past_length], np.int64).reshape(-1)
    window = decoder.signature.window_of(layer.plan)
    pairs = [_plane(decoder, cache.present) for cache in layer.plan.caches]
    planes = pairs[0][0], pairs[1][0]
    end = int(length[0]) + seen[layer.query].shape[2]
    caches = pairs[0][1][:, :, :end], pairs[1][1][:, :, :end]
    judged = [
        names.judge(
            cache[:, :, int(length[0]) :],
            seen[names.vectors],
            length,
            layer.plan.dtype,
            unrounded=backend == BODY,
        )
        for names, cache in zip((layer.key, layer.value), caches, strict=True)
    ]
    exact = _in_pages(decoder, layer, planes, length)
    if exact is not None:
        planes, window = caches, NO_WINDOW
    query, output = seen[layer.query], seen[layer.output]
    # The last queries see the most keys; the oracle is slow, so it answers no more than these.
    skip = max(0, query.shape[2] - ORACLE_QUERIES)

    def attend(query: Array, rounding: Rounding = EXACT) -> npt.NDArray[np.float64]:
        return reference.attention(
            query,
            *planes,
            length,
            key=layer.key.codec,
            value=layer.value.codec,
            key_rotation=layer.key.rotation,
            key_codebook=layer.key.centroids,
            value_rotation=layer.value.rotation,
            value_codebook=layer.value.centroids,
            scale=layer.plan.scale,
            causal=layer.plan.causal,
            sliding_window=layer.plan.sliding_window,
            softcap=layer.plan.softcap,
            attention_bias=None if layer.bias is None else seen[layer.bias],
            head_sink=None if layer.sink is None else seen[layer.sink],
            key_offset=layer.key.offset,
            value_offset=layer.value.offset,
            key_frequencies=layer.key.frequencies,
            element=ELEMENTS[layer.plan.dtype],
            window=window,
            new_keys=seen[layer.key.vectors],
            new_values=seen[layer.value.vectors],
            exact=exact,
            skip=skip,
            rounding=rounding,
        )[:, :, skip:]

    expected = attend(query)
    largest = max(np.abs(expected).max(), 1e-30)
    error = float(np.abs(output[:, :, skip:].astype(np.float64) - expected).max() / largest)
    rounding = 0.0
    if error > ROUNDING_SHOWS:
        moved = None
        if backend == KERNEL:
            moved = attend(query, _rounding(query, layer))
        elif backend == BODY:
            unrounded = _unrounded(query, ELEMENTS[layer.plan.dtype])
            moved = None if unrounded is None else attend(unrounded)
        if moved is not None:
            rounding = float(np.abs(moved - expected).max() / largest)
    figures = OracleFigures(
        layer.plan.layer,
        backend,
        codes=sum(codes.codes for codes in judged),
        codes_differing=sum(codes.differing for codes in judged),
        ties=sum(codes.codes * codes.growth for codes in judged),
        codes_wrong=sum(codes.wrong for codes in judged),
        scale_steps=max(codes.steps for codes in judged),
        attention_error=error,
        rounding=rounding,
        scores=layer.plan.scale * _longest(query) * _longest(seen[layer.key.vectors]),
    )
    return figures, caches


def _longest(vectors: Array) -> float:
    return float(np.linalg.norm(vectors.astype(np.float64), axis=-1).max(initial=0))


def _rounding(query: Array, layer: LayerNames) -> Rounding:
    """Return how kernels round queries and weights of a call that they multiply as integers."""
    info = library_info()
    products = os.environ.get(PRODUCTS.name) or info.products
    rows = query.shape[1] // layer.plan.kv_num_heads * query.shape[2]
    if products == "8" and rows > info.decode_rows and _is_plain(layer):
        products = "pairs"  # these prompts have kernels of their own
        if max(side.codec.bits for side in layer.caches) > PAIRED_BITS:
            return EXACT
    return info.roundings.get(products or "", EXACT)


def _is_plain(layer: LayerNames) -> bool:
    return (
        all(side.codec.kind == LLOYD_MAX and side.offset is None for side in layer.caches)
        and layer.bias is None
        and not layer.plan.softcap
    )


def _unrounded(query: Array, element: str) -> Array | None:
    """Draw queries that round to the given ones; None for float32.

    ONNX Runtime leaves out the roundings to a narrow type between nodes that compute in float32, so
    that function bodies read what the watched queries are roundings of.
    """
    if element == "float32":
        return None
    wide = query.astype(np.float32)
    draws = np.random.default_rng(0).uniform(-0.5, 0.5, query.shape)
    # A bfloat16 is the upper half of a float32.
    step = np.spacing(query) if element == "float16" else np.spacing(wide) * np.float32(1 << 16)
    return wide + draws * np.abs(step)


def _backends(library: bool, ep: ExecutionProvider, *, has_bodies: bool) -> list[_Backend]:
    backends = [_Backend(KERNEL, True)] * library + [_Backend(BODY, False)] * has_bodies
    if ep.has_own_memory:
        backends.append(_Backend(DEVICE.format(ep.provider), True, ep))
    return backends


def _logit_gap(
    backends: Sequence[_Backend], logits: Sequence[npt.NDArray[np.float64]]
) -> float | None:
    if [backend.name for backend in backends[:2]] != [KERNEL, BODY]:
        return None
    return float(np.abs(logits[0] - logits[1]).max() / max(np.abs(logits[1]).max(), 1e-30))


def _feed(
    decoder: Decoder, call: npt.NDArray[np.int64], probe: Probe
) -> tuple[npt.NDArray[np.float64], dict[str, Array]]:
    """Return the last logits and all vectors that went into caches, by name."""
    names = [names.vectors for layer in probe.layers for names in layer.caches]
    seen: dict[str, list[Array]] = {name: [] for name in names}
    for piece in decoder.calls(len(call)):
        logits = decoder.prefill(call[None, piece])
        for name, parts in seen.items():
            parts.append(decoder.watched[name])
    vectors = {name: np.concatenate(parts, axis=2) for name, parts in seen.items()}
    return logits[0, -1].astype(np.float64), vectors


def _in_pages(
    decoder: Decoder,
    layer: LayerNames,
    planes: tuple[Array, Array],
    length: npt.NDArray[np.int64],
) -> ExactTokens | None:
    """Return what queries of one sequence take exactly from pages; None where there is nothing."""
    plan = decoder.signature.plan
    if plan is None or plan.page_window is None or not plan.window_of(layer.plan).entries:
        return None
    new = decoder.watched[layer.key.vectors], decoder.watched[layer.value.vectors]
    keys, values = (paged.pages_of_plane(plane, plan.block_size) for plane in planes)
    table = np.arange(len(keys), dtype=np.int32)
    return paged.exact_tokens((keys, values), new, int(length[0]), table, plan.page_window)


def _plane(decoder: Decoder, present: str) -> tuple[Array, Array]:
    """Return the used rows of a cache, and those of tokens among them."""
    for index, spec in enumerate(decoder.signature.caches):
        if spec.pair.present == present:
            plane = decoder.plane(index)
            return plane, spec.of_tokens(plane)
    raise KeyError(present)
