"""Measure models one after the other under the same conditions, for ``report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tq_onnx.codec.presetfacts import LENGTHS
from tq_onnx.conversion.pipeline import Prepared
from tq_onnx.errors import TqOnnxError, UnsupportedModelError
from tq_onnx.files.load import LoadedModel
from tq_onnx.measure.divergence import QualityFigures
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.readings import with_all_logits
from tq_onnx.measure.windows import Ids, Window
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.progress import OnProgress, Progress
from tq_onnx.quality.channelscales import sample_channels
from tq_onnx.quality.figures import MissingPeer, ModelFigures
from tq_onnx.quality.layers import LayerErrors, measure_layers
from tq_onnx.quality.ortcaches import OrtCacheModel, Steps, with_ort_caches
from tq_onnx.quality.recording import Recording
from tq_onnx.runtime.opening import open_converted
from tq_onnx.targets.ortgqa.caches import FLOAT16, INT4, INT8
from tq_onnx.verification.checks import PropertyCheck
from tq_onnx.verification.fidelity import RawOriginal
from tq_onnx.verification.interfaces import failing

LAYER_TOKENS: Final = 512
"""Tokens of the text that the layers are judged on: all their inputs are kept in memory."""

PEER_NAMES: Final = {FLOAT16: "ORT float16", INT8: "ORT int8", INT4: "ORT int4"}
"""Names of the caches of ONNX Runtime."""


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
        return self._figures(name, conversion.plan, quality, size=size, path=path, layers=layers)

    def peers(
        self, original: RawOriginal | PropertyCheck
    ) -> tuple[tuple[ModelFigures, ...], tuple[MissingPeer, ...]]:
        """Read the text with ONNX Runtime's own caches."""
        if isinstance(original, PropertyCheck):
            names = PEER_NAMES.values()
            return (), tuple(MissingPeer(name, original.detail) for name in names)
        raw = original.prepared
        figures, missing = [], []
        steps: dict[str, Steps] = {}
        for cache, name in PEER_NAMES.items():
            try:
                if cache != FLOAT16 and not steps:
                    steps = self._steps(raw)
                figures.append(self._peer(raw, cache, name, steps.get(cache, ())))
            except TqOnnxError as error:
                missing.append(MissingPeer(name, str(error)))
        return tuple(figures), tuple(missing)

    def _steps(self, raw: Prepared) -> dict[str, Steps]:
        """Find the steps of the quantised caches, by cache."""
        samples = sample_channels(
            expose_internals(raw.loaded.path, loaded=raw.loaded),
            self.text,
            self.windows,
            library=self.library,
            threads=self.threads,
            on_progress=self.tell,
        )
        return {
            cache: [(key.steps(bits), value.steps(bits)) for key, value in samples]
            for cache, bits in ((INT8, 8), (INT4, 4))
        }

    def _peer(self, raw: Prepared, cache: str, name: str, steps: Steps) -> ModelFigures:
        self.tell(Progress(f"Opening {name}"))
        if cache == FLOAT16 and raw.plan.layers[0].dtype == "FLOAT16":
            raise UnsupportedModelError("the original's own caches are float16")
        model: OrtCacheModel = with_ort_caches(raw, cache, steps)
        quality = self.recording.compare(
            model.decoder(threads=self.threads),
            stride=self.stride,
            name=name,
            on_progress=self.tell,
        )
        return self._figures(name, raw.plan, quality, size=model.bytes_per_token)

    def _figures(
        self,
        name: str,
        plan: Plan,
        quality: QualityFigures,
        *,
        size: int,
        path: Path | None = None,
        layers: tuple[LayerErrors, ...] = (),
    ) -> ModelFigures:
        window = 0 if path is None else plan.window_bytes
        values = sum(
            layer.kv_num_heads * cache.size for layer in plan.layers for cache in layer.caches
        )
        return ModelFigures(
            name=name,
            path=path,
            preset=None if path is None else plan.preset,
            peer=path is None,
            bytes_per_token=size,
            window_bytes=window,
            bytes_at=tuple(size + window / tokens for tokens in LENGTHS),
            bits_per_value=8 * size / values,
            compression=self.original_bytes / size,
            quality=quality,
            layers=layers,
        )
