"""Graphs that look like attention that can be converted: right numbers, or a refusal.

Each was once converted to something else than it computes. Its twin, which may be converted, shows
that the refusal is not for another reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import CACHES, PRESENTS, TOKENS, decoder
from tests.decoders.running import Array, caches_of, convert, fed_back, session
from tests.decoders.synthetic import decoder as two_layers
from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.planning import make_plan
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.recognise.match import recognise

EXACT = 1e-5
CHUNKS = (5, 1, 3, 1)
MASK = "int64[B, S] attention_mask, "

COUNTED = """new = Shape<start = 1, end = 2>(input_ids)
        old = Shape<start = 2, end = 3>(past_key)
        total = Add(old, new)
        new0 = Squeeze(new)
        old0 = Squeeze(old)
        total0 = Squeeze(total)
        steps = Range(zero, new0, step)
        standing = Add(steps, old0)
        slots = Range(zero, total0, step)
        places = Unsqueeze(standing, one)
        causal = LessOrEqual(slots, places)
        middle = Constant<value_ints = [1, 2]>()
        third = Constant<value_ints = [2]>()
        end = Constant<value_ints = [100000]>()
        bools = Cast<to = 9>(attention_mask)
"""
KEPT = """kept = Unsqueeze(bools, middle)
        keep = And(kept, causal)
        bias = Where(keep, nothing, lowest)
"""
CACHED = """present_key = Concat<axis = 2>(past_key, k)
        present_value = Concat<axis = 2>(past_value, v)
"""
TURNED = "kt = Transpose<perm = [0, 1, 3, 2]>(present_key)\n"
ATTENTION = """qs = Mul(q, quarter)
        s0 = MatMul(qs, kt)
        s = Add(s0, bias)
        p = Softmax<axis = -1>(s)
        o = MatMul(p, present_value)
