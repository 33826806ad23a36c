"""What only the function bodies can do wrong: runtimes, optimisers, inputs that are left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.site import CODECS, FLOATS, Site
from tests.parity.compare import assert_same_rows, check_attention
from tests.singleop import RUNTIMES, run_ort, run_reference_evaluator
from tq_onnx.codec.rotated import PROD
from tq_onnx.codec.spec import Codec
from tq_onnx.codec.unrotated import Q8_0, UNIFORM
from tq_onnx.ops.operators import Attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def assert_right(site: Site, feeds: Any, results: list[Any], **attributes: Any) -> None:
    output, *presents = results
    assert_same_rows(site, feeds, presents, tie_rate=1.0)
    check_attention(site.element, output, site.attended(feeds, *presents, **attributes))


@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_ALL"])
def test_two_layers_of_other_codecs_in_one_model(level: str, rng: Any) -> None:
    """No level of optimisation makes a branch lose what it captures, or its constants."""
    inner = (Codec(PROD, 4), Codec(UNIFORM, 4))
    sites = (
        Site(FLOATS, FLOATS, others=(inner,), offset_rows=2),
        Site(*inner, others=(inner, (FLOATS, FLOATS)), offset_rows=2),
    )
    models = [site.model() for site in sites]
    fed = [site.feeds(rng, past_length=(4, 1), new=2) for site in sites]
    model = models[0]
    second = onnx.compose.add_prefix(models[1], "b_")
    for node in second.graph.node:
        node.op_type = node.op_type.removeprefix("b_")
    for name in ("node", "initializer", "input", "output", "value_info"):
        getattr(model.graph, name).extend(getattr(second.graph, name))
    feeds = fed[0] | {f"b_{name}": array for name, array in fed[1].items()}
    results = run_ort(model, feeds, getattr(onnxruntime.GraphOptimizationLevel, level))
    for site, feed, own in zip(sites, fed, (results[:3], results[3:]), strict=True):
        assert_right(site, feed, own)


@pytest.mark.parametrize("has_sink", [False, True])
def test_an_input_that_is_left_out_in_the_middle(has_sink: bool, rng: Any) -> None:
    site = Site(offset_rows=2, has_sink=has_sink)
    model = site.model()
    (node,) = [node for node in model.graph.node if node.op_type == Attention.name]
    empty = [
        node.input[each.slot] == "" for each in (Attention.attention_bias, Attention.head_sink)
    ]
    assert empty == [True, not has_sink]
    feeds = site.feeds(rng, past_length=(2,), new=2)
    if has_sink:
        feeds["head_sink"] = rng.standard_normal(4).astype(np.float32)
    for run in RUNTIMES.values():
        assert_right(site, feeds, run(model, feeds))


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_spare_bytes_change_nothing(runtime: str, rng: Any) -> None:
    """They are zero in new rows and behind the cache, kept in old ones, and not read."""
    plain = Site(Codec(Q8_0, 8), Codec(PROD, 3), head_size=40)
    wide = replace(plain, spare_bytes=7)
    feeds = plain.feeds(rng, past_length=(4, 2), new=3, capacity=5)
    wanted = RUNTIMES[runtime](plain.model(), feeds)
    for name in ("past_key", "past_value"):
        feeds[name] = wide.widened(feeds[name])
        feeds[name][..., -7:] = 0xFF
    results = RUNTIMES[runtime](wide.model(), feeds)
    np.testing.assert_array_equal(results[0], wanted[0])
    for got, other in zip(results[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(got[..., :-7], other)
        spare = got[..., -7:]
        assert (spare[0, :, :4] == 0xFF).all()
        assert not spare[0, :, 4:].any()
        assert not spare[1, :, 2:5].any()


@given(
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from([ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16]),
    codecs=st.tuples(st.sampled_from(CODECS), st.sampled_from(CODECS)),
    head_size=st.sampled_from([8, 16, 24, 64, 80]),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    new=st.integers(1, 4),
    room=st.integers(0, 6),
    group=st.integers(1, 3),
    exponent=st.integers(-30, 30),
    causal=st.integers(0, 1),
    window=st.integers(0, 6),
    softcap=st.sampled_from([0.0, 0.5, 30.0]),
)
@settings(max_examples=80)
def test_any_call_of_the_evaluator(
    *, seed: int, dtype: ir.DataType, codecs: Any, exponent: int, **choice: Any
) -> None:
    attributes = {"causal": choice["causal"], "softcap": choice["softcap"]}
    attributes["sliding_window"] = choice["window"]
    heads = 2 * choice["group"]
    site = Site(*codecs, heads=heads, kv_heads=2, head_size=choice["head_size"], dtype=dtype)
    lengths = tuple(choice["lengths"])
    feeds = site.feeds(
        np.random.default_rng(seed),
        past_length=lengths,
        new=choice["new"],
        capacity=max(lengths) + choice["room"],
    )
    model = site.model(**attributes)
    assert_right(site, feeds, run_reference_evaluator(model, feeds), **attributes)
    feeds["key"] = site.rounded(np.ldexp(feeds["key"], exponent))
    _, *presents = run_reference_evaluator(model, feeds)
    assert_same_rows(site, feeds, presents, tie_rate=1.0)
