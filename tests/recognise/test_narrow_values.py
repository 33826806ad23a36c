"""Heads of values with fewer numbers than those of keys: zeros behind them, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import CACHES, PRESENTS, decoder
from tests.recognise.test_soundness import CACHED, MASK, agrees, changed, reason
from tq_onnx.conversion.original import recognise_original
from tq_onnx.conversion.pipeline import convert
from tq_onnx.errors import ModelFileError
from tq_onnx.files.load import load
from tq_onnx.plan import Plan
from tq_onnx.recognise.match import recognise
from tq_onnx.verification.verify import verify

SLICED = """twelve = Constant<value_ints = [12]>()
        last = Constant<value_ints = [3]>()
        pads = Constant<value_ints = [0, 0, 0, 0, 0, 0, 0, 4]>()
        v_12 = Slice(v, zero_1, twelve, last)
        present_key = Concat<axis = 2>(past_key, k)
        present_value = Concat<axis = 2>(past_value, v_12)
"""
ATTENDING = {
    "decomposed": "o_12 = MatMul(p, present_value)",
    "onnx": "o_12 = Attention<scale = 0.25>(q, present_key, present_value, bias)",
}
FORMS = pytest.mark.parametrize("form", ATTENDING)


def narrow(form: str = "decomposed") -> ir.Model:
    """Attention over keys of 16 numbers and values of 12."""
    attended = f"{ATTENDING[form]}\n        o = Pad(o_12, pads)"
    return decoder(
        changed((CACHED, SLICED), ("o = MatMul(p, present_value)", attended)),
        inputs=MASK + CACHES.replace("P, 16] past_value", "P, 12] past_value"),
        outputs=PRESENTS.replace("S, 16] present_value", "S, 12] present_value"),
        opset=23,
    )


@FORMS
def test_the_conversion_is_the_original(form: str) -> None:
    (site,) = recognise(narrow(form)).sites

    assert (site.dialect, site.head_size, site.result_size) == (form, 16, 12)
    assert agrees(lambda: narrow(form))


@FORMS
def test_files_are_told_as_they_are(form: str, tmp_path: Path) -> None:
    path, made = tmp_path / "model.onnx", tmp_path / "made.onnx"
    ir.save(narrow(form), path)
    report = convert(path, made)
    (layer,) = report.plan.layers

    assert recognise_original(load(path), path).bytes_per_token == 2 * (16 + 12) * 4
    assert report.bytes_per_token_before == 2 * (16 + 12) * 4
    assert [(cache.size, cache.row_bytes) for cache in layer.caches] == [(16, 10), (12, 10)]
    found = verify(
        path, made, np.arange(3, 60), source="numbers", context=16, new_tokens=2, threads=1
    )
    assert [check.detail for check in found.checks if not check.holds] == []


def test_values_that_lose_a_number_are_seen(tmp_path: Path) -> None:
    """The check of the rewritten graph compares the zeros, too."""
    path, made = tmp_path / "model.onnx", tmp_path / "made.onnx"
    ir.save(narrow(), path)
    convert(path, made)
    model = ir.load(made)
    pad = next(
        node for node in model.graph if node.op_type == "Pad" and node.name.endswith("value")
    )
    other = ir.Value(name="other_pads", const_value=ir.tensor(np.array([0] * 3 + [4] + [0] * 4)))
    model.graph.register_initializer(other)
    pad.replace_input_with(1, other)
    ir.save(model, made)

    found = verify(
        path, made, np.arange(3, 60), source="numbers", context=16, new_tokens=2, threads=1
    )
    assert not found.holds


def test_keys_narrower_than_values_are_refused() -> None:
    body = changed(
        (
            CACHED,
            SLICED.replace("key, k", "key, k_12")
            .replace("(v, z", "(k, z")
            .replace("v_12 =", "k_12 =")
            .replace("value, v_12", "value, v"),
        ),
        ("qs = Mul(q, quarter)", "q_12 = Slice(q, zero_1, twelve, last)\n qs = Mul(q_12, quarter)"),
    )
    told = reason(
        decoder(
            body,
            inputs=MASK + CACHES.replace("P, 16] past_key", "P, 12] past_key"),
            outputs=PRESENTS.replace("S, 16] present_key", "S, 12] present_key"),
        )
    )

    assert told == "heads of values have 16 numbers, and those of keys only 12"


@pytest.mark.parametrize("size", [-1, 17])
def test_a_plan_with_other_sizes_is_refused(size: int, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    ir.save(narrow(), path)
    plan = convert(path, tmp_path / "made.onnx").plan
    layer = plan.layers[0]
    wrong = replace(plan, layers=(replace(layer, value=replace(layer.value, size=size)),))

    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ModelFileError, match=r"values of 17 numbers|a size below 1"):
        Plan.from_json(wrong.to_json())