"""
MERGED = """o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        merged = Reshape(o1, merged_shape)"""
BODY = COUNTED + KEPT + CACHED + TURNED + ATTENTION + MERGED

Change = Callable[[dict[str, Array]], None]


def changed(*pairs: tuple[str, str]) -> str:
    body = BODY
    for old, new in pairs:
        assert body.count(old) == 1, old
        body = body.replace(old, new)
    return body


def model_of(*pairs: tuple[str, str], inputs: str = MASK) -> ir.Model:
    return decoder(changed(*pairs), inputs=inputs + CACHES)


def calls(change: Change | None, batch: int) -> Iterator[dict[str, Array]]:
    rng = np.random.default_rng(0)
    mask = np.ones((batch, sum(CHUNKS)), np.int64)
    tokens = rng.integers(3, TOKENS, mask.shape)
    start = 0
    for chunk in CHUNKS:
        stop = start + chunk
        feeds = {"input_ids": tokens[:, start:stop], "attention_mask": mask[:, :stop]}
        if change is not None:
            change(feeds)
        yield feeds
        start = stop


def run(model: ir.Model, change: Change | None = None, batch: int = 2) -> Array:
    """Logits of some calls, each with the caches of the one before."""
    running = session(model)
    return fed_back(running, calls(change, batch), caches_of(running, batch))


def agrees(
    make: Callable[[], ir.Model],
    change: Change | None = None,
    *,
    batch: int = 2,
    tolerance: float = EXACT,
) -> bool:
    converted = make()
    convert(converted, "raw")
    expected, found = run(make(), change, batch), run(converted, change, batch)
    return bool(np.abs(found - expected).max() <= tolerance * np.abs(expected).max())


def reason(model: ir.Model) -> str:
    """Why a model is refused; empty if it is not."""
    return "; ".join(miss.reason for miss in recognise(model).misses)


def test_the_model_that_all_others_differ_from() -> None:
    assert agrees(model_of)


@pytest.mark.parametrize(("fill", "hides"), [("-1.0e4", False), ("-6.5e4", True)])
def test_a_fill_within_reach_of_scores_is_no_mask(fill: str, hides: bool) -> None:
    def make(factor: str = "-2.0e3") -> ir.Model:
        return model_of(
            (
                "qs = Mul(q, quarter)",
                f"big = Constant<value_float = {factor}>()\n qs = Mul(q, big)",
            ),
            (
                "s = Add(s0, bias)",
                f"fill = Constant<value_float = {fill}>()\n s = Where(keep, s0, fill)",
            ),
        )

    if hides:
        assert agrees(make)
    else:
        assert "does not hide a key" in reason(make("1.0"))


@pytest.mark.parametrize("fill", ["-20.0", "-1.0e4", "-1.0e9", "-1.6e38", "-3.0e38"])
def test_an_added_mask_acts_as_it_did(fill: str) -> None:
    def make() -> ir.Model:
        hidden = f"fill = Constant<value_float = {fill}>()\n bias = Where(keep, nothing, fill)"
        return model_of(("bias = Where(keep, nothing, lowest)", hidden))

    assert agrees(make)


def test_a_scale_near_the_usual_one_is_itself() -> None:
    def make() -> ir.Model:
        model = model_of()
        model.graph.initializers["quarter"].const_value = ir.tensor(np.float32(0.2502))
        return model

    assert recognise(make()).sites[0].scale == pytest.approx(0.2502)
    assert agrees(make)


@pytest.mark.parametrize(
    ("factor", "scale"),
    [
        ("f1 = Cast<to = 7>(half)\n f2 = Cast<to = 1>(f1)", None),
        ("f1 = Cast<to = 10>(half)\n f2 = Cast<to = 1>(f1)", 1.5),
        ("f1 = Div(three, two)\n f2 = Cast<to = 1>(f1)", None),
        ("f1 = Mul(three, two)\n f2 = Cast<to = 1>(f1)", 6.0),
    ],
)
def test_constants_are_computed_as_the_graph_computes_them(
    factor: str, scale: float | None
) -> None:
    constants = "half = Constant<value_float = 1.5>()\n three = Constant<value_int = 3>()\n "
    model = model_of(("qs = Mul(q, quarter)", f"{constants}{factor}\n qs = Mul(q, f2)"))

    found = recognise(model)

    # What is not known to be constant stays with the query.
    assert [site.scale for site in found.sites] == [1.0 if scale is None else scale]


@pytest.mark.parametrize(("dtype", "reads"), [(17, False), (11, True)])
def test_rounding_to_eight_bits_is_no_change_of_precision(dtype: int, reads: bool) -> None:
    def make() -> ir.Model:
        rounded = f"k8 = Cast<to = {dtype}>(present_key)\n k9 = Cast<to = 1>(k8)\n "
        return model_of((TURNED, rounded + TURNED.replace("present_key", "k9")))

    if reads:
        assert agrees(make)
    else:
        assert "goes into Cast" in reason(make())


CUT_QUERY = """x2 = Slice(x, START, end, one)
        q2 = MatMul(x2, w_q)
        q3 = Reshape(q2, heads_shape)
        q4 = Transpose<perm = [0, 2, 1, 3]>(q3)
        b4 = Slice(bias, START, end, third)
        qs = Mul(q4, quarter)"""
BROADCAST = """o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, merged_shape)
        merged = ReduceMax<keepdims = 1>(o2, one)"""


@pytest.mark.parametrize(
    ("start", "told"), [("last", "may be of some tokens only, by x2"), ("zero_1", "")]
)
def test_a_query_for_the_last_tokens_alone_is_refused(start: str, told: str) -> None:
    """The operator would take its keys for fewer than there are."""
    model = model_of(
        ("qs = Mul(q, quarter)", CUT_QUERY.replace("START", start)),
        ("s = Add(s0, bias)", "s = Add(s0, b4)"),
        (MERGED, BROADCAST),
        inputs=f"{MASK}int64[1] last, ",
    )
    if not told:
        model.graph.inputs.remove(next(v for v in model.graph.inputs if v.name == "last"))
        whole = next(node for node in model.graph if node.outputs[0].name == "end")
        whole.attributes["value_ints"] = ir.AttrInt64s("value_ints", [2**63 - 1])

    assert told in reason(model)
    assert bool(reason(model)) == bool(told)


def test_new_rows_that_are_a_part_of_the_tokens_are_refused() -> None:
    rows = "k2 = Slice(k, last, end, third)\n present_key = Concat<axis = 2>(past_key, k2)"
    model = model_of(
        ("present_key = Concat<axis = 2>(past_key, k)", rows), inputs=f"{MASK}int64[1] last, "
    )

    assert "the new rows may be of some tokens only" in reason(model)


PARTS = """parts_shape = Constant<value_ints = [0, 0, 6, 16]>()
        parts_0 = Concat<axis = -1>(q0, k0, v0)
        parts_1 = Reshape(parts_0, parts_shape)
        parts = Transpose<perm = [2, 0, 1, 3]>(parts_1)
        by_tokens = Transpose<perm = [2, 0, 1, 3]>(k)
        chosen = Constant<value = int64[2, 1] {{2, 3}}>()
        first = Constant<value = int64[1, 1] {{0}}>()
        k2 = GatherND({source}, {indices})
        k3 = Transpose<perm = {perm}>(k2)
        k4 = Add(k, k3)
        present_key = Concat<axis = 2>(past_key, k4)
