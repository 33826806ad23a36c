"""Scales from norm weights: they are found, and no score changes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.decoders.onelayer import CACHES, decoder
from tests.decoders.running import EXACT, FIXTURES, Array, Decoder, batch, convert, load, session
from tests.recognise.test_soundness import BODY, MASK, run
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.rotated import LLOYD_MAX
from tq_onnx.codec.spec import Codec
from tq_onnx.conversion.equalise import (
    INT4,
    UNSAFE_NOISE,
    LayerEqualisation,
    LayerNorms,
    find_norms,
    predict,
    score_noise,
)
from tq_onnx.conversion.inspect import inspect
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.rewrite import ConvertPass
from tq_onnx.conversion.scales import adapt
from tq_onnx.graph.nomatch import NoMatch
from tq_onnx.plan import Plan
from tq_onnx.recognise.match import recognise

WEIGHTS = arrays(np.float64, 8, elements=st.floats(0.2, 5))
HALVES = np.arange(8) % 4
"""Pairs (i, i + 4)."""
NO_NORM = "no norm with a weight stands before the query"

WITH_NORMS = sorted(
    path.stem
    for path in FIXTURES.glob("*.onnx")
    if not any(family in path.stem for family in ("llama", "phi3", "gemma2"))
)
RUNNABLE = {
    "dynamo-op18-sdpa": EXACT,
    "dynamo-op18-sdpa-hd128-fp16": 0,
    "legacy-op17-sdpa-fp16": 0,
    "optimum": EXACT,
    "genai-cpu-fp32": EXACT,
    "genai-cuda-fp16": 0,
}
"""Exports with Hugging Face's names, and how far logits may move: not at all in half precision."""


@given(WEIGHTS, WEIGHTS)
def test_scales_are_positive_and_equal_within_pairs(query: Array, key: Array) -> None:
    s = LayerNorms(query, key, HALVES).scales
    assert (s > 0).all() and np.isfinite(s).all()
    assert np.array_equal(s[:4], s[4:])
    # Queries and keys change places.
    assert np.allclose(LayerNorms(key, query, HALVES).scales * s, 1)


@given(WEIGHTS, WEIGHTS, WEIGHTS)
def test_no_other_scales_do_better(query: Array, key: Array, other: Array) -> None:
    pairs = np.tile(np.sqrt(other[:4] * other[4:]), 2)
    s = LayerNorms(query, key, HALVES).scales

    def noise(factor: Array) -> float:
        return score_noise(query * factor, key / factor, 1.0, INT4)

    assert noise(s) <= noise(s * pairs) * (1 + 1e-9)
    energies = [(weights[:4] ** 2 + weights[4:] ** 2) for weights in (query, key)]
    gain = energies[0].sum() * energies[1].sum() / np.sqrt(energies[0] * energies[1]).sum() ** 2
    assert (noise(np.ones(8)) / noise(s)) ** 2 == pytest.approx(gain, rel=1e-6)


@pytest.mark.parametrize("spoilt", [0.0, np.nan, np.inf])
def test_weights_without_energy_are_left_alone(spoilt: float) -> None:
    query, key = np.array([1, 1, 2, 4.0] * 2), np.full(8, 16.0)
    key[[1, 5]] = spoilt
    s = LayerNorms(query, key, HALVES).scales
    assert np.allclose(s, [2, 1, 2**0.5, 1] * 2 / np.sqrt([2, 1, 2, 2] * 2))


def test_noise_is_what_quantised_keys_do() -> None:
    """The formula against the codec itself, on keys of a normalised head with outliers."""
    from tq_onnx.codec import reference
    from tq_onnx.codec.codebook import lloyd_max
    from tq_onnx.codec.rotation import make_rotation

    rng = np.random.default_rng(0)
    weights = np.ones(64)
    weights[[3, 35]] = 20
    query = rng.standard_normal((4000, 64)) / weights
    key = rng.standard_normal((4000, 64)) * weights
    matrix, book = make_rotation("qr", 64, 0, 42), lloyd_max(4, 64)
    decoded = reference.decode(
        reference.encode(key.astype(np.float32), INT4, matrix, book, False), INT4, matrix, book
    )
    found = float(np.std((query * (decoded - key)).sum(axis=-1))) * 0.125
    assert found == pytest.approx(score_noise(1 / weights, weights, 0.125, INT4), rel=0.1)


