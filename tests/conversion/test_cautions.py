"""What a conversion warns of before it is used."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.files.models import GENAI, inline
from tests.recognise.dialects.edits import with_attribute
from tests.recognise.dialects.test_gqa import RING
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.pipeline import Prepared, prepare
from tq_onnx.files.load import load

CODES = Options(residual_length=0, sink_tokens=0)
CONFIGURATIONS = {
    "config.json": {"model_type": "gpt_oss"},
    "genai_config.json": {"model": {"type": "gptoss"}},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_keys_of_gpt_oss(name: str, tmp_path: Path) -> None:
    model = inline(tmp_path, GENAI)
    assert prepare(model, options=CODES).warnings == ()
    (tmp_path / name).write_text(json.dumps(CONFIGURATIONS[name]), encoding="utf-8")
    (sentence,) = prepare(model, options=CODES).warnings
    assert "the keys of gpt-oss" in sentence and "k8v4" in sentence
    for enough in ("raw", "k8v4", "int5"):
        assert prepare(model, preset=enough, options=CODES).warnings == ()


def with_rings(path: Path, preset: str, layers: slice) -> Prepared:
    """A conversion of a model in which some layers have rings."""
    loaded = load(path)
    nodes = [node for node in loaded.model.graph if node.op_type == "GroupQueryAttention"]
    with_windows = loaded.model.clone()
    for name, value in RING.items():
        with_attribute(name, value)(with_windows)
    kept = {node.name for node in nodes[layers]}
    for node in with_windows.graph:
        if node.op_type == "GroupQueryAttention" and node.name not in kept:
            node.attributes.pop("sliding_window_cache")
    loaded = replace(loaded, model=with_windows)
    original = recognise_original(loaded, path)
    return prepare(path, preset=preset, options=CODES, original=original)


def test_rings_are_compared_with_caches_of_all_tokens(tmp_path: Path) -> None:
    path = inline(tmp_path, GENAI)
    (small,) = with_rings(path, "int4", slice(1)).warnings
    made = with_rings(path, "raw", slice(2))
    (large,) = made.warnings
    ratio = re.search(r"in long texts the caches are ([\d.]+) times smaller", small)
    assert small.startswith("1 of 2 layers") and ratio is not None
    converted = prepare(path, preset="int4", options=CODES)
    one_ring = with_rings(path, "int4", slice(1))
    one_window = converted.bytes_before // 2 * RING["local_window_size"]
    assert (one_ring.bytes_before, one_ring.ring_bytes) == (converted.bytes_before // 2, one_window)
    assert (made.bytes_before, made.ring_bytes) == (0, 2 * one_window)
    half = converted.bytes_before / 2 / converted.bytes_after
    assert float(ratio[1]) == pytest.approx(half, abs=0.05)
    # Nothing of the original grows, and raw rows are its own.
    window = RING["local_window_size"]
    assert f"in texts of more than {window} tokens the caches are larger" in large
