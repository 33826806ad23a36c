"""Define the reports of ``convert`` and ``inspect``: frozen, JSON-able data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tq_onnx.conversion.calibrationrecord import CalibrationFacts
from tq_onnx.conversion.equalise import LayerEqualisation
from tq_onnx.files.save import SavedFiles
from tq_onnx.plan import Plan


@dataclass(frozen=True)
class ConversionReport:
    """The report of a conversion.

    Attributes:
        source: the original model.
        plan: what was done to each layer.
        output: the converted model.
        files: what was written, and what the converted model needs.
        bytes_per_token_before: cache bytes of one token in the original, without ``ring_bytes``.
        bytes_per_token_after: cache bytes of one token in the converted model.
        ratio: how many times smaller that is; 0 where all caches of the original are rings.
        equalisation: for each layer, what scales from norm weights do to the noise of scores;
            empty if none were asked for.
        calibration: the calibration that it was made with; None without one.
        warnings: what may be wrong with that calibration, or cost more than expected, in sentences.
        ring_bytes: bytes of the original's caches that keep the newest tokens only, at any length.
        key_bias: norm of the longest bias of keys that was taken from them; 0 for none.
    """

    source: Path
    plan: Plan
    output: Path
    files: SavedFiles
    bytes_per_token_before: int
    bytes_per_token_after: int
    ratio: float
    equalisation: tuple[LayerEqualisation, ...] = ()
    calibration: CalibrationFacts | None = None
    warnings: tuple[str, ...] = ()
    ring_bytes: int = 0
    key_bias: float = 0.0

    @property
    def rings(self) -> tuple[str, ...]:
        """A clause on the original's rings; none for most models."""
        clause = f"the original's windows take {self.ring_bytes:,} bytes at any length"
        return (clause,) if self.ring_bytes else ()


@dataclass(frozen=True)
class LayerFound:
    """One attention layer of an original; a graph for first prompts has no past."""

    layer: int
    node: str
    dialect: str
    num_heads: int
    kv_num_heads: int
    head_size: int
    dtype: str
    scale: float
    mask: str
    past_key: str | None
    past_value: str | None


@dataclass(frozen=True)
class Miss:
    """A reason not to convert; ``layer`` is None if it concerns the whole model."""

    layer: int | None
    node: str
    reason: str


@dataclass(frozen=True)
class PresetOffer:
    """The caches with one preset.

    Attributes:
        preset: its name.
        bytes_per_token: cache bytes of one token; None if it cannot be used.
        ratio: how many times fewer that is than now; None likewise.
        refusal: why it cannot be used, or empty.
    """

    preset: str
    bytes_per_token: int | None
    ratio: float | None
    refusal: str


@dataclass(frozen=True)
class InspectionReport:
    """The report of an inspection.

    Attributes:
        model: its path.
        opset: version of the default ONNX domain.
        external_files: its external data files.
        convertible: whether ``convert`` would convert it.
        layers: the attention layers that were recognised; empty for a converted model.
        misses: reasons not to convert it.
        bytes_per_token: cache bytes of one token now; None if no layer was recognised.
        presets: what each preset would make of it; empty if it is not convertible.
        plan: what was done to it; None for a model that is not converted.
        equalisation: what scales from norm weights would do for 4-bit keys; empty if it is not
            convertible.
        states: outputs that recurrent layers hand on beside the caches, and that stay as they are.
        calibration: of a converted model, the calibration that it was made with; None without one.
        key_bias: norm of the longest bias of keys, which ``convert`` takes from them; 0 for none.
    """

    model: Path
    opset: int
    external_files: tuple[Path, ...]
    convertible: bool
    layers: tuple[LayerFound, ...]
    misses: tuple[Miss, ...]
    bytes_per_token: int | None
    presets: tuple[PresetOffer, ...]
    plan: Plan | None
    equalisation: tuple[LayerEqualisation, ...] = ()
    states: tuple[str, ...] = ()
    calibration: CalibrationFacts | None = None
    key_bias: float = 0.0

    @property
    def is_converted(self) -> bool:
        """True if it is a converted model."""
        return self.plan is not None