"""


@pytest.mark.parametrize(
    ("source", "indices", "perm", "told"),
    [
        ("parts", "chosen", [1, 0, 2, 3], ""),
        ("parts", "heads_of", [1, 0, 2, 3], "may be of some tokens only, by k2"),
        ("by_tokens", "first", [1, 2, 0, 3], "may be of some tokens only, by k2"),
    ],
)
def test_a_part_of_all_projections_by_gathernd(
    source: str, indices: str, perm: list[int], told: str
) -> None:
    """Falcon's keys: indices for the heads take all tokens, those for tokens do not."""
    text = PARTS.format(source=source, indices=indices, perm=perm)
    inputs = MASK + ("int64[2, 1] heads_of, " if indices == "heads_of" else "")

    def make() -> ir.Model:
        return model_of(("present_key = Concat<axis = 2>(past_key, k)\n", text), inputs=inputs)

    assert told in reason(make())
    assert told or agrees(make)


FOLDED = """folded = Constant<value_ints = [-1, 0, 16]>()
        tokens = Shape<start = 2, end = 3>(k)
        rest = Constant<value_ints = [-1]>()
        size = Constant<value_ints = [16]>()
        heads = Constant<value_ints = [2]>()
        three = Concat<axis = 0>(rest, tokens, size)
        k3 = Reshape(k, three)
        v3 = Reshape(v, three)
        ck = Concat<axis = 1>(past_k3, k3)
        cv = Concat<axis = 1>(past_v3, v3)
        cs = Shape<start = 1, end = 2>(ck)
        four = Concat<axis = 0>(rest, heads, cs, size)
        present_key = Reshape(ck, four)
        present_value = Reshape(cv, four)
"""


def test_a_cache_of_three_dimensions_is_not_taken_for_a_first_prompt() -> None:
    body = changed(
        (CACHED, FOLDED),
        ("Shape<start = 2, end = 3>(past_key)", "Shape<start = 1, end = 2>(past_k3)"),
    )
    pasts = "float[BN, P, 16] past_k3, float[BN, P, 16] past_v3"

    assert "continues the input past_k3, which is of rank 3" in reason(
        decoder(body, inputs=MASK + pasts)
    )


SHORTENED = """jk = Concat<axis = 2>(past_key, k)
        jv = Concat<axis = 2>(past_value, v)
        window = Constant<value_ints = [-3]>()
        jkt = Transpose<perm = [0, 2, 1, 3]>(jk)
        jvt = Transpose<perm = [0, 2, 1, 3]>(jv)
        jks = Slice(jkt, window, end, one)
        jvs = Slice(jvt, window, end, one)
        present_key = Transpose<perm = [0, 2, 1, 3]>(jks)
        present_value = Transpose<perm = [0, 2, 1, 3]>(jvs)
"""


def test_a_cache_that_is_shortened_while_turned_keeps_its_heads() -> None:
    def make() -> ir.Model:
        return model_of(
            (CACHED, SHORTENED),
            (TURNED, TURNED.replace("present_key", "jk")),
            ("MatMul(p, present_value)", "MatMul(p, jv)"),
            (
                "kept = Unsqueeze(bools, middle)",
                "since = Neg(total)\n held = Slice(bools, since, end, one)"
                "\n kept = Unsqueeze(held, middle)",
            ),
        )

    assert agrees(make)


