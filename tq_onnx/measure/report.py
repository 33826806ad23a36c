"""``report``: the quality of several conversions of one model on a text.

The original reads the text once and its predictions are recorded. Then every converted model is
opened on its own, reads the same windows through onnxruntime with its caches really written and
read, and is compared; on the beginning of the text each of its layers is judged too. ONNX Runtime's
own caches are measured beside them. What prefill does not show is judged, too, where that is asked
for: copies of passages far back (``tq_onnx.measure.copying``) and decoding token by token
(``tq_onnx.measure.drift``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tq_onnx.codec.extremes import warnings_of
from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.pipeline import Prepared
from tq_onnx.errors import TqOnnxError, UnsupportedModelError
from tq_onnx.files.configuration import configured_positions
from tq_onnx.files.load import LoadedModel, load
from tq_onnx.measure.channelscales import sample_channels
from tq_onnx.measure.checks import PropertyCheck
from tq_onnx.measure.comparison import ComparisonReport, MissingPeer, ModelFigures
from tq_onnx.measure.copying import CopyFigures, CopyTest
from tq_onnx.measure.drift import DriftFigures, DriftTest, MakeDecoder, decoding
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.measure.fidelity import (
    PROMPT_TOKENS,
    RawOriginal,
    convert_raw,
    expect_fidelity,
)
from tq_onnx.measure.interfaces import failing, refuse_stranger
from tq_onnx.measure.layers import LayerErrors, measure_layers
from tq_onnx.measure.ortcaches import FLOAT16, INT4, INT8, OrtCacheModel, Steps, with_ort_caches
from tq_onnx.measure.planned import expect_layers
from tq_onnx.measure.quality import QualityFigures
from tq_onnx.measure.readings import read_original
from tq_onnx.measure.recording import Recording
from tq_onnx.measure.windows import Ids, Window, blocks, text_of, windows
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.model import open_converted, open_original
from tq_onnx.runtime.session import make_session

LAYER_TOKENS: Final = 512
"""Tokens of the text that the layers are judged on: all their inputs are kept in memory."""

_RAW: Final = "raw"
_PEER_NAMES: Final = {FLOAT16: "ORT float16", INT8: "ORT int8", INT4: "ORT int4"}


def report(
    original: Path,
    converted: Sequence[Path],
    tokens: Sequence[int] | Ids | int,
    *,
    source: str,
    context: int = 1024,
    stride: int | None = None,
    library: bool = True,
    threads: int | None = None,
    peers: bool = True,
    generation: bool = False,
    on_progress: OnProgress | None = None,
) -> ComparisonReport:
    """Compare converted models with their original.

    Args:
        original: the original model.
        converted: conversions of it.
        tokens: ids of a text, or the number of pseudo-random ids to make.
        source: where the tokens come from, for the report.
        context: tokens per window.
        stride: tokens by which windows advance; None for windows side by side, see
            ``windows.blocks``.
        library: True to run the library's kernels, False to run the function bodies.
        threads: threads within an operator.
        peers: True to compare ONNX Runtime's own caches, too.
        generation: True to judge copies and decoding, too.
        on_progress: called as each step begins, and as windows are read.

    Raises:
        VerificationError: a converted model was not made from this original, or is damaged: no
            figures are given that would not be those of its codecs.
        TqOnnxError: a model or the library is refused, or the text is too short.
    """
    tell = on_progress or silent
    tell(Progress("Opening the original"))
    graph = load(original)
    before = open_original(original, loaded=graph, threads=threads)
    conversions = [_Conversion(path, load(path)) for path in converted]
    for one in conversions:
        refuse_stranger(before, one.path, one.loaded)
        expect_layers(one.path, one.loaded.model, one.plan)
    text = text_of(before, tokens)
    context = min(context, len(text), before.room or len(text))
    todo = blocks(len(text), context) if stride is None else windows(len(text), context, stride)
    tell(Progress("Comparing everything but the codecs with the original"))
    prompt = text[: min(PROMPT_TOKENS, todo[0].stop)]
    own = read_original(before, graph, prompt, threads=threads)
    source_graph = recognise_original(graph, original, recognition=before.recognition)
    before = replace(before, session=None)  # one model at a time
    raw = convert_raw(source_graph, prompt, own, library=library, threads=threads)
    for one in conversions:
        expect_fidelity(raw, one.path, one.loaded, one.plan, library=library, threads=threads)
    before = replace(before, session=make_session(before.path, library=False, threads=threads))
    recording = Recording(
        before.decoder(),
        text,
        todo,
        vocabulary=before.vocabulary,
        on_progress=on_progress,
    )
    told = configured_positions(original)
    room = min((size for size in (before.room, told) if size is not None), default=None)
    copying = drift = None
    if generation:
        copying = CopyTest(
            before.decoder(),
            text,
            vocabulary=before.vocabulary,
            room=room,
            on_progress=on_progress,
        )
        make = decoding(before)
        if make is not None:
            drift = DriftTest(make, text, room=room, on_progress=on_progress)
    run = _Run(
        copying=copying,
        drift=drift,
        recording=recording,
        text=text,
        windows=todo,
        stride=stride or context,
        original_bytes=before.signature.bytes_per_token,
        library=library,
        threads=threads,
        tell=tell,
    )
    del before  # one model at a time
    with recording:
        names = _names(conversions)
        models = []
        while conversions:  # a graph is forgotten once its model is measured
            models.append(run.converted(conversions.pop(0), names.pop(0)))
        found, missing = run.peers(raw) if peers else ((), ())
        perplexity = models[0].quality.original_perplexity
    return ComparisonReport(
        original=original,
        source=source,
        tokens=todo[-1].stop,
        context=context,
        stride=stride or context,
        windows=len(todo),
        positions=recording.positions,
        kernels=library,
        layer_tokens=len(run.layer_text),
        perplexity=perplexity,
        bytes_per_token=run.original_bytes,
        models=tuple(models),
        peers=found,
        missing=missing,
        warnings=tuple(_warnings(raw, models)),
    )


@dataclass(frozen=True, eq=False)
class _Conversion:
    """A converted model, read once."""

    path: Path
    loaded: LoadedModel

    @property
    def plan(self) -> Plan:
        """The conversion."""
        return Plan.from_json(self.loaded.model.metadata_props[METADATA_PLAN])


@dataclass(frozen=True, eq=False)
class _Run:
    """The conditions under which all models are measured."""

    recording: Recording
    copying: CopyTest | None
    drift: DriftTest | None
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

    def converted(self, conversion: _Conversion, name: str) -> ModelFigures:
        """Read the text with a converted model, and judge its layers."""
        path, loaded = conversion.path, conversion.loaded
        self.tell(Progress(f"Opening {name}"))
        with failing(path):
            model = open_converted(path, loaded=loaded, library=self.library, threads=self.threads)
            quality = self.recording.compare(
                model.decoder(),
                stride=self.stride,
                name=name,
                on_progress=self.tell,
            )
        copying, drift = self._generation(model.decoder(), decoding(model), name)
        size = model.signature.bytes_per_token
        del model
        self.tell(Progress(f"Reading the layers of {name}"))
        probe = expose_internals(path, loaded=loaded)
        layers = measure_layers(probe, self.layer_text, library=self.library, threads=self.threads)
        figures = self._figures(name, conversion.plan, quality, size=size, path=path, layers=layers)
        return replace(figures, copying=copying, drift=drift)

    def _generation(
        self, decoder: Decoder, make: MakeDecoder | None, name: str
    ) -> tuple[tuple[CopyFigures, ...], DriftFigures | None]:
        """Judge copies and decoding, as far as that was asked for and the model decodes."""
        copying: tuple[CopyFigures, ...] = ()
        drift = None
        if self.copying is not None:
            copying = self.copying.compare(decoder, name=name, on_progress=self.tell)
        if self.drift is not None and make is not None:
            drift = self.drift.compare(make, name=name, on_progress=self.tell)
        return copying, drift

    def peers(
        self, original: RawOriginal | PropertyCheck
    ) -> tuple[tuple[ModelFigures, ...], tuple[MissingPeer, ...]]:
        """Read the text with ONNX Runtime's own caches."""
        if isinstance(original, PropertyCheck):
            names = _PEER_NAMES.values()
            return (), tuple(MissingPeer(name, original.detail) for name in names)
        raw = original.prepared
        found, missing = [], []
        steps: dict[str, Steps] = {}
        for cache, name in _PEER_NAMES.items():
            try:
                if cache != FLOAT16 and not steps:
                    steps = self._steps(raw)
                found.append(self._peer(raw, cache, name, steps.get(cache, ())))
            except TqOnnxError as error:
                missing.append(MissingPeer(name, str(error)))
        return tuple(found), tuple(missing)

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
        decoder = model.decoder(threads=self.threads)
        quality = self.recording.compare(
            decoder,
            stride=self.stride,
            name=name,
            on_progress=self.tell,
        )
        copying, drift = self._generation(decoder, lambda _: decoder, name)
        figures = self._figures(name, raw.plan, quality, size=model.bytes_per_token)
        return replace(figures, copying=copying, drift=drift)

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
        values = sum(2 * layer.kv_num_heads * layer.head_size for layer in plan.layers)
        return ModelFigures(
            name=name,
            path=path,
            preset=None if path is None else plan.preset,
            peer=path is None,
            bytes_per_token=size,
            bits_per_value=8 * size / values,
            compression=self.original_bytes / size,
            quality=quality,
            layers=layers,
        )


def _warnings(raw: RawOriginal | PropertyCheck, models: Sequence[ModelFigures]) -> Iterator[str]:
    if isinstance(raw, PropertyCheck):
        yield f"only codecs and tables of the converted models were checked: {raw.detail}"
    for model in models:
        for warning in warnings_of(one for layer in model.layers for one in layer.extremes):
            yield f"{model.name}: {warning}"


def _names(conversions: Sequence[_Conversion]) -> list[str]:
    """Name models by preset and calibration, and by file or path where several have the same."""
    paths, plans = [one.path for one in conversions], [one.plan for one in conversions]
    presets = [plan.preset + (", calibrated" if plan.centered else "") for plan in plans]
    names = [
        preset if presets.count(preset) == 1 else f"{preset} ({path.name})"
        for path, preset in zip(paths, presets, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{preset} ({path})"
        for name, path, preset in zip(names, paths, presets, strict=True)
    ]
