"""The figures of ``report``, as they go into JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.quality.layers import LayerErrors


@dataclass(frozen=True)
class ModelFigures:
    """One model against the original.

    Attributes:
        name: the preset, with the file name if several models have the same preset.
        path: the file.
        preset: the preset.
        bytes_per_token: cache bytes of one token in all layers, from the graph's types.
        window_bytes: cache bytes of the exact tokens in all layers, per sequence.
        bytes_at: cache bytes per token, with a share of the exact tokens, in caches of 1,024, 8,192
            and 32,768 tokens.
        bits_per_value: bits per number in the caches, with metadata and without the exact tokens.
        compression: cache bytes per token of the original divided by those of this model, without
            the exact tokens.
        quality: its predictions against the original's.
        layers: its layers; empty if the caches keep only a window of the tokens.
    """

    name: str
    path: Path
    preset: str
    bytes_per_token: int
    window_bytes: int
    bytes_at: tuple[float, ...]
    bits_per_value: float
    compression: float
    quality: QualityFigures
    layers: tuple[LayerErrors, ...]


@dataclass(frozen=True)
class ComparisonReport:
    """The result of ``report``.

    Attributes:
        original: the original model.
        source: where the tokens come from.
        tokens: tokens that were read.
        context: tokens per window.
        stride: tokens by which windows advance; equal to ``context`` if they do not overlap.
        windows: number of windows.
        positions: predictions that were compared.
        kernels: True if the library's kernels ran, False if the function bodies ran.
        layer_tokens: tokens on which the errors of the layers were measured.
        perplexity: perplexity of the original.
        bytes_per_token: cache bytes of one token in the original.
        models: the converted models, in the order given.
        warnings: one sentence for each model whose rows cannot represent all vectors, and one if
            only the predictions could be compared with the original.
        seconds: time that the report took.
    """

    original: Path
    source: str
    tokens: int
    context: int
    stride: int
    windows: int
    positions: int
    kernels: bool
    layer_tokens: int
    perplexity: float
    bytes_per_token: int
    models: tuple[ModelFigures, ...]
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
