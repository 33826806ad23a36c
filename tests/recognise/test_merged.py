"""Attention with batch and heads in one dimension: right, or refused if others are merged."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tests.recognise.test_soundness import ATTENTION, TURNED, agrees, model_of, reason
from tq_onnx.recognise.match import recognise

SIZES = """batch = Shape<start = 0, end = 1>(input_ids)
        heads = Constant<value_ints = [2]>()
        rows = Mul(batch, heads)
        size = Constant<value_ints = [16]>()
        flat = Concat<axis = 0>(rows, minus_one, size)
        whole = Concat<axis = 0>(batch, heads, new, minus_one)
        flat_scores = Concat<axis = 0>(rows, new, minus_one)
"""
KEYS = """key_3 = Reshape(present_key, flat)
        value_3 = Reshape(present_value, flat)
        kt = Transpose<perm = [0, 2, 1]>(key_3)
"""
#: Bloom: biases of each head before the split, the mask behind it.
BLOOM = """q_3 = Reshape(q, flat)
        qs = Mul(q_3, quarter)
        s_3 = MatMul(qs, kt)
        slopes = Constant<value = float[1, 2, 1, 1] {0.25, 0.0625}>()
        far = Cast<to = 1>(slots)
        each = Mul(slopes, far)
        whole_size = Concat<axis = 0>(batch, heads, one, one)
        all = Expand(each, whole_size)
        row_size = Concat<axis = 0>(rows, one, minus_one)
        alibi = Reshape(all, row_size)
        s_a = Add(alibi, s_3)
        s_4 = Reshape(s_a, whole)
        s = Add(s_4, bias)
        p_4 = Softmax<axis = -1>(s)
        p = Reshape(p_4, flat_scores)
        o_3 = MatMul(p, value_3)
        o_size = Concat<axis = 0>(batch, heads, new, size)
        o = Reshape(o_3, o_size)
"""
#: BART of older versions of transformers: split for the mask, and merged again before the softmax.
BART = """qs_4 = Mul(q, quarter)
        qs = Reshape(qs_4, flat)
        s_3 = MatMul(qs, kt)
        s_4 = Reshape(s_3, whole)
        s_m = Add(s_4, bias)
        s = Reshape(s_m, flat_scores)
        p = Softmax<axis = 2>(s)
        o_3 = MatMul(p, value_3)
        o_size = Concat<axis = 0>(batch, heads, new, size)
        o = Reshape(o_3, o_size)
"""
FORMS = {"bloom": BLOOM, "bart": BART}


def merged(form: str, *changes: tuple[str, str], sizes: str = SIZES) -> ir.Model:
    """One layer of a form, with other lines."""
    text = sizes + KEYS + FORMS[form]
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return model_of((TURNED, ""), (ATTENTION, text))


@pytest.mark.parametrize("form", FORMS)
def test_batch_and_heads_in_one_dimension(form: str) -> None:
    assert reason(merged(form)) == ""
    assert recognise(merged(form)).sites[0].num_heads == 2
    assert agrees(lambda: merged(form))


@pytest.mark.parametrize("spread", ["one row", "all rows"])
def test_a_bias_for_all_heads_before_they_are_split(spread: str) -> None:
    """Its first dimension is not told: it may be 1, or batch and heads."""

    def make() -> ir.Model:
        count = "one" if spread == "one row" else "rows"
        some = f"""length = Shape(slots)
        some_size = Concat<axis = 0>({count}, one, length)
        far_3 = Unsqueeze(far, first_two)
        alibi = Expand(far_3, some_size)
"""
        old = BLOOM[BLOOM.index("        whole_size") : BLOOM.index("        s_a =")]
        return merged("bloom", (old, "        " + some))

    assert agrees(make)


@pytest.mark.parametrize(
    ("form", "change", "told"),
    [
        (
            "bloom",
            (
                "whole = Concat<axis = 0>(batch, heads, new",
                "whole = Concat<axis = 0>(heads, batch, new",
            ),
            "batch and heads",
        ),
        (
            "bart",
            ("qs = Reshape(qs_4, flat)", "qs_r = Reshape(qs_4, flat)\n qs = Relu(qs_r)"),
            "not of the query",
        ),
        ("bart", ("qs_4 = Mul(q, quarter)", "qs_4 = Mul(q1, quarter)"), "number of query heads"),
        (
            "bart",
            ("s = Reshape(s_m, flat_scores)", "s_r = Relu(s_m)\n s = Identity(s_r)"),
            "the scores go through Relu",
        ),
        ("bart", ("Softmax<axis = 2>", "Softmax<axis = 1>"), "does not run over the keys"),
    ],
    ids=[
        "heads first",
        "a query changed",
        "tokens before heads",
        "scores rectified",
        "over the queries",
    ],
)
def test_other_dimensions_in_one(form: str, change: tuple[str, str], told: str) -> None:
    assert told in reason(merged(form, change))


def test_a_mask_of_the_merged_scores_of_another_rank() -> None:
    change = ("s_a = Add(alibi, s_3)", "s_a = Add(s_3, bias)")
    assert "the mask is of rank 4" in reason(merged("bloom", change))
