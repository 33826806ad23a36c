"""The figures of ``report``, as they go into JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.quality.copy_test import CopyFigures
from tq_onnx.quality.drift import DriftFigures
from tq_onnx.quality.layers import LayerErrors
from tq_onnx.quality.outliers import OutlierFigures


@dataclass(frozen=True)
class ModelFigures:
    """One model against the original.

    Attributes:
        name: the preset, with the file where several have the same; or the name of the peer.
        path: the file; None for a peer, which has none.
        preset: the preset; None for a peer.
        peer: True for a model with ONNX Runtime's own caches.
        bytes_per_token: cache bytes of one token in all layers, from the graph's types.
        window_bytes: cache bytes of the exact tokens in all layers, of each sequence.
        bytes_at: cache bytes of one token, its share of the window included, in caches of 1,024,
            8,192 and 32,768 tokens.
        bits_per_value: bits per number in the caches, metadata included and no window.
        compression: cache bytes of one token of the original over this model's, without a window.
        quality: its predictions against the original's.
        layers: its layers; none for a peer, nor where caches keep a window of the tokens only.
        copying: passages that come again; none unless generation is judged.
        drift: decoding token by token; None unless generation is judged, and for graphs that
            cannot decode.
        outliers: the same with outliers in the norm weights; None unless requested, for
            peers and calibrated models, and where there are no such weights.
    """

    name: str
    path: Path | None
    preset: str | None
    peer: bool
    bytes_per_token: int
    window_bytes: int
    bytes_at: tuple[float, ...]
    bits_per_value: float
    compression: float
    quality: QualityFigures
    layers: tuple[LayerErrors, ...]
    copying: tuple[CopyFigures, ...] = ()
    drift: DriftFigures | None = None
    outliers: OutlierFigures | None = None


@dataclass(frozen=True)
class MissingPeer:
    """A peer that this model cannot have.

    Attributes:
        name: the peer.
        reason: the reason, as a clause.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class ComparisonReport:
    """The result of ``report``.

    Attributes:
        original: the original model.
        source: where the tokens come from.
        tokens: tokens that were read.
        context: tokens per window.
        stride: tokens by which windows advance; ``context`` where they stand side by side.
        windows: number of windows.
        positions: predictions that were compared.
        kernels: True if the library's kernels ran, False if the function bodies did.
        layer_tokens: tokens that the layers were judged on.
        perplexity: perplexity of the original.
        bytes_per_token: cache bytes of one token in the original.
        models: the converted models, in the order given.
        peers: ONNX Runtime's own caches.
        missing: peers that this model cannot have.
        warnings: one sentence for each model whose rows cannot hold all vectors, and one if no
            model could be compared with the original but for its predictions.
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
    peers: tuple[ModelFigures, ...]
    missing: tuple[MissingPeer, ...]
    warnings: tuple[str, ...] = ()
