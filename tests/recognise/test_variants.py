"""Properties of recognition: every form of a layer is found or refused, a broken one never passes.

Forms that compute attention (``variants``) are all found, with the right numbers, and convert to
what the original computes. A layer in which one thing is broken is refused by its number, and so is
the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.decoders.running import DECOMPOSED, EXACT, Decoder, batch, convert, load, session
from tests.decoders.synthetic import KEYS, PRODUCT, REPEAT, decoder
from tests.recognise.variants import SCALE, TURNED_FLAT, Variant, variants
from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.planning import make_plan
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.recognise.leftovers import NearMiss
from tq_onnx.recognise.match import recognise
from tq_onnx.recognise.site import Site

LAYERS = 3
RELAXED = (HealthCheck.too_slow, HealthCheck.data_too_large)


def check_facts(variant: Variant, model: ir.Model) -> None:
    recognition = recognise(model)

    assert recognition.misses == ()
    assert [site.layer for site in recognition.sites] == [0, 1]
    for site in recognition.sites:
        assert (site.num_heads, site.kv_num_heads) == (variant.arguments["heads"], 2)
        assert site.head_size == 16
        assert site.scale == pytest.approx(SCALE)
        assert site.softcap == pytest.approx(variant.softcap)
        assert site.has_bias == variant.masked


@settings(max_examples=60, suppress_health_check=RELAXED)
@given(variant=variants())
def test_every_form_is_found(variant: Variant) -> None:
    check_facts(variant, decoder(**variant.arguments))


@settings(max_examples=8, suppress_health_check=RELAXED)
@given(variant=variants(), seed=st.integers(0, 2**32))
def test_a_form_computes_what_it_did(variant: Variant, seed: int) -> None:
    data = batch(6, 2, left_padding=1, seed=seed)
    original, converted = decoder(**variant.arguments), decoder(**variant.arguments)
    convert(converted, "raw")

    expected = Decoder(session(original), 2).run(data, (4, 1, 1))[data.real]
    found = Decoder(session(converted), 2).run(data, (4, 1, 1))[data.real]

    # A mask in half precision hides with -65504 instead of -3e38; nothing else is as rough.
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


WEAVE = "\n        o3 = Mul(o2, kz)\n        x_out = Add(x, o3)"
BROKEN: dict[str, tuple[str, str]] = {
    "scores rectified": ("s1 = Identity(s0)", "s1 = Relu(s0)"),
    "scores clipped": ("s1 = Identity(s0)", "s1 = Clip(s0, lowest, half)"),
    "scores rounded to integers": (
        "s1 = Identity(s0)",
        "si = Cast<to = 7>(s0)\n        s1 = Cast<to = 1>(si)",
    ),
    "scores shifted by themselves": ("s1 = Identity(s0)", "s1 = Add(s0, s0)"),
    "two tangents": ("s1 = Identity(s0)", "sa = Tanh(s0)\n        s1 = Tanh(sa)"),
    "a tangent after the mask": (
        "p0 = Softmax<axis = -1>(s2)",
        "s3 = Tanh(s2)\n        p0 = Softmax<axis = -1>(s3)",
    ),
    "softmax over the queries": ("Softmax<axis = -1>", "Softmax<axis = 2>"),
    "softmax over the heads": ("Softmax<axis = -1>", "Softmax<axis = 1>"),
    "two softmaxes": (
        "p = Identity(p0)",
        "p = Softmax<axis = -1>(p0)",
    ),
    "softmax spelled out": (
        "p0 = Softmax<axis = -1>(s2)",
        "pe = Exp(s2)\n        ps = ReduceSum(pe, three)\n        p0 = Div(pe, ps)",
    ),
    "the logarithm of a softmax": ("p0 = Softmax", "p0 = LogSoftmax"),
    "probabilities rectified": ("p = Identity(p0)", "p = Relu(p0)"),
    "probabilities scaled": ("p = Identity(p0)", "p = Mul(p0, half)"),
    "probabilities dropped in training": (
        "p = Identity(p0)",
        "on = Constant<value = bool {1}>()\n        p = Dropout(p0, half, on)",
    ),
    "a guard that puts in another number": (
        "p = Identity(p0)",
        "pn = IsNaN(p0)\n        p = Where(pn, half, p0)",
    ),
    "a guard of something else": (
        "p = Identity(p0)",
        "pn = IsNaN(s2)\n        p = Where(pn, nothing, p0)",
    ),
    "scale that is computed": (
        "s1 = Identity(s0)",
        "sm = ReduceMax<keepdims = 0>(q)\n        s1 = Mul(s0, sm)",
    ),
    "scale for each head": (
        "s1 = Identity(s0)",
        "sh = Constant<value = float[1, 4, 1, 1] {1.0, 2.0, 1.0, 1.0}>()\n        s1 = Mul(s0, sh)",
    ),
    "scale of zero": ("s1 = Identity(s0)", "s1 = Mul(s0, nothing)"),
    "turned over after the mask": (
        "p0 = Softmax<axis = -1>(s2)",
        "less = Neg(half)\n        s3 = Mul(s2, less)\n        p0 = Softmax<axis = -1>(s3)",
    ),
    "a reciprocal of the scores": ("s1 = Identity(s0)", "s1 = Div(half, s0)"),
    "mask subtracted": ("s2 = Add(s1, bias)", "s2 = Sub(s1, bias)"),
    "mask multiplied": ("s2 = Add(s1, bias)", "s2 = Mul(s1, bias)"),
    "mask that hides nothing": ("s2 = Add(s1, bias)", "s2 = Where(keep, s1, half)"),
    "scores as the condition": (
        "s2 = Add(s1, bias)",
        "sb = Cast<to = 9>(s1)\n        s2 = Where(sb, bias, lowest)",
    ),
    "new rows before old": ("Concat<axis = -2>(past_key, k)", "Concat<axis = -2>(k, past_key)"),
    "new values before old": (
        "Concat<axis = 2>(past_value, v)",
        "Concat<axis = 2>(v, past_value)",
    ),
    "past changed before": (
        "Concat<axis = -2>(past_key, k)",
        "Concat<axis = -2>(pa, k)\n        ",
    ),
    "cached along another axis": (
        "Concat<axis = -2>(past_key, k)",
        "Concat<axis = 1>(past_key, k)",
    ),
    "past rounded before": ("Concat<axis = -2>(past_key, k)", "Concat<axis = -2>(pr, k)"),
    "rows cached twice": ("Concat<axis = -2>(past_key, k)", "Concat<axis = -2>(past_key, k, k)"),
    "keys for values too": ("Unsqueeze(present_value, two)", "Unsqueeze(present_key, two)"),
    "values for keys too": ("Unsqueeze(present_key, two)", "Unsqueeze(present_value, two)"),
    "keys rectified": (KEYS, "ka = Relu(kr)\n        " + KEYS.replace("(kr)", "(ka)")),
    "keys scaled by dimension": (
        KEYS,
        "kc = Constant<value = float[4] {1.0, 2.0, 1.0, 1.0}>()\n        kd = Tile(kc, expand_four)"
        "\n        ka = Mul(kr, kd)\n        " + KEYS.replace("(kr)", "(ka)"),
    ),
    "values scaled": ("o = MatMul(p, vr)", "vs = Mul(vr, half)\n        o = MatMul(p, vs)"),
    "keys made integers": (
        KEYS,
        "ki = Cast<to = 7>(kr)\n        ka = Cast<to = 1>(ki)\n        " + KEYS.replace("kr", "ka"),
    ),
    "keys turned otherwise": ("perm = [0, 1, 3, 2]", "perm = [0, 2, 3, 1]"),
    "keys not turned": ("perm = [0, 1, 3, 2]", "perm = [0, 1, 2, 3]"),
    "keys flattened otherwise": (
        KEYS,
        TURNED_FLAT.replace("KR", "kr").replace("rest, kl, sixteen", "nought, rest, sixteen"),
    ),
    "heads repeated in another order": (
        "Unsqueeze(present_key, two)",
        "Unsqueeze(present_key, one)",
    ),
    "heads tiled": (
        REPEAT.splitlines()[2].strip(),
        "kc = Constant<value_ints = [1, 2, 1, 1]>()\n        kr = Tile(present_key, kc)",
    ),
    "tokens and heads exchanged": (
        "kr = Reshape(ke, repeated)",
        "kc = Constant<value_ints = [0, 4, -1, 16]>()"
        "\n        kz = Transpose<perm = [0, 3, 2, 1, 4]>(ke)"
        "\n        kr = Reshape(kz, kc)",
    ),
    "only the last keys": (
        "Unsqueeze(present_key, two)",
        "Unsqueeze(kq, two)",
    ),
    "product the other way round": (PRODUCT, "s0 = MatMul(kt, qs)"),
    "fused product of the turned query": (
        PRODUCT,
        "s0 = com.microsoft.FusedMatMul<transA = 1>(qs, kt)",
    ),
    "result of a fused product scaled": (
        "o = MatMul(p, vr)",
        "o = com.microsoft.FusedMatMul<alpha = 0.5>(p, vr)",
    ),
    "sum over other letters": (PRODUCT, 's0 = Einsum<equation = "bhtd,bgds->bhts">(qs, kt)'),
    "another reader of the keys": (
        "x_out = Add(x, o2)",
        "kz = ReduceSum<keepdims = 0>(present_key)" + WEAVE,
    ),
    "another reader of the past": (
        "x_out = Add(x, o2)",
        "kz = ReduceSum<keepdims = 0>(past_value)" + WEAVE,
    ),
    "another reader of the scores": (
        "x_out = Add(x, o2)",
        "kz = ReduceMax<keepdims = 0>(s1)" + WEAVE,
    ),
    "another reader of the probabilities": (
        "x_out = Add(x, o2)",
        "kz = ReduceMax<keepdims = 0>(p)" + WEAVE,
    ),
}
BEFORE = {
    "past changed before": ("present_key = ", "pa = Relu(past_key)\n        present_key = "),
    "past rounded before": (
        "present_key = ",
        "ph = Cast<to = 10>(past_key)\n        pr = Cast<to = 1>(ph)\n        present_key = ",
    ),
    "only the last keys": (
        "ku = ",
        "kq = Slice(present_key, one, all_heads, two)\n        ku = ",
    ),
    "keys scaled by dimension": (
        "kc = ",
        "expand_four = Constant<value_ints = [4]>()\n        kc = ",
    ),
}
"""What a breakage needs before it."""


REASONS = {
    "new rows before old": "does not continue a graph input",
    "past changed before": "does not continue a graph input",
    "heads repeated in another order": "not a known way to repeat heads",
    "cached along another axis": "grows along its second",
    "past rounded before": "rounds what attention reads",
    "probabilities rectified": "probabilities go into Relu",
    "softmax spelled out": "the scores go through Exp",
    "scale that is computed": "multiplied by something not constant",
    "another reader of the keys": "read more than once, by Unsqueeze, ReduceSum",
    "another reader of the past": "also read by ReduceSum",
    "keys made integers": "goes into Cast",
    "keys rectified": "goes into Relu",
    "values scaled": "values are scaled",
    "scores rectified": "go through Relu",
    "turned over after the mask": "turned over after the mask",
    "mask that hides nothing": "does not hide a key",
}
"""What is said of some of them."""


def refused(model: ir.Model) -> tuple[NearMiss, ...]:
    """Why a model is refused; nothing of it can be converted then."""
    recognition = recognise(model)
    if recognition.misses:
        with pytest.raises(UnsupportedModelError):
            make_plan(recognition, PRESETS["raw"])
    return recognition.misses


@pytest.mark.parametrize("breakage", BROKEN)
def test_one_broken_layer_is_refused_by_its_number(breakage: str) -> None:
    layer = sorted(BROKEN).index(breakage) % LAYERS
    changes = [BROKEN[breakage], *([BEFORE[breakage]] if breakage in BEFORE else [])]
    model = decoder(layers=LAYERS, infer=False, broken=layer, breakage=changes)

    misses = refused(model)

    assert misses
    assert {miss.layer for miss in misses} == {layer}
    assert all(miss.node and miss.reason for miss in misses)
    assert REASONS.get(breakage, "") in str(misses[0])


def test_caches_that_have_exchanged_their_names_are_found() -> None:
    exchanged = [
        ("Unsqueeze(present_key, two)", "Unsqueeze(HERE, two)"),
        ("Unsqueeze(present_value, two)", "Unsqueeze(present_key, two)"),
        ("HERE", "present_value"),
    ]
    recognition = recognise(decoder(layers=LAYERS, infer=False, broken=1, breakage=exchanged))

    assert recognition.misses == ()
    assert recognition.sites[1].key.present.name == "present.1.value"
    assert recognition.sites[0].key.present.name == "present.0.key"


def attention_nodes(site: Site) -> list[ir.Node]:
    """All nodes between a layer's caches and its result that compute with floats."""
    after: set[ir.Node] = set()
    pending = [cache.present for cache in (site.key, site.value)]
    pending += [view for cache in (site.key, site.value) for view in cache.views]
    pending = [value for value in pending if value.producer() is not None]
    while pending:
        for use in pending.pop().uses():
            if use.node.op_type != "Shape" and use.node not in after:
                after.add(use.node)
                pending += use.node.outputs
    before: set[ir.Node] = set()
    pending = [site.output]
    while pending:
        node = pending.pop().producer()
        if node is not None and node not in before:
            before.add(node)
            pending += [value for value in node.inputs if value is not None]
    return [
        node
        for node in site.node.graph or ()
        if node in after
        and node in before
        and node.outputs[0] is not site.output
        and node.outputs[0].dtype is not None
        and node.outputs[0].dtype.is_floating_point()
    ]


