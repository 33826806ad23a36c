"""A converted model on a device against itself on the CPU: logits, greedy tokens, caches.

Both read the same prompt and go on greedily until they disagree about a token. The kernels of the
CPU multiply floats here: kernels that multiply integers differ from them by more than a device may.

The two sum in different orders, so that vectors differ in their last bits before they are encoded,
and a code may fall on the other side of a boundary. A byte may therefore differ where the row is
what the reference makes of the device's own vector (``tq_onnx.codec.acceptance``), an entry of an
exact window that vector as float16, and the vector the CPU's but for roundings. After such a tie
everything differs by a little.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.acceptance import FIELD_STEPS
from tq_onnx.codec.window import entry_bytes_wrong
from tq_onnx.measure.feeding_modes import all_planes, bytes_differing
from tq_onnx.measure.greedy import MAX_NEAR_TIE_GAP
from tq_onnx.measure.probe import Probe
from tq_onnx.runtime.decoder import Decoder, Logits
from tq_onnx.runtime.placement import PlacementReport, problem_of
from tq_onnx.runtime.providers import ExecutionProvider
from tq_onnx.verification.checks import PropertyCheck

Array = npt.NDArray[Any]
Tokens = npt.NDArray[np.int64]

# Sums in other orders, through all layers.
MAX_LOGIT_ERROR: Final = 1e-4
# Of the largest logit, with 16 bits and after ties: codes that fall on the other side move all
# logits. Measured 9e-3 with random weights in float16.
MAX_RELATIVE_ERROR: Final = 3e-2
# Of vectors that are encoded, where bytes differ: after the first tie they are no longer the same.
MAX_VECTOR_ERROR: Final = 5e-2


@dataclass(frozen=True)
class ProviderFigures:
    """A model on a device against the same model on the CPU.

    Attributes:
        provider: the device's execution provider.
        prompt_tokens: tokens of the prompt.
        new_tokens: the number of greedy tokens asked for.
        same_tokens: tokens before the first that differs, where the comparison ends.
        gap: by how much the CPU preferred its own token there, in logits; None if all are the same.
        alike_tokens: tokens in the caches when these were last the same to the byte.
        logit_error: largest difference of a logit up to there.
        later_logit_error: largest difference of a logit after that; None if nothing came after.
        largest_logit: largest absolute logit on the CPU.
        cache_bytes: bytes of all caches at the end.
        bytes_differing: the bytes that differ.
        codes_wrong: codes on the device that are neither what the reference makes of the device's
            vectors, nor boundary ties, and bytes of entries that are not these.
        scale_steps: largest distance of a field from the reference, in steps of its type, over rows
            of equal codes.
        vector_error: largest distance of a vector from the CPU's, over the length of the CPU's.
    """

    provider: str
    prompt_tokens: int
    new_tokens: int
    same_tokens: int
    gap: float | None
    alike_tokens: int
    logit_error: float
    later_logit_error: float | None
    largest_logit: float
    cache_bytes: int
    bytes_differing: int
    codes_wrong: int
    scale_steps: int
    vector_error: float


def compare_providers(
    probe: Probe,
    prompt: Tokens,
    *,
    new_tokens: int,
    ep: ExecutionProvider,
    threads: int | None = None,
) -> ProviderFigures:
    """Run a model on the CPU and on a device, and compare the two.

    Args:
        prompt: ids ``[n]``.
    """
    most = len(prompt) + new_tokens
    host = _Side(probe.decoder(library=True, threads=threads, exact=True))
    device = _Side(probe.decoder(library=True, threads=threads, ep=ep, most=most))
    figures, planes = _compare(host, device, prompt, new_tokens)
    names = [names for layer in probe.layers for names in layer.caches]
    dtypes = [layer.plan.dtype for layer in probe.layers for _ in layer.caches]
    vectors = [
        [side.vectors(encode_names.vectors) for encode_names in names] for side in (host, device)
    ]
    windows = [cache.window for cache in device.decoder.signature.caches]
    judged = [
        encode_names.judge(plane[:, :, window.overlay_rows :], seen, np.zeros(1, np.int64), dtype)
        for plane, window, seen, encode_names, dtype in zip(
            planes, windows, vectors[1], names, dtypes, strict=True
        )
    ]
    entries = zip(planes, vectors[1], windows, strict=True)
    return figures(
        codes_wrong=sum(codes.wrong for codes in judged)
        + sum(entry_bytes_wrong(*entry) for entry in entries),
        scale_steps=max(codes.steps for codes in judged),
        vector_error=max(_apart(*pair) for pair in zip(*vectors, strict=True)),
    )


def _compare(
    host: _Side, device: _Side, prompt: Tokens, new_tokens: int
) -> tuple[partial[ProviderFigures], list[Array]]:
    """Return figures without those of vectors, and the planes of the device at the end."""
    errors: dict[bool, float] = {}
    largest, same_tokens, alike, gap = 0.0, 0, 0, None
    ids = prompt
    while same_tokens < new_tokens:
        host_logits, device_logits = host.feed(ids), device.feed(ids)
        planes = all_planes(host.decoder), all_planes(device.decoder)
        differing = bytes_differing(*planes)
        if differing == 0:
            alike = host.decoder.length
        errors[differing == 0] = max(
            errors.get(differing == 0, 0.0), _largest(device_logits - host_logits)
        )
        largest = max(largest, _largest(host_logits))
        ids = np.argmax(host_logits[-1:], axis=-1)
        if (choice := np.argmax(device_logits[-1])) != ids[0]:
            gap = float(host_logits[-1, ids[0]] - host_logits[-1, choice])
            break
        same_tokens += 1
    figures = partial(
        ProviderFigures,
        provider=device.decoder.ep.provider,
        prompt_tokens=len(prompt),
        new_tokens=new_tokens,
        same_tokens=same_tokens,
        gap=gap,
        alike_tokens=alike,
        logit_error=errors.get(True, 0.0),
        later_logit_error=errors.get(False),
        largest_logit=largest,
        cache_bytes=sum(plane.nbytes for plane in planes[0]),
        bytes_differing=differing,
    )
    return figures, planes[1]


def on_device(report: PlacementReport) -> PropertyCheck:
    """Check that the provider runs every node that computes floats or touches a cache."""
    problem = problem_of(report)
    return PropertyCheck(
        f"{report.provider} runs every node that it should", problem is None, problem or str(report)
    )


def providers_agree(figures: ProviderFigures, dtype: str) -> list[PropertyCheck]:
    """Check that logits, greedy tokens and caches of a device are the CPU's."""
    provider = figures.provider
    relative = MAX_RELATIVE_ERROR * figures.largest_logit
    limit = MAX_LOGIT_ERROR if dtype == "FLOAT" else relative
    later = figures.later_logit_error
    after = "" if later is None else f"; {later:.1e} after the first tie, {relative:.1e} allowed"
    # Two logits that each differ by no more than the limit may change places.
    strict = dtype == "FLOAT" and later is None
    tie = figures.gap is not None and figures.gap <= min(2 * relative, MAX_NEAR_TIE_GAP)
    explained, ties = _ties(figures)
    parted = "" if figures.gap is None else f", then the CPU prefers its own by {figures.gap:.1e}"
    return [
        PropertyCheck(
            f"logits on {provider} equal those on the CPU",
            figures.logit_error <= limit and (later is None or later <= relative),
            f"largest difference {figures.logit_error:.1e} in the {figures.alike_tokens} tokens "
            f"of which all caches are the same, {limit:.1e} allowed{after}",
        ),
        PropertyCheck(
            f"greedy tokens on {provider} equal those on the CPU",
            figures.same_tokens == figures.new_tokens or (tie and not strict),
            f"the same {figures.same_tokens} of {figures.new_tokens} tokens{parted}",
        ),
        PropertyCheck(
            f"caches on {provider} equal those on the CPU",
            figures.bytes_differing == 0 or explained,
            f"{figures.bytes_differing} of {figures.cache_bytes} bytes differ"
            + (ties if figures.bytes_differing else ""),
        ),
    ]


