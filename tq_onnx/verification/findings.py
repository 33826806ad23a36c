"""Hold the inputs and results of a verification."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.measure.feeding_modes import FeedingFigures
from tq_onnx.measure.greedy import GreedyFigures
from tq_onnx.measure.loss import LossFigures
from tq_onnx.measure.oracle import OracleFigures
from tq_onnx.measure.reconstruction import CacheDistance, ReconstructionFigures
from tq_onnx.measure.windows import Ids
from tq_onnx.runtime.placement import PlacementReport
from tq_onnx.runtime.providers import CPU, ExecutionProvider
from tq_onnx.verification.checks import CONVERT_AGAIN, PropertyCheck, failed
from tq_onnx.verification.devices import ProviderFigures


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a verification reads, and how."""

    text: Ids  #: ids ``[n]``
    new_tokens: int = 32  #: greedy tokens to generate with each model
    context: int = 512  #: tokens per perplexity window
    library: bool = True  #: whether the library's kernels are checked, too
    threads: int | None = None  #: threads within an operator
    #: where the converted model runs when it is compared with the original
    ep: ExecutionProvider = CPU
    quick: bool = False  #: whether what takes long is left out, see ``checks.LEFT_OUT``
    is_named: bool = False  #: whether the caller chose the text, so that the original writes none


@dataclass(frozen=True)
class MemoryFigures:
    """Cache bytes, of the buffers and by the types.

    Attributes:
        tokens: tokens that the measured caches held, or had room for in their pages.
        original_bytes: bytes of the original's buffers, or what so many tokens take in them.
        converted_bytes: bytes of the converted model's buffers.
        original_bytes_per_token: from the types of the original's caches.
        converted_bytes_per_token: from the types of the converted model's caches.
    """

    tokens: int
    original_bytes: int
    converted_bytes: int
    original_bytes_per_token: int
    converted_bytes_per_token: int

    @property
    def ratio(self) -> float:
        """The factor by which the caches became smaller."""
        return self.original_bytes / self.converted_bytes


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """The result of ``verify``.

    Attributes:
        original: the original model.
        converted: the converted model.
        source: where the tokens come from.
        tokens: tokens of the text that were read.
        kernels: True if the library's kernels were checked, and not only the function bodies.
        checks: the hard properties.
        quality: original against converted; None if it was quick.
        greedy: the continuations of both models; None likewise.
        loss: predictions of both on a short text, and the loss of each layer; None if the
            converted model could not read it.
        memory: cache bytes of both models.
        modes: the feeding modes of the converted model; None if it was quick.
        layers: reconstruction of every cache; empty if it was quick.
        drift: every cache against the original's.
        ladder: errors of each backend (kernels, function bodies, device) on each layer, against
            numpy. It is a key of the JSON document, so the name stays.
        logits_kernel_body: largest relative difference of logits between kernels and bodies.
        placement: where the nodes of the converted model ran when it was compared.
        device: the converted model on its provider against itself on the CPU; None on the CPU.
        warnings: sentences about what holds and should be known.
        left_out: what was not done because it was quick.
        advice: what to do if a check does not hold.
    """

    original: Path
    converted: Path
    source: str
    tokens: int
    kernels: bool
    checks: tuple[PropertyCheck, ...]
    quality: QualityFigures | None
    greedy: GreedyFigures | None
    placement: PlacementReport
    loss: LossFigures | None = None
    memory: MemoryFigures | None = None
    modes: FeedingFigures | None = None
    layers: tuple[ReconstructionFigures, ...] = ()
    drift: tuple[CacheDistance, ...] = ()
    ladder: tuple[OracleFigures, ...] = ()
    logits_kernel_body: float | None = None
    device: ProviderFigures | None = None
    warnings: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    advice: str = CONVERT_AGAIN

    @property
    def holds(self) -> bool:
        """The verdict: True if every check holds."""
        return not failed(self.checks)