def with_rotated_keys(plan: Plan) -> Plan:
    """The plan of a model whose caches hold floats, as if its keys were to be equalised."""
    layers = (
        replace(layer, key=replace(layer.key, codec=Codec(LLOYD_MAX, 4))) for layer in plan.layers
    )
    return replace(plan, layers=tuple(layers))


def equalise(model: ir.Model, plan: Plan) -> tuple[LayerEqualisation, ...]:
    """Give a model whose caches hold floats its scales."""
    return adapt(model, with_rotated_keys(plan), Options(), None)[1]


def with_outliers(model: ir.Model, plan: Plan, factor: float = 32) -> None:
    """Gives pairs of every layer large keys and small queries, which no float model notices."""
    for layer in range(len(plan.layers)):
        for role, sign in (("q", -1), ("k", 1)):
            (value,) = (
                value
                for name, value in model.graph.initializers.items()
                if f"{role}_norm" in name and f".{layer}." in name
            )
            weight = np.array(value.const_value.numpy())
            pairs = weight.reshape(-1)
            for channel in (0, 1):
                pairs[[channel, channel + pairs.size // 2]] *= factor**sign
            value.const_value = ir.tensor(weight, name=value.name)


@pytest.mark.parametrize("name", WITH_NORMS)
def test_norms_are_found_in_every_export(name: str) -> None:
    model = load(name)
    plan = convert(model, "raw")
    found = find_norms(model, plan)
    size = plan.layers[0].head_size
    assert len(found) == 2
    for norms in found:
        assert isinstance(norms, LayerNorms), norms
        assert np.array_equal(norms.pairs, np.arange(size) % (size // 2))
        assert norms.query.shape == norms.key.shape == (size,)


@pytest.mark.parametrize("name", ["genai-cuda-fp16", "hf-static-decode", "dynamo-llama"])
def test_what_will_be_found_is_foreseen(name: str) -> None:
    path = FIXTURES / f"{name}.onnx"
    before = path.read_bytes()
    foreseen = inspect(path).equalisation
    assert path.read_bytes() == before
    for preset in ("raw", "int4"):
        model = load(name)
        plan = convert(model, preset)
        pairs = zip(find_norms(model, plan), plan.layers, strict=True)
        assert foreseen == tuple(predict(norms, layer, INT4) for norms, layer in pairs)


@pytest.mark.parametrize("name", ["dynamo-llama", "dynamo-phi3", "dynamo-gemma2"])
def test_models_without_norms_are_left_alone(name: str) -> None:
    model = load(name)
    plan = convert(model, "raw")
    found = find_norms(model, plan)
    assert all(isinstance(miss, NoMatch) and miss.reason == NO_NORM for miss in found)
    nodes, weights = len(model.graph), set(model.graph.initializers)
    (first, _) = equalise(model, plan)
    assert first == LayerEqualisation(0, False, NO_NORM)
    assert (nodes, weights) == (len(model.graph), set(model.graph.initializers))


@pytest.mark.parametrize(("name", "tolerance"), RUNNABLE.items())
def test_logits_stay_as_they_were(name: str, tolerance: float) -> None:
    model = load(name)
    plan = convert(model, "raw")
    with_outliers(model, plan)
    data, size = batch(12), plan.layers[0].head_size
    expected = Decoder(session(model), head_size=size).run(data)
    report = equalise(model, plan)
    scales = {"tq.query_scale.0", "tq.key_scale.0", "tq.query_scale.1", "tq.key_scale.1"}
    assert scales <= {*model.graph.initializers}
    running = Decoder(session(model), head_size=size)
    found = running.run(data)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()
    for layer in report:
        assert layer.scaled and layer.gain is not None and layer.gain > 10
        assert layer.noise_before is not None and layer.noise_after is not None
        assert layer.noise_after == pytest.approx(layer.noise_before / layer.gain**0.5)
        assert layer.noise_after < UNSAFE_NOISE < layer.noise_before
        assert not layer.unsafe


def test_norms_are_found_where_attention_reads_new_keys_exactly() -> None:
    model = load("dynamo-op18-sdpa")
    recognition = recognise(model)
    plan = make_plan(recognition, PRESETS["int4"], Options(residual_length=8))
    ConvertPass(plan, recognition)(model)
    with_outliers(model, plan)
    assert all(layer.gain is not None and layer.gain > 10 for layer in equalise(model, plan))


def test_keys_that_are_not_rotated_are_left_alone() -> None:
    model = load("genai-cpu-fp32")
    plan = convert(model, "raw")
    before = {name: id(value) for name, value in model.graph.initializers.items()}
    plain, report = adapt(model, plan, Options(), None)
    assert report == (LayerEqualisation(0, False, ""), LayerEqualisation(1, False, ""))
    assert plain == plan
    assert before == {name: id(value) for name, value in model.graph.initializers.items()}
    norms, layer = find_norms(model, plan)[0], plan.layers[0]
    first, coarser = (predict(norms, layer, Codec(LLOYD_MAX, bits)) for bits in (4, 3))
    assert first.scaled
    assert coarser.noise_before is not None and first.noise_before is not None
    assert coarser.noise_before == pytest.approx(1.9 * first.noise_before, rel=0.03)


NORM = """sq_X = Mul(qkX, qkX)
        last_X = Constant<value_ints = [-1]>()
        mean_X = ReduceMean<keepdims = 1>(sq_X, last_X)
        root_X = Sqrt(mean_X)
        unit_X = Div(qkX, root_X)
        n_X = Mul(unit_X, weight_X)
"""
POSITIONS = """p_new = Shape<start = 1, end = 2>(input_ids)
        p_old = Shape<start = 2, end = 3>(past_key)
        p_new0 = Squeeze(p_new)
        p_steps = Range(zero, p_new0, step)
        p_row = Add(p_steps, p_old)
"""
ANGLES = """p_float = Cast<to = 1>(p_row)
        p_column = Unsqueeze(p_float, one)
        few = Constant<value_floats = [0.3, 0.7, 1.1, 0.2, 0.9, 1.3, 0.4, 0.6]>()
        angles = Mul(p_column, few)
        cos_h = Cos(angles)
        sin_h = Sin(angles)
        cos = Concat<axis = -1>(cos_h, cos_h)
        sin = Concat<axis = -1>(sin_h, sin_h)
"""
ROPE_HALVES = """lo_X, hi_X = Split<axis = -1, num_outputs = 2>(n_X)
        neg_X = Neg(hi_X)
        turned_X = Concat<axis = -1>(neg_X, lo_X)
        straight_X = Mul(n_X, cos)
        across_X = Mul(turned_X, sin)
        r_X = Add(straight_X, across_X)
"""
ROPE_INTERLEAVED = """s_X = Constant<value_ints = [0]>()
        s1_X = Constant<value_ints = [1]>()
        e_X = Constant<value_ints = [1000]>()
        a_X = Constant<value_ints = [3]>()
        st_X = Constant<value_ints = [2]>()
        even_X = Slice(n_X, s_X, e_X, a_X, st_X)
        odd_X = Slice(n_X, s1_X, e_X, a_X, st_X)
        neg_X = Neg(odd_X)
        l_X = Constant<value_ints = [4]>()
        ne_X = Unsqueeze(neg_X, l_X)
        ev_X = Unsqueeze(even_X, l_X)
        stack_X = Concat<axis = -1>(ne_X, ev_X)
        turned_X = Reshape(stack_X, SHAPE)
        straight_X = Mul(n_X, cos)
        across_X = Mul(turned_X, sin)
        r_X = Add(straight_X, across_X)
"""
ROPE_PARTIAL = """sizes_X = Constant<value_ints = [8, 8]>()
        some_X, rest_X = Split<axis = -1>(n_X, sizes_X)
        lo_X, hi_X = Split<axis = -1, num_outputs = 2>(some_X)
        neg_X = Neg(hi_X)
        turned_X = Concat<axis = -1>(neg_X, lo_X)
        straight_X = Mul(some_X, cos_h)
        across_X = Mul(turned_X, sin_h)
        part_X = Add(straight_X, across_X)
        r_X = Concat<axis = -1>(part_X, rest_X)
"""
NO_ROPE = "r_X = Identity(n_X)\n"


def normed(rope: str, norm: str = NORM, table: str = "") -> str:
    """The one-layer decoder with norms of queries and keys, and a rotation."""
    body = BODY.replace("Mul(q, quarter)", "Mul(r_q, quarter)").replace("key, k)", "key, r_k)")
    made = [POSITIONS, ANGLES, table]
    for role in "qk":
        text = (norm + rope).replace("qkX", role).replace("_X", f"_{role}")
        turned = f"shape_{role}"
        if "SHAPE" in text:
            text = f"{turned} = Shape({role})\n" + text.replace("SHAPE", turned)
        made.append(text)
    return "\n".join(made) + body


def one_layer(body: str, *, inputs: str = MASK, seed: int = 5) -> ir.Model:
    rng = np.random.default_rng(seed)
    numbers = {role: np.exp(rng.normal(0, 1.5, 16)).round(4) for role in "qk"}
    text = "\n".join(
        f"weight_{role} = Constant<value = float[16] {{{', '.join(map(str, array))}}}>()"
        for role, array in numbers.items()
    )
    return decoder(text + "\n" + body, inputs=inputs + CACHES)


def pairs_of(model: ir.Model) -> list[int]:
    copy = model.clone()
    (norms,) = find_norms(copy, convert(copy, "raw"))
    assert isinstance(norms, LayerNorms), norms
    return norms.pairs.tolist()


PAIRS = {
    ROPE_HALVES: [0, 1, 2, 3, 4, 5, 6, 7] * 2,
    ROPE_INTERLEAVED: [index // 2 * 2 for index in range(16)],
    ROPE_PARTIAL: [0, 1, 2, 3, 0, 1, 2, 3, *range(8, 16)],
    NO_ROPE: [*range(16)],
}
IDS = ["halves", "interleaved", "partial", "none"]


@pytest.mark.parametrize(("rope", "groups"), PAIRS.items(), ids=IDS)
def test_pairs_are_told_by_the_graph(rope: str, groups: list[int]) -> None:
    make = partial(one_layer, normed(rope))
    assert pairs_of(make()) == groups
    expected = run(make())
    model = make()
    (report,) = equalise(model, convert(model, "raw"))
    assert report.scaled and report.gain is not None and report.gain > 1.2
    assert np.abs(run(model) - expected).max() <= EXACT * np.abs(expected).max()


def operator(interleaved: int, width: int) -> str:
    """A RotaryEmbedding of onnxruntime over the first coordinates of a head."""
    partly = f", rotary_embedding_dim = {width}, num_heads = 2" if width < 16 else ""
    return f"""r_X = com.microsoft.RotaryEmbedding<interleaved = {interleaved}{partly}>(
            n_X, positions, cos_t, sin_t)
"""


def table(width: int) -> str:
    return f"""rows = Constant<value_floats = [{", ".join(f"{index}.0" for index in range(32))}]>()
        rows2 = Unsqueeze(rows, one)
        steps_t = Constant<value_floats = [{", ".join(f"0.{n + 1}" for n in range(width // 2))}]>()
        table_t = Mul(rows2, steps_t)
        cos_t = Cos(table_t)
        sin_t = Sin(table_t)
        p_batch = Shape(input_ids)
        positions = Expand(p_row, p_batch)
"""


@pytest.mark.parametrize(
    ("interleaved", "width", "groups"),
    [
        (0, 16, PAIRS[ROPE_HALVES]),
        (1, 16, PAIRS[ROPE_INTERLEAVED]),
        (0, 8, PAIRS[ROPE_PARTIAL]),
        (1, 8, [0, 0, 2, 2, 4, 4, 6, 6, *range(8, 16)]),
    ],
)
def test_pairs_of_the_operator(interleaved: int, width: int, groups: list[int]) -> None:
    make = partial(one_layer, normed(operator(interleaved, width), table=table(width)))
    assert pairs_of(make()) == groups
    expected, model = run(make()), make()
    (report,) = equalise(model, convert(model, "raw"))
    assert report.scaled
    assert np.abs(run(model) - expected).max() <= EXACT * np.abs(expected).max()


def why(model: ir.Model) -> str:
    plan = convert(model, "raw")
    (norms,) = find_norms(model, plan)
    nodes = [(node.name, *node.inputs) for node in model.graph]
    equalise(model, plan)
    assert isinstance(norms, LayerNorms) or nodes == [(n.name, *n.inputs) for n in model.graph]
    return norms.reason if isinstance(norms, NoMatch) else ""


def changed(*pairs: tuple[str, str]) -> str:
    body = normed(ROPE_HALVES)
    for old, new in pairs:
        assert body.count(old) == 1, old
        body = body.replace(old, new)
    return body


def test_the_layer_that_all_others_differ_from() -> None:
    assert not why(one_layer(changed()))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "n_k = Mul(unit_k, weight_k)",
            "n0_k = Mul(unit_k, weight_k)\n n_k = Tanh(n0_k)",
            "no norm with a weight stands before the key",
        ),
        (
            "unit_k = Div(k, root_k)",
            "unit_k = Tanh(k)",
            "no norm with a weight stands before the key",
        ),
        (
            "n_k = Mul(unit_k, weight_k)",
            "other_k = Mul(unit_k, weight_k)\n n0_k = Mul(unit_k, weight_k)\n"
            "n_k = Add(other_k, n0_k)",
            "more than one norm stands before the key",
        ),
        (
            "mean_q = ReduceMean<keepdims = 1>(sq_q, last_q)",
            "mean_q = ReduceMean<keepdims = 1>(sq_q, one)",
            NO_NORM,
        ),
    ],
)
def test_what_is_no_norm_of_a_head_is_left_alone(old: str, new: str, reason: str) -> None:
    assert why(one_layer(changed((old, new)))) == reason


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "n_q = Mul(unit_q, weight_q)",
            "n0_q = Mul(unit_q, weight_q)\n n_q = Add(n0_q, weight_k)",
        ),
        ("n_k = Mul(unit_k, weight_k)", "n0_k = Mul(unit_k, weight_k)\n n_k = Mul(n0_k, n0_k)"),
        ("across_k = Mul(turned_k, sin)", "across_k = Mul(turned_k, n_k)"),
        (
            "o1 = Transpose<perm = [0, 2, 1, 3]>(o)",
            "more = Add(o, n_q)\n o1 = Transpose<perm = [0, 2, 1, 3]>(more)",
        ),
    ],
)
def test_whatever_else_a_graph_does_with_them_no_score_changes(old: str, new: str) -> None:
    """Weights tell less there than they seem to."""
    make = partial(one_layer, changed((old, new)))
    expected, model = run(make()), make()
    (report,) = equalise(model, convert(model, "raw"))
    assert report.scaled
    assert np.abs(run(model) - expected).max() <= EXACT * np.abs(expected).max()