def longer(feeds: dict[str, Array]) -> None:
    mask = feeds["attention_mask"]
    feeds["attention_mask"] = np.pad(mask, ((0, 0), (0, 16 - mask.shape[1])), constant_values=1)


def test_a_mask_may_be_longer_than_the_tokens_if_the_graph_cuts_it() -> None:
    def make() -> ir.Model:
        cut = "held = Slice(bools, zero_1, total, one)\n kept = Unsqueeze(held, middle)"
        return model_of(("kept = Unsqueeze(bools, middle)", cut))

    assert recognise(make()).fixed_capacity
    assert agrees(make, longer)
    assert agrees(make)


def shorter(feeds: dict[str, Array]) -> None:
    tokens = feeds["input_ids"].shape[1]
    feeds["attention_mask"] = feeds["attention_mask"][:, :-tokens]


@pytest.mark.parametrize("name", ["S", "M", "P"])
def test_a_mask_of_the_past_alone_does_not_tell_the_length(name: str) -> None:
    def make() -> ir.Model:
        whole = """yes = Constant<value = bool[1] {1}>()
        asked = Shape(input_ids)
        seen = Expand(yes, asked)
        both = Concat<axis = 1>(bools, seen)
        kept = Unsqueeze(both, middle)"""
        return model_of(
            ("kept = Unsqueeze(bools, middle)", whole),
            inputs=f"int64[B, {name}] attention_mask, ",
        )

    assert not recognise(make()).fixed_capacity
    assert agrees(make, shorter)


REPEATED = """by_five = Identity(FIVE)
        k5 = Reshape(present_key, by_five)
        ke = Expand(k5, expansion)
        kr = Reshape(ke, by_four)
        v5 = Reshape(present_value, by_five)
        ve = Expand(v5, expansion)
        vr = Reshape(ve, by_four)
"""


@pytest.mark.parametrize("told", [False, True])
def test_heads_that_may_be_repeated_in_another_order_are_refused(told: bool) -> None:
    constants = """expansion = Constant<value_ints = [1, 1, 2, 1, 1]>()
        five = Constant<value_ints = [0, 2, 1, -1, 16]>()
        by_four = Constant<value_ints = [0, 4, -1, 16]>()
"""
    body = changed(
        (
            TURNED,
            constants
            + REPEATED.replace("FIVE", "five" if told else "asked_five")
            + TURNED.replace("present_key", "kr"),
        ),
        ("MatMul(p, present_value)", "MatMul(p, vr)"),
    )
    body = body.replace("by_five = Identity(five)\n", "").replace(", by_five)", ", five)", 2 * told)
    inputs = MASK + ("" if told else "int64[5] asked_five, ")
    model = decoder(body, inputs=inputs + CACHES, heads=4)

    assert bool(reason(model)) != told
    assert told or "does not say how the cache" in reason(model)


@pytest.mark.parametrize("half", ["both", "value"])
def test_caches_in_half_precision_and_attention_in_single(half: str) -> None:
    narrow = {"both": ("k", "v"), "value": ("v",)}[half]

    def make() -> ir.Model:
        body, pasts, presents = BODY, CACHES, PRESENTS
        for name, role in (("k", "key"), ("v", "value")):
            if name not in narrow:
                continue
            body = body.replace(f"(past_{role}, {name})", f"(past_{role}, {name}h)")
            body = body.replace(
                "present_key = Concat", f"{name}h = Cast<to = 10>({name})\n present_key = Concat"
            )
            wide = f"{name}f = Cast<to = 1>(present_{role})\n "
            body = body.replace("kt = ", wide + "kt = ")
            body = body.replace("(p, present_value)", "(p, vf)") if name == "v" else body
            body = body.replace(">(present_key)\nqs", ">(kf)\nqs") if name == "k" else body
            pasts = pasts.replace(
                f"float[B, KV, P, 16] past_{role}", f"float16[B, KV, P, 16] past_{role}"
            )
            presents = presents.replace(
                f"float[B, KV, S, 16] present_{role}", f"float16[B, KV, S, 16] present_{role}"
            )
        return decoder(body, inputs=MASK + pasts, outputs=presents)

    model = make()
    convert(model, "raw")
    encoders = [node for node in model.graph if node.op_type == "TurboQuantEncode"]
    assert {node.inputs[0].dtype for node in encoders} == {ir.DataType.FLOAT}
    assert agrees(make)


