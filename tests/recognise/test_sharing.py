"""Layers that read the caches of another one: encoded once, attended to by each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import CACHES, decoder
from tests.recognise.test_soundness import MASK, agrees, changed, reason
from tq_onnx.conversion.layers import converted_layers
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import Prepared, convert, prepare
from tq_onnx.errors import UsageError
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.recognise.match import recognise
from tq_onnx.verification.verify import verify

FIRST = "o = MatMul(p, present_value)"
AGAIN = """o_1 = MatMul(p, present_value)
        q_1 = Add(o_1, q)
        q_2 = Mul(q_1, quarter)
        s_2 = MatMul(q_2, KEYS)
        s_3 = Add(s_2, bias)
        p_2 = Softmax<axis = -1>(s_3)
        o = MatMul(p_2, VALUES)"""
HALVED = """half = Constant<value_float = 0.5>()
        s_22 = Mul(s_2, half)
        s_3 = Add(s_22, bias)"""


def shared(*changes: tuple[str, str], keys: str = "kt", values: str = "present_value") -> ir.Model:
    """Two attentions, one behind the other, over one pair of caches."""
    again = AGAIN.replace("KEYS", keys).replace("VALUES", values)
    for old, new in changes:
        assert old in again
        again = again.replace(old, new)
    return decoder(changed((FIRST, again)), inputs=MASK + CACHES)


def saved(folder: Path) -> Path:
    ir.save(shared(), folder / "model.onnx")
    return folder / "model.onnx"


def prepared(path: Path, preset: str = "int4", **options: object) -> Prepared:
    return prepare(path, preset=preset, options=Options(**options))  # type: ignore[arg-type]


def test_the_conversion_is_the_original() -> None:
    assert agrees(shared)


@pytest.mark.parametrize("keys", ["kt", "kt_2"])
def test_each_may_turn_the_keys_itself(keys: str) -> None:
    turned = "kt_2 = Transpose<perm = [0, 1, 3, 2]>(present_key)\n        s_2 = "
    assert agrees(lambda: shared(("s_2 = ", turned), keys=keys))


def test_rows_are_encoded_once(tmp_path: Path) -> None:
    (site,) = recognise(shared()).sites
    made = prepared(saved(tmp_path))
    (layer,) = converted_layers(made.loaded.model, made.plan)

    assert len(site.attentions) == made.plan.layers[0].readers == 2
    assert len(Encode.nodes(made.loaded.model.graph)) == 2
    assert len(Attention.nodes(made.loaded.model.graph)) == 2
    assert len(layer.attentions) == 2
    assert {one.key_cache for one in layer.attentions} == {layer.key.output}


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (shared(("s_3 = Add(s_2, bias)", HALVED)), "different scales"),
        (shared(values="v"), "cache present_key has no partner"),
        (shared(("q_2 = Mul(q_1", "q_2 = Mul(o_1")), "an operand of attention as it is"),
        (shared(keys="present_key"), "read more than once, by Transpose, MatMul"),
    ],
    ids=["scales", "other values", "the result as it is", "keys that are not turned"],
)
def test_what_cannot_be_shared(model: ir.Model, told: str) -> None:
    assert told in reason(model)


def test_verify_looks_at_each_of_them(tmp_path: Path) -> None:
    path, made = saved(tmp_path), tmp_path / "made.onnx"
    convert(path, made)

    def problems() -> list[str]:
        found = verify(
            path, made, np.arange(3, 60), source="numbers", context=16, new_tokens=2, threads=1
        )
        return [check.detail for check in found.checks if not check.holds]

    assert problems() == []
    model = ir.load(made)
    node = Attention.nodes(model.graph)[1]
    node.attributes["scale"] = ir.AttrFloat32("scale", 0.3)
    ir.save(model, made)
    assert "attention has scale" in " ".join(problems())


def test_no_scales_go_into_norms_of_one_of_them(tmp_path: Path) -> None:
    """The other queries would meet scaled keys."""
    path = saved(tmp_path)
    with pytest.raises(UsageError, match="other layers read the same keys"):
        prepared(path, equalize=True)
