"""Forms of attention that exporters write: each right, and its neighbours refused."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from tests.decoders.onelayer import CACHES, decoder
from tests.recognise.test_soundness import CACHED, MASK, agrees, changed, model_of, reason
from tq_onnx.recognise.match import recognise

SINKS = """three_1 = Constant<value_ints = [3]>()
        second = Constant<value_ints = [-2]>()
        sides = Constant<value_ints = [2, 3]>()
        asked = ReduceMean<keepdims = 1>(q, sides)
        sinks = Constant<value = float[1, HEADS, 1, 1] {NUMBERS}>()
        size = Shape(q)
        first = Slice(size, zero_1, third)
        tokens = Slice(size, third, three_1)
        spread = Concat<axis = 0>(first, tokens, one)
        column = Expand(SOURCE, spread)
        joined = Concat<axis = -1>(s, column)
        largest = ReduceMax<keepdims = 1>(joined, minus_one)
        less = Sub(joined, largest)
        p1 = Softmax<axis = -1>(less)
        p = Slice(p1, zero_1, LAST, minus_one)
"""
SOFTMAX = "p = Softmax<axis = -1>(s)\n"


def with_sinks(
    *changes: tuple[str, str], source: str = "sinks", last: str = "minus_one", heads: int = 2
) -> ir.Model:
    """Attention with a column beside its scores.

    Args:
        changes: other lines.
        source: the value that is spread over batch and queries.
        last: the column that the probabilities end before.
        heads: that have a sink.
    """
    text = SINKS.replace("SOURCE", source).replace("LAST", last).replace("HEADS", str(heads))
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return model_of((SOFTMAX, text.replace("NUMBERS", "-0.3, 0.9"[: 4 if heads == 1 else None])))


def test_sinks_as_a_column() -> None:
    assert recognise(with_sinks()).sites[0].has_sink
    assert agrees(with_sinks)


def test_sinks_without_the_largest_score_taken_off() -> None:
    assert agrees(lambda: with_sinks(("(less)", "(joined)"), ("less =", "other =")))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (with_sinks(source="asked"), "does not add one sink for each head"),
        (with_sinks(last="second"), "the probabilities go into Slice"),
        (with_sinks(heads=1), "the sinks are not one for each of 2 heads"),
        (with_sinks(("(less)", "(s8)"), ("p1 =", "s8 = Mul(less, quarter)\n p1 =")), "behind"),
    ],
    ids=["of each query", "two columns less", "one for all", "scaled"],
)
def test_a_column_that_is_no_sink(model: ir.Model, told: str) -> None:
    assert told in reason(model)


def test_a_column_that_is_not_left_out_again() -> None:
    made = with_sinks()
    cut = next(node for node in made.graph if node.outputs[0].name == "p")
    whole = cut.inputs[0]
    assert whole is not None
    cut.outputs[0].replace_all_uses_with(whole)

    assert "the probabilities" in reason(made)


@pytest.mark.parametrize("axis", ["two_1", "one"])
def test_scores_less_something_else_than_the_largest_of_a_query(axis: str) -> None:
    def make(along: str = axis) -> ir.Model:
        text = f"""two_1 = Constant<value_ints = [2]>()
            mx = ReduceMax<keepdims = 1>(s, {along})
            sl = Sub(s, mx)
            p = Softmax<axis = -1>(sl)
"""
        return model_of(("p = Softmax<axis = -1>(s)\n", text))

    assert "read by" in reason(make())
    assert agrees(lambda: make("minus_one"))


@pytest.mark.parametrize(("factor", "told"), [("0.5", ""), ("-1.0", "turned over"), ("0.05", "")])
def test_a_scale_behind_the_mask(factor: str, told: str) -> None:
    """The bias is part of what is scaled: here it is more than a mask."""

    def make() -> ir.Model:
        text = f"""f = Constant<value_float = {factor}>()
            far = Cast<to = 1>(slots)
            slope = Mul(far, quarter)
            s1 = Add(s0, slope)
            s2 = Add(s1, bias)
            s = Mul(s2, f)
"""
        return model_of(("s = Add(s0, bias)\n", text))

    assert told in reason(make())
    if not told:
        assert agrees(make)


@pytest.mark.parametrize(("fill", "told"), [("-1.0e6", ""), ("-2.0e5", "does not hide a key")])
def test_a_fill_that_is_scaled_into_the_reach_of_scores(fill: str, told: str) -> None:
    def make() -> ir.Model:
        text = f"""f = Constant<value_float = 0.1>()
            low = Constant<value_float = {fill}>()
            s1 = Where(keep, s0, low)
            s = Mul(s1, f)
"""
        return model_of(("s = Add(s0, bias)\n", text))

    assert told in reason(make())
    if not told:
        assert agrees(make)


@pytest.mark.parametrize(("least", "told"), [("-3.4e38", ""), ("-2.0e4", "visible keys may reach")])
def test_a_least_score(least: str, told: str) -> None:
    def make() -> ir.Model:
        text = f"""least = Constant<value_float = {least}>()
            s1 = Add(s0, bias)
            s = Max(s1, least)
