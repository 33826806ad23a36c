"""Dialect decomposed: real exports, other forms, and everything that must be refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.running import (
    EXACT,
    Decoder,
    batch,
    convert,
    load,
    session,
)
from tests.decoders.synthetic import (
    HIDING,
    PLAIN,
    SELECTING,
    UNMASKED,
    decoder,
)
from tq_onnx.recognise.match import recognise

SOFTCAP = """t0 = Mul(s0, half)
        t1 = Div(t0, cap)
        t2 = Tanh(t1)
        s1 = Mul(t2, cap)"""
NAN_GUARD = """t3 = IsNaN(p0)
        p = Where(t3, nothing, p0)"""
TWO_MASKS = """t4 = Add(s1, bias)
        s2 = Where(keep, t4, lowest)"""
NEGATIVE_SOFTCAP = SOFTCAP.replace("Mul(t2, cap)", "Mul(t2, below)").replace(
    "t0 =", "below = Constant<value_float = -0.7>()\n        t0 ="
)
EINSUM = {
    "keys": "kt = Identity(kr)",
    "product": 's0 = Einsum<equation = "bhsd,bhtd->bhts">(kt, qs)',
    "weighted": 'o = Einsum<equation = "bhts,bhsd->bhtd">(p, vr)',
}
FUSED = {
    "query": "qs = Identity(q)",
    "keys": "kt = Identity(kr)",
    "product": "s0 = com.microsoft.FusedMatMul<transB = 1, alpha = 0.25>(qs, kt)",
    "weighted": "o = com.microsoft.FusedMatMul(p, vr)",
}
LOW_RANK_MASK = """t5 = Squeeze(bias)
        s2 = Add(s1, t5)"""

FORMS: dict[str, dict[str, Any]] = {
    "additive mask": {},
    "selecting mask": {"mask": SELECTING},
    "hiding mask": {"mask": HIDING},
    "two masks": {"mask": TWO_MASKS},
    "no mask": {"mask": UNMASKED},
    "no repeat": {"heads": 2, "repeat": PLAIN},
    "three queries a key": {"heads": 6},
    "softcap": {"scores": SOFTCAP},
    "scale on scores": {"query": "qs = Identity(q)", "scores": "s1 = Mul(s0, quarter)"},
    "scale divides": {"query": "qs = Div(q, half)", "scores": "s1 = Mul(quarter, s0)"},
    "no scale": {"query": "qs = Identity(q)"},
    "guard against NaN": {"probabilities": NAN_GUARD},
    "cast after scale": {"query": "t6 = Mul(q, half)\n        qs = Cast<to = 1>(t6)"},
    "dropout": {"probabilities": "p = Dropout(p0)"},
    "one layer": {"layers": 1},
    "Einsum": EINSUM,
    "FusedMatMul": FUSED,
    "softcap with another sign": {"scores": NEGATIVE_SOFTCAP},
}


@pytest.mark.parametrize("form", FORMS)
def test_converted_form_is_the_original(form: str) -> None:
    model = decoder(**FORMS[form])
    plan = convert(model, "raw")
    data, converted = batch(12, 2, left_padding=2), session(model, library=True)
    expected = Decoder(session(decoder(**FORMS[form])), 2).run(data)[data.real]
    grown, fixed = Decoder(converted, 2), Decoder(converted, 2, capacity=16)

    assert plan.fixed_capacity == (form != "no mask")
    for each in (grown, fixed)[: 1 + plan.fixed_capacity]:
        found = each.run(data)[data.real]
        assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()
    assert fixed.same_bytes(grown, 12) or not plan.fixed_capacity


def test_a_scale_that_float16_rounded_is_snapped() -> None:
    model = load("dynamo-op18-sdpa-hd128-fp16")
    rounded = float(np.float16(128**-0.25)) ** 2
    assert rounded != pytest.approx(128**-0.5, rel=1e-4)

    assert [site.scale for site in recognise(model).sites] == [128**-0.5] * 2


def test_a_scale_that_single_precision_tells_is_not_snapped() -> None:
    model = decoder()
    model.graph.initializers["quarter"].const_value = ir.tensor(np.array(0.2501, np.float32))

    assert [site.scale for site in recognise(model).sites] == [pytest.approx(0.2501)] * 2


def test_a_mask_is_made_into_a_bias_once() -> None:
    model = decoder(mask=SELECTING, layers=3)
    before = sum(node.op_type == "Where" for node in model.graph)
    convert(model)

    assert before == 4  # one that nobody needs, and one in each layer
    assert sum(node.op_type == "Where" for node in model.graph) == 1


def test_a_low_rank_mask_gets_its_rank() -> None:
    original, model = decoder(mask=LOW_RANK_MASK), decoder(mask=LOW_RANK_MASK)
    for each in (original, model):
        for node in each.graph:
            if node.op_type == "Squeeze" and node.outputs[0].name.startswith("t5"):
                node.outputs[0].shape = ir.Shape(["T", "S"])
    convert(model, "raw")
    data = batch(8)

    # One token at a time would squeeze its dimension too.
    expected, found = (Decoder(session(each)).run(data, (5, 3)) for each in (original, model))
    assert np.abs(found - expected).max() < EXACT * np.abs(expected).max()


def test_refuses_a_cache_with_a_fixed_length() -> None:
    model = decoder()
    model.graph.inputs[2].shape = ir.Shape(["B", 2, 8, 16])

    assert "fixed length of 8 tokens" in str(recognise(model).misses[0])


def test_shapes_are_found_where_the_graph_does_not_tell_them() -> None:
    told, untold = recognise(decoder()), recognise(decoder(infer=False, mask=UNMASKED))

    assert untold.misses == ()
    for with_shapes, without in zip(told.sites, untold.sites, strict=True):
        assert without.num_heads == with_shapes.num_heads == 4
        assert without.head_size == with_shapes.head_size == 16


def test_refuses_where_nothing_tells_the_heads() -> None:
    """Their number is computed from what the graph is fed."""
    lost = """t0 = Gather(input_ids, nought)
        t1 = Reshape(t0, rest)
        t2 = Slice(t1, nought, one, nought)
        t3 = Concat<axis = 0>(nought, t2, rest, sixteen)
        t4 = Reshape(q, t3)
        qs = Mul(t4, quarter)"""
    model = decoder(infer=False, heads=2, repeat=PLAIN, query=lost)

    assert "run ONNX shape inference" in str(recognise(model).misses[0])


def test_bfloat16_is_recognised() -> None:
    model = decoder()
    for value in (*model.graph.inputs, *model.graph.outputs, *_values(model)):
        if value.dtype == ir.DataType.FLOAT:
            value.type = ir.TensorType(ir.DataType.BFLOAT16)

    assert {site.dtype for site in recognise(model).sites} == {ir.DataType.BFLOAT16}


def _values(model: ir.Model) -> list[ir.Value]:
    return [value for node in model.graph for value in node.outputs]