def insert(node: ir.Node, op_type: str) -> None:
    """Puts an operator between a node and all its readers."""
    output = node.outputs[0]
    readers = list(output.uses())
    extra = ir.node(op_type, [output], name="inserted")
    extra.outputs[0].name, extra.outputs[0].type = "inserted", output.type
    extra.outputs[0].shape = output.shape
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    graph.insert_after(node, extra)
    for use in readers:
        use.node.replace_input_with(use.idx, extra.outputs[0])


def exchange_inputs(node: ir.Node) -> None:
    first, second = node.inputs[:2]
    node.replace_input_with(0, second)
    node.replace_input_with(1, first)


@settings(max_examples=40, suppress_health_check=RELAXED)
@given(
    name=st.sampled_from(DECOMPOSED),
    layer=st.integers(0, 1),
    op_type=st.sampled_from(["Neg", "Relu", "Exp", "Floor", "Sigmoid"]),
    seed=st.integers(0, 2**32),
)
def test_one_more_operator_in_a_real_export_is_refused(
    name: str, layer: int, op_type: str, seed: int
) -> None:
    model = load(name)
    nodes = attention_nodes(recognise(model).sites[layer])
    assert len(nodes) >= 4
    insert(random.Random(seed).choice(nodes), op_type)

    assert layer in {miss.layer for miss in refused(model)}