"""
        return model_of(("s = Add(s0, bias)\n", text))

    assert told in reason(make())
    if not told:
        assert agrees(make)


def test_a_least_score_that_is_scaled() -> None:
    text = """s1 = Max(s0, lowest)
            s2 = Mul(s1, quarter)
            s = Add(s2, bias)
"""
    assert "scaled after a least score" in reason(model_of(("s = Add(s0, bias)\n", text)))


CHOSEN = """angles_4 = Constant<value = float[1, 4, 16] {NUMBERS}>()
        four_16 = Constant<value_ints = [4, 16]>()
        sixteen = Constant<value_ints = [16]>()
        row = Constant<value_ints = [1, 1, 16]>()
        batch = Shape<start = 0, end = 1>(input_ids)
        all_4 = Concat<axis = 0>(batch, four_16)
        the_angles = Expand(angles_4, all_4)
        the_tokens = Slice(x, zero_1, sixteen, third)
        first = Mul(input_ids, zero)
        column = Unsqueeze(first, third)
        index = Expand(column, row)
        angle = GatherElements<axis = 1>(SOURCE, index)
        angle_4 = Unsqueeze(angle, one)
        qa = Mul(q, angle_4)
        qs = Mul(qa, quarter)
"""


@pytest.mark.parametrize("source", ["the_angles", "the_tokens"])
def test_rows_that_are_chosen_for_the_query_alone(source: str) -> None:
    """Angles of rotary embeddings by GatherElements, as GPT-J has them, carry no token."""
    numbers = ", ".join(str((7 * index % 11) / 11 + 0.5) for index in range(64))

    def make() -> ir.Model:
        text = CHOSEN.replace("NUMBERS", numbers).replace("SOURCE", source)
        return model_of(("qs = Mul(q, quarter)\n", text))

    if source == "the_angles":
        assert agrees(make)
    else:
        assert "the query may be of some tokens only, by angle" in reason(make())


@pytest.mark.parametrize("shaped", ["as they are", "side by side"])
def test_ids_through_a_reshape(shaped: str) -> None:
    def make() -> ir.Model:
        made = model_of(inputs=MASK)
        ids = made.graph.inputs[0]
        count = ir.node("Shape", [ids], {"start": 1, "end": 2})
        rest = ir.node("Constant", [], {"value_ints": [-1]})
        sizes = [rest.outputs[0], count.outputs[0]]
        both = ir.node("Concat", sizes if shaped == "as they are" else sizes[::-1], {"axis": 0})
        flat = ir.node("Reshape", [ids, both.outputs[0]])
        made_of = (count, rest, both, flat)
        for index, node in enumerate(made_of):
            node.outputs[0].name = f"ids_{index}"
        words = next(node for node in made.graph if node.op_type == "Gather")
        made.graph.insert_before(words, made_of)
        words.replace_input_with(1, flat.outputs[0])
        return made

    if shaped == "as they are":
        assert agrees(make)
    else:
        assert "no tokens or embeddings as input" in reason(make())


@pytest.mark.parametrize("positions", ["int64[L] positions, ", "float[L] positions, "])
def test_one_id_beside_a_list_of_positions(positions: str) -> None:
    """Whisper's list has a name of its own for its length, which is that of the ids."""
    text = """at = Cast<to = 1>(positions)
        column = Unsqueeze(at, one)
        kp = Add(k, column)
        vp = Add(v, column)
        qp = Add(q, column)
"""
    body = changed(
        (CACHED, text + CACHED.replace(", k)", ", kp)").replace(", v)", ", vp)")),
        ("qs = Mul(q, quarter)", "qs = Mul(qp, quarter)"),
    )
    text = body.replace("Shape<start = 1, end = 2>(input_ids)", "Shape(positions)")
    found = decoder(text, inputs=MASK + positions + CACHES)
    found.graph.inputs[0].shape = ir.Shape(["B", 1])

    told = "" if positions.startswith("int64") else "as many tokens ask as are cached"
    assert told in reason(found)
    assert bool(told) == bool(reason(found))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            [
                (
                    "kt = Transpose<perm = [0, 1, 3, 2]>(present_key)",
                    "latent = MatMul(present_key, square)\n"
                    "        kt = Transpose<perm = [0, 1, 3, 2]>(latent)",
                )
            ],
            "multi-head latent attention, MLA",
        ),
    ],
    ids=["latent"],
)
def test_caches_that_stay_refused(changes: list[tuple[str, str]], told: str) -> None:
    body = changed(*changes)
    square = "square = Constant<value = float[16, 16] {" + ", ".join(["0.5"] * 256) + "}>()\n"

    assert told in reason(decoder(square + body, inputs=MASK + CACHES))