def test_layers_of_several_types_have_no_raw_rows() -> None:
    recognition = recognise(two_layers())
    object.__setattr__(recognition.sites[1], "dtype", ir.DataType.FLOAT16)

    with pytest.raises(UnsupportedModelError, match="several element types"):
        make_plan(recognition, PRESETS["raw"])
    assert make_plan(recognition, PRESETS["int4"])


@pytest.mark.parametrize(("axis", "told"), [(0, True), (2, False)])
def test_positions_from_the_size_of_a_cache_forbid_a_fixed_one(axis: int, told: bool) -> None:
    """GroupQueryAttention counts by seqlens_k, but this graph places tokens by the cache's size."""

    def make() -> ir.Model:
        body = f"""kept = ReduceSum<keepdims = 0>(attention_mask, one)
        kept32 = Cast<to = 6>(kept)
        one32 = Constant<value = int32[1] {{1}}>()
        lengths = Sub(kept32, one32)
        all = Shape<start = 1, end = 2>(attention_mask)
        all32 = Cast<to = 6>(all)
        total = Squeeze(all32)
        old = Shape<start = {axis}, end = {axis + 1}>(past_key)
        place = Cast<to = 1>(old)
        q9 = Mul(q0, place)
        merged, present_key, present_value = com.microsoft.GroupQueryAttention
            <num_heads = 2, kv_num_heads = 2>
            (q9, k0, v0, past_key, past_value, lengths, total)"""
        return decoder(body, inputs=MASK + CACHES)

    assert recognise(make()).fixed_capacity is told
    # The kernel takes but one sequence when some of it is cached.
    assert agrees(make, batch=1)


def prefixed(feeds: dict[str, Array]) -> None:
    """Two more tokens in this call and in each before it."""
    call = 1 + [5, 6, 9, 10].index(feeds["attention_mask"].shape[1])
    feeds["attention_mask"] = np.pad(
        feeds["attention_mask"], ((0, 0), (2 * call, 0)), constant_values=1
    )


def test_tokens_that_the_graph_adds_are_not_told_by_its_inputs() -> None:
    def make() -> ir.Model:
        model = model_of(("Shape<start = 1, end = 2>(input_ids)", "Shape<start = 1, end = 2>(x)"))
        graph = model.graph
        prefix = ir.Value(name="prefix", const_value=ir.tensor(np.ones((2, 2, 32), np.float32)))
        prefix.type, prefix.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([2, 2, 32])
        graph.register_initializer(prefix)
        words = next(node for node in graph if node.op_type == "Gather").outputs[0]
        joined = ir.node("Concat", [prefix, words], attributes={"axis": 1})
        joined.outputs[0].name, joined.outputs[0].type = "joined", words.type
        joined.outputs[0].shape = ir.Shape(["B", "more", 32])
        for use in list(words.uses()):
            use.node.replace_input_with(use.idx, joined.outputs[0])
        joined.replace_input_with(1, words)
        graph.insert_after(words.producer(), joined)
        graph.outputs[0].shape = ir.Shape(["B", "more", TOKENS])
        return model

    assert not recognise(make()).fixed_capacity
    assert agrees(make, prefixed)


def test_a_scalar_of_five_dimensions_is_refused() -> None:
    constant = "five = Constant<value = float[1, 1, 1, 1, 1] {0.25}>()\n "
    model = model_of(
        ("s0 = MatMul(qs, kt)", f"{constant}s9 = MatMul(qs, kt)\n s0 = Mul(s9, five)"),
        (MERGED, MERGED.replace("o1 =", "o4 = Squeeze(o, zero_1)\n o1 =").replace("(o)", "(o4)")),
    )

    assert "of rank 5" in reason(model)