CHANGES: dict[str, tuple[str, Callable[[ir.Node], None]]] = {
    "another axis": (
        "Softmax",
        lambda node: node.attributes.__setitem__("axis", ir.AttrInt64("axis", 1)),
    ),
    "operands exchanged": ("MatMul", exchange_inputs),
    "turned in another way": (
        "Transpose",
        lambda node: node.attributes.__setitem__(
            "perm",
            ir.AttrInt64s("perm", [*range(len(node.attributes["perm"].as_ints()))]),
        ),
    ),
    "another axis of the cache": (
        "Concat",
        lambda node: node.attributes.__setitem__("axis", ir.AttrInt64("axis", 1)),
    ),
    "old after new": ("Concat", exchange_inputs),
}


@pytest.mark.parametrize("name", DECOMPOSED)
@pytest.mark.parametrize("change", CHANGES)
def test_one_change_in_a_real_export_is_refused(name: str, change: str) -> None:
    model = load(name)
    op_type, apply = CHANGES[change]
    site = recognise(model).sites[1]
    candidates = [node for node in attention_nodes(site) if node.op_type == op_type]
    if op_type == "Concat":
        candidates = [site.key.node]
    elif op_type == "MatMul":
        candidates = [site.node]
    assert candidates
    apply(candidates[0])

    assert {miss.layer for miss in refused(model)} == {1}


def test_noise_is_far_below_what_a_mistake_shows() -> None:
    """The twin of the comparisons: a slightly wrong scale is seen."""
    data = batch(6)
    original, converted = decoder(), decoder()
    convert(converted, "raw")
    for node in converted.graph:
        if "scale" in node.attributes:
            scale = node.attributes.get_float("scale") * 1.01
            node.attributes["scale"] = ir.AttrFloat32("scale", scale)
    expected = Decoder(session(original)).run(data, (4, 1, 1))
    found = Decoder(session(converted)).run(data, (4, 1, 1))

    assert np.abs(found - expected).max() > 100 * EXACT * np.abs(expected).max()
