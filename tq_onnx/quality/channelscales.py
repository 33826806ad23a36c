"""Scales per channel for ONNX Runtime's quantised caches, found on the very text that is scored.

ONNX Runtime takes one step per KV head and channel, the same for all tokens, and leaves it to its
user to find them. Here they are found with hindsight, so that its caches show their best: over the
windows that are scored afterwards, as ``tq_onnx.codec.channelcodes`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tq_onnx.codec.channelcodes import best_steps
from tq_onnx.measure.probe import EncodeNames, Probe
from tq_onnx.measure.windows import Window
from tq_onnx.progress import OnProgress, Progress, silent

KEPT_ROWS: Final = 1024
"""Vectors of each head that steps are tried on, spread over the text."""

_CALL_TOKENS: Final = 256

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class ChannelSamples:
    """Vectors that went into one cache.

    Attributes:
        largest: largest absolute element of each channel, ``[N, D]``.
        rows: vectors ``[N, n, D]``.
    """

    largest: Floats
    rows: Floats

    def steps(self, bits: int) -> Floats:
        """Return the best steps of signed codes of ``bits`` bits: ``[N, D]``, none of them zero."""
        return best_steps(self.rows, self.largest, bits)


def sample_channels(
    probe: Probe,
    tokens: npt.NDArray[np.int64],
    windows: Sequence[Window],
    *,
    library: bool,
    threads: int | None,
    on_progress: OnProgress | None = None,
) -> list[tuple[ChannelSamples, ChannelSamples]]:
    """Read the windows and sample the keys and values of every layer.

    Args:
        probe: a ``raw`` conversion with exposed internals.
        tokens: ids ``[n]``.
        windows: the windows to read.
        library: True to run the library's kernels, False to run the function bodies.
        threads: threads within an operator.
        on_progress: called as windows are read.
    """
    tell = on_progress or silent
    decoder = probe.decoder(library=library, threads=threads)
    total = sum(window.stop - window.start for window in windows)
    every = max(1, -(-total // KEPT_ROWS))
    caches = [names for layer in probe.layers for names in (layer.key, layer.value)]
    sampled: dict[str, list[Floats]] = {names.vectors: [] for names in caches}
    largest: dict[str, npt.NDArray[Any]] = {}
    for index, window in enumerate(windows):
        decoder.reset()
        text = tokens[window.start : window.stop]
        for call in decoder.calls(len(text), _CALL_TOKENS):
            decoder.prefill(text[None, call])
            for names in caches:
                rows = decoder.watched[names.vectors][0].astype(np.float32)
                top = np.abs(rows).max(axis=1)
                largest[names.vectors] = np.maximum(largest.get(names.vectors, top), top)
                sampled[names.vectors].append(
                    rows[:, -(window.start + call.start) % every :: every]
                )
        tell(Progress("Finding steps for ONNX Runtime's caches", index + 1, len(windows)))

    def samples(names: EncodeNames) -> ChannelSamples:
        return ChannelSamples(
            largest[names.vectors], np.concatenate(sampled[names.vectors], axis=1)
        )

    return [(samples(layer.key), samples(layer.value)) for layer in probe.layers]
