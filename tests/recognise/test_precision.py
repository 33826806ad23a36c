"""Caches of another element type than the attention that reads them, and graphs out of order."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import decoder
from tests.decoders.running import Array, caches_of, convert, fed_back, session
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.recognise.match import recognise

STEPS = 3
FLOAT, HALF = 1, 10

BODY = """
        qh = Cast<to = INNER>(q)
        kh = Cast<to = INNER>(k)
        vh = Cast<to = INNER>(v)
        pk = Cast<to = INNER>(past_key)
        pv = Cast<to = INNER>(past_value)
        ck = Concat<axis = 2>(pk, kh)
        cv = Concat<axis = 2>(pv, vh)
        present_key = Cast<to = OUTER>(ck)
        present_value = Cast<to = OUTER>(cv)
        qt = Cast<to = INNER>(quarter)
        qs = Mul(qh, qt)
        kt = Transpose<perm = [0, 1, 3, 2]>(ck)
        s = MatMul(qs, kt)
        own = Cast<to = INNER>(past_key)
        size = Shape<start = 2, end = 3>(own)
        far = Cast<to = INNER>(size)
        p = Softmax<axis = -1>(s)
        o0 = MatMul(p, cv)
        o = Add(o0, far)
        of = Cast<to = 1>(o)
        o1 = Transpose<perm = [0, 2, 1, 3]>(of)
        merged = Reshape(o1, merged_shape)
"""


def model(inner: int, past: str, present: str) -> ir.Model:
    """A decoder whose attention is of one type, and its caches of others."""
    outer = HALF if present == "float16" else FLOAT
    body = BODY.replace("INNER", str(inner)).replace("OUTER", str(outer))
    return decoder(
        body,
        inputs=f"{past}[B, 2, P, 16] past_key, {past}[B, 2, P, 16] past_value",
        outputs=f"{present}[B, 2, S, 16] present_key, {present}[B, 2, S, 16] present_value",
    )


def run(made: ir.Model) -> Array:
    """Logits of some steps."""
    running = session(made)
    calls = ({"input_ids": np.array([[3 + step]])} for step in range(STEPS))
    return fed_back(running, calls, caches_of(running, 1))


@pytest.mark.parametrize("inner", [FLOAT, HALF])
def test_caches_that_hold_more_than_attention_reads(inner: int) -> None:
    converted = model(inner, "float", "float")
    plan = convert(converted, "raw")
    expected, found = run(model(inner, "float", "float")), run(converted)

    assert plan.layers[0].dtype == ("FLOAT" if inner == FLOAT else "FLOAT16")
    assert plan.layers[0].key.row_bytes == (64 if inner == FLOAT else 32)
    noise = 1e-5 if inner == FLOAT else 2e-3
    assert np.abs(found - expected).max() <= noise * np.abs(expected).max()
    assert not any(
        node.op_type == "Cast" and "past" in str(node.inputs[0]) for node in converted.graph
    )


@pytest.mark.parametrize(
    ("inner", "past", "present", "reason"),
    [
        (FLOAT, "float16", "float16", "made by Cast"),
        (HALF, "float", "float16", "cannot be fed back"),
        (HALF, "float16", "float", "cannot be fed back"),
    ],
)
def test_caches_that_round_or_cannot_be_fed_back(
    inner: int, past: str, present: str, reason: str
) -> None:
    misses = recognise(model(inner, past, present)).misses
    assert reason in str(misses[0])


def test_old_rows_that_are_rounded_again() -> None:
    made = model(FLOAT, "float", "float")
    node = next(node for node in made.graph if node.outputs[0].name == "pk")
    half = ir.node("Cast", [node.inputs[0]], {"to": HALF})
    half.outputs[0].name, half.outputs[0].dtype = "rounded", ir.DataType.FLOAT16
    made.graph.insert_before(node, half)
    node.replace_input_with(0, half.outputs[0])

    assert "rounds what attention reads" in str(recognise(made).misses[0])


def test_nodes_in_any_order() -> None:
    shuffled = model(FLOAT, "float", "float")
    nodes = list(shuffled.graph)
    shuffled.graph.remove(nodes)
    shuffled.graph.extend(reversed(nodes))
    convert(shuffled, "raw")
    expected = run(model(FLOAT, "float", "float"))

    assert np.abs(run(shuffled) - expected).max() <= 1e-5 * np.abs(expected).max()


def test_nodes_in_a_circle() -> None:
    made = model(FLOAT, "float", "float")
    node = next(node for node in made.graph if node.outputs[0].name == "x")
    later = next(value for node in made.graph for value in node.outputs if value.name == "merged")
    node.replace_input_with(0, later)

    assert "which depends on it" in str(recognise(made).misses[0])
    with pytest.raises(UnsupportedModelError):
        convert(made, "raw")
