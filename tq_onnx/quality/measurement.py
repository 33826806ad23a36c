"""Measure models one after the other under the same conditions, for ``report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tq_onnx.codec.presetfacts import LENGTHS
from tq_onnx.files.load import LoadedModel
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.readings import with_all_logits
from tq_onnx.measure.windows import Ids, Window
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.progress import OnProgress, Progress
from tq_onnx.quality.figures import ModelFigures
from tq_onnx.quality.layers import measure_layers
from tq_onnx.quality.recording import Recording
from tq_onnx.runtime.opening import open_converted
from tq_onnx.verification.interfaces import failing

LAYER_TOKENS: Final = 512
"""Tokens of the text that the layers are judged on: all their inputs are kept in memory."""


@dataclass(frozen=True, eq=False)
class Conversion:
    """A converted model, read once."""

    path: Path
    loaded: LoadedModel

    @property
    def plan(self) -> Plan:
        """The conversion."""
        return Plan.from_json(self.loaded.model.metadata_props[METADATA_PLAN])


@dataclass(frozen=True, eq=False)
class Comparing:
    """The conditions under which all models are measured."""

    recording: Recording
    text: Ids
    windows: list[Window]
    stride: int
    original_bytes: int
    library: bool
    threads: int | None
    tell: OnProgress

    @property
    def layer_text(self) -> Ids:
        """Tokens that the layers are judged on: the beginning of the first window."""
        return self.text[: min(self.windows[0].stop, LAYER_TOKENS)]

    def converted(self, conversion: Conversion, name: str) -> ModelFigures:
        """Read the text with a converted model, and judge its layers."""
        path, loaded = conversion.path, conversion.loaded
        self.tell(Progress(f"Opening {name}"))
        with failing(path):
            model = open_converted(path, loaded=loaded, library=self.library, threads=self.threads)
            logits = with_all_logits(model, loaded, library=self.library, threads=self.threads)
            quality = self.recording.compare(
                logits.decoder(), stride=self.stride, name=name, on_progress=self.tell
            )
        size = model.signature.bytes_per_token
        del model, logits
        self.tell(Progress(f"Reading the layers of {name}"))
        probe = expose_internals(path, loaded=loaded)
        layers = measure_layers(probe, self.layer_text, library=self.library, threads=self.threads)
        plan = conversion.plan
        values = sum(
            layer.kv_num_heads * cache.size for layer in plan.layers for cache in layer.caches
        )
        return ModelFigures(
            name=name,
            path=path,
            preset=plan.preset,
            bytes_per_token=size,
            window_bytes=plan.window_bytes,
            bytes_at=tuple(size + plan.window_bytes / tokens for tokens in LENGTHS),
            bits_per_value=8 * size / values,
            compression=self.original_bytes / size,
            quality=quality,
            layers=layers,
        )