def test_a_weight_that_a_user_may_give_is_left_alone() -> None:
    body = changed(("Mul(unit_q, weight_q)", "Mul(unit_q, given)"))
    model = one_layer(body, inputs=MASK + "float[16] given, ")
    assert why(model) == "no norm with a weight stands before the query"


def test_a_norm_with_a_bias_is_left_alone() -> None:
    body = changed(
        ("n_q = Mul(unit_q, weight_q)", "n_q = LayerNormalization(q, weight_q, weight_k)")
    )
    assert why(one_layer(body)) == "no norm with a weight stands before the query"
    body = changed(("n_q = Mul(unit_q, weight_q)", "n_q = LayerNormalization(q, weight_q)"))
    make = partial(one_layer, body)
    expected, model = run(make()), make()
    (report,) = equalise(model, convert(model, "raw"))
    assert report.scaled
    assert np.abs(run(model) - expected).max() <= EXACT * np.abs(expected).max()


@pytest.mark.parametrize(
    "weight",
    [
        "w_k1 = Add(quarter, weight_k)",
        "w_h = Cast<to = 10>(weight_k)\n w_k1 = Cast<to = 1>(w_h)",
        "w_4 = Unsqueeze(weight_k, first_two)\n w_k1 = Neg(w_4)\n",
    ],
)
def test_weights_that_the_graph_makes_of_others(weight: str) -> None:
    """As Gemma's 1 + weight. A negated weight is a node too many."""
    body = changed(("n_k = Mul(unit_k, weight_k)", f"{weight}\n n_k = Mul(unit_k, w_k1)"))
    make = partial(one_layer, body)
    expected, model = run(make()), make()
    (report,) = equalise(model, convert(model, "raw"))
    assert report.scaled == ("Neg" not in weight)
    assert np.abs(run(model) - expected).max() <= EXACT * np.abs(expected).max()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("hf-decode", "hf-prefill"),
        ("hf-decode", "hf-ortcpu-prefill"),
        ("hf-ortcuda-decode", "hf-ortcuda-prefill"),
        ("hf-static-decode", "hf-static-prefill"),
    ],
)
def test_graphs_that_share_caches_get_the_same_scales(one: str, other: str) -> None:
    """One graph reads the first prompt, the other goes on with its caches."""
    found = []
    for name in (one, other):
        model = load(name)
        plan = convert(model, "raw")
        with_outliers(model, plan)
        norms = find_norms(model, plan)
        found.append([layer.scales for layer in norms if isinstance(layer, LayerNorms)])
    assert len(found[0]) == len(found[1]) == 2
    assert np.array_equal(found[0], found[1])
    assert np.ptp(found[0]) > 1
