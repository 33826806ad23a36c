"""``report``: the quality of several conversions of one model on a text.

The original reads the text once and its predictions are recorded. Then every converted model is
opened on its own, reads the same windows through onnxruntime with its caches really written and
read, and is compared; on the beginning of the text each of its layers is judged too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tq_onnx.codec.extremes import warnings_of
from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.branches import load_again, load_decoder
from tq_onnx.conversion.calibrationrecord import METADATA_CALIBRATION
from tq_onnx.conversion.original import recognise_original
from tq_onnx.measure.readings import read_original, with_float_products
from tq_onnx.measure.windows import Ids, blocks, text_of, windows
from tq_onnx.progress import OnProgress, Progress, silent
from tq_onnx.quality.figures import ComparisonReport, ModelFigures
from tq_onnx.quality.measurement import Comparing, Conversion
from tq_onnx.quality.recording import Recording
from tq_onnx.runtime.opening import open_original, session_of
from tq_onnx.verification.checks import PropertyCheck
from tq_onnx.verification.fidelity import (
    PROMPT_TOKENS,
    RawOriginal,
    convert_raw,
    expect_fidelity,
)
from tq_onnx.verification.interfaces import refuse_stranger
from tq_onnx.verification.planned import expect_layers


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
    on_progress: OnProgress | None = None,
) -> ComparisonReport:
    """Compare converted models with their original.

    Args:
        context: tokens per window.
        stride: tokens by which windows advance; None for windows side by side, see
            ``windows.blocks``.
    """
    begin, tell = time.monotonic(), on_progress or silent
    tell(Progress("Opening the original"))
    graph = load_decoder(original)
    before = open_original(original, loaded=graph, threads=threads)
    conversions = [Conversion(path, load_decoder(path)) for path in converted]
    for conversion in conversions:
        refuse_stranger(before, conversion.path, conversion.loaded)
        expect_layers(conversion.path, conversion.loaded.model, conversion.plan)
    text = text_of(before, tokens)
    context = min(context, len(text), before.longest or len(text))
    todo = blocks(len(text), context) if stride is None else windows(len(text), context, stride)
    tell(Progress("Comparing everything but the codecs with the original"))
    prompt = text[: min(PROMPT_TOKENS, todo[0].stop)]
    floats = with_float_products(before, graph, library=False, threads=threads)
    reading = read_original(floats, prompt)
    del floats
    source_graph = recognise_original(graph, original, recognition=before.recognition)
    before = replace(before, session=None)  # one model at a time
    raw = convert_raw(source_graph, prompt, reading, library=library, threads=threads)
    for conversion in conversions:
        path, loaded, plan = conversion.path, conversion.loaded, conversion.plan
        expect_fidelity(raw, path, loaded, plan, library=library, threads=threads)
    graph = load_again(graph) if graph.branch else graph
    before = replace(before, session=session_of(graph, library=False, threads=threads))
    recording = Recording(
        before.decoder(),
        text,
        todo,
        vocabulary=before.vocabulary,
        on_progress=tell,
    )
    run = Comparing(
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
        warnings=tuple(_warnings(raw, models)),
        seconds=time.monotonic() - begin,
    )


def _warnings(raw: RawOriginal | PropertyCheck, models: Sequence[ModelFigures]) -> Iterator[str]:
    if isinstance(raw, PropertyCheck):
        yield f"only codecs and tables of the converted models were checked: {raw.detail}"
    for model in models:
        for warning in warnings_of(
            extremes for layer in model.layers for extremes in layer.extremes
        ):
            yield f"{model.name}: {warning}"


def _chosen(conversion: Conversion) -> str:
    """Return the preset, with what is not as in every conversion by it."""
    plan = conversion.plan
    has_statistics = METADATA_CALIBRATION in conversion.loaded.model.metadata_props
    parts = [plan.preset, *["calibrated"] * has_statistics]
    preset = PRESETS.get(plan.preset)
    usual = (preset.window, preset.sinks) if preset is not None else (0, 0)
    if (plan.recent, plan.sinks) != usual:
        parts.append(f"window {plan.recent} + {plan.sinks}" if plan.has_window else "no window")
    return ", ".join(parts)


def _names(conversions: Sequence[Conversion]) -> list[str]:
    """Name models by what was chosen, and by file or path where several have the same."""
    paths = [conversion.path for conversion in conversions]
    presets = [_chosen(conversion) for conversion in conversions]
    names = [
        preset if presets.count(preset) == 1 else f"{preset} ({path.name})"
        for path, preset in zip(paths, presets, strict=True)
    ]
    return [
        name if names.count(name) == 1 else f"{preset} ({path})"
        for name, path, preset in zip(names, paths, presets, strict=True)
    ]