def _ties(figures: ProviderFigures) -> tuple[bool, str]:
    """Tell whether ties explain the bytes that differ, and how."""
    wrong, steps, error = figures.codes_wrong, figures.scale_steps, figures.vector_error
    explained = wrong == 0 and steps <= FIELD_STEPS and error <= MAX_VECTOR_ERROR
    return explained, (
        f"; {wrong} codes are no boundary ties, fields within {steps} steps of their type, vectors "
        f"within {error:.1e}"
    )


class _Side:
    """A decoder, and the vectors that went into its caches."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._seen: dict[str, list[Array]] = {name: [] for name in decoder.watch}

    def feed(self, ids: Tokens) -> Logits:
        """Feed ids ``[n]`` in the calls that the graph takes; return logits ``[n, vocabulary]``."""
        pieces = []
        for call in self.decoder.calls(len(ids)):
            pieces.append(self.decoder.prefill(ids[None, call])[0])
            for name, parts in self._seen.items():
                parts.append(self.decoder.watched[name])
        return np.concatenate(pieces).astype(np.float64)

    def vectors(self, name: str) -> Array:
        """Return the vectors ``[1, N, S, D]`` of all calls."""
        return np.concatenate(self._seen[name], axis=2)


def _apart(vectors: Array, references: Array) -> float:
    """Return the largest distance of vectors ``[..., D]`` from others, relative to the first."""
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=-1)
    distances = np.linalg.norm(references.astype(np.float64) - wide, axis=-1)
    return _largest(distances / np.maximum(lengths, np.finfo(np.float32).tiny))


def _largest(values: npt.NDArray[np.floating[Any]]) -> float:
    """Return the largest absolute value; infinite if a value is not a number."""
    largest = float(np.abs(values).max())
    return largest if np.isfinite(largest) else float("inf")
