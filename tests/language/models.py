"""The trained model in the forms that caches have, each opened once."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

import tq_onnx
from tq_onnx import LanguageModel
from tq_onnx.conversion.calibrationfile import write_calibration
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.conversion.target import CPU
from tq_onnx.integrations.bundled import build_bundled
from tq_onnx.quality.calibrate import calibrate
from tq_onnx.targets.registry import target_of

TEMPLATE = (
    "{% for message in messages %}"
    "{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROMPT = "Call me Ishmael. Some years ago"
FORMS = ("original", "growing", "in place", "window", "bodies", "paged")

_FOLDER = tempfile.TemporaryDirectory(prefix="tq-onnx-tests-")


@cache
def folder(form: str) -> Path:
    """A folder with a model and its tokenizer.

    Args:
        form: original, int4, int3, window, calibrated or paged.
    """
    path = Path(_FOLDER.name, form)
    if form == "original":
        build_bundled("dynamo", path)
        (path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        return path
    source = folder("original")
    newest, first = (8, 2) if form == "window" else (0, 0)
    options = Options(residual_length=newest, sink_tokens=first)
    if form == "calibrated":
        statistics = source / "statistics.safetensors"
        text = np.random.default_rng(1).integers(0, 97, 400)
        write_calibration(statistics, calibrate(source / "model.onnx", text, context=100))
        options = replace(options, calibration=statistics)
    preset = "int3" if form == "int3" else "int4"
    target = target_of("paged", block_size=16) if form == "paged" else CPU
    convert(
        source / "model.onnx", path / "model.onnx", preset=preset, options=options, target=target
    )
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (path / name).write_bytes((source / name).read_bytes())
    return path


@cache
def language_model(form: str) -> LanguageModel:
    """The model in one of ``FORMS``."""
    if form == "original":
        return tq_onnx.load(folder("original"), threads=1)
    if form == "bodies":
        return tq_onnx.load(folder("int4"), threads=1, library=False)
    if form == "growing":
        return tq_onnx.load(folder("int4"), threads=1)
    if form == "paged":
        return tq_onnx.load(folder(form), threads=1)
    kind = form if form in ("window", "calibrated") else "int4"
    return tq_onnx.load(folder(kind), threads=1, context=160)
