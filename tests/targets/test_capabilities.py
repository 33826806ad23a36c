"""Every target against every feature, codec, element type and head size: taken, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.decoders.running import load
from tq_onnx.codec.elements import ELEMENTS
from tq_onnx.codec.presets import PRESETS
from tq_onnx.codec.spec import CODECS, Codec, row_layout
from tq_onnx.conversion.planning import make_plan
from tq_onnx.conversion.target import Target
from tq_onnx.errors import TqOnnxError, UnsupportedModelError, UsageError
from tq_onnx.ops import features as rows
from tq_onnx.ops.features import FEATURES, Feature
from tq_onnx.plan import CachePair, LayerPlan, Plan
from tq_onnx.recognise.match import recognise
from tq_onnx.targets.registry import TARGETS

PLAN = make_plan(recognise(load("dynamo-op18-sdpa")), PRESETS["mse4"])
"""Of a model with head size 64 in float32, which every target takes."""
targets = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))


def layered(**facts: Any) -> Callable[[Plan], Plan]:
    """Changes the last layer of a plan."""

    def change(plan: Plan) -> Plan:
        return replace(plan, layers=(*plan.layers[:-1], replace(plan.layers[-1], **facts)))

    return change


def cached(role: str, **facts: Any) -> Callable[[Plan], Plan]:
    """Changes a cache of the last layer."""

    def change(plan: Plan) -> Plan:
        cache = getattr(plan.layers[-1], role)
        return layered(**{role: replace(cache, **facts)})(plan)

    return change


def all_cached(codec: Codec, plan: Plan | None = None) -> Plan:
    plan = plan or PLAN
    width = row_layout(codec, plan.layers[0].head_size).row_bytes
    layers = (layer.with_caches(codec=codec, row_bytes=width) for layer in plan.layers)
    return replace(plan, layers=tuple(layers))


STATE = replace(PLAN.interface, states=(CachePair("past_state", "present_state"),))
HAVING: dict[Feature, Callable[[Plan], Plan]] = {
    rows.ATTENTION_BIAS: layered(has_bias=True),
    rows.HEAD_SINK: layered(has_sink=True),
    rows.SLIDING_WINDOW: layered(sliding_window=6),
    rows.SOFTCAP: layered(softcap=20.0),
    rows.LEFT_PADDING: layered(has_padding=True),
    rows.NARROW_VALUES: cached("value", size=48),
    rows.SHARED_CACHES: layered(readers=2),
    rows.FIRST_PROMPT: cached("key", past=None),
    rows.STATES: lambda plan: replace(plan, interface=STATE),
    rows.MIXED_CODECS: cached("key", codec=Codec("lloyd_max", 3), row_bytes=26),
    rows.ROW_WIDTH: cached("key", row_bytes=40),
    rows.GAINS: lambda plan: replace(plan, gains=16),
    rows.FEEDBACK: cached("key", feedback=True),
    rows.OFFSETS: layered(centered=True),
    rows.ROTARY_OFFSETS: cached("key", rotary=True),
    rows.EXACT_WINDOW: lambda plan: replace(plan, recent=8, overlay_rows=32),
    rows.SPARE_ROWS: lambda plan: replace(plan, recent=8),
    rows.PLANES: lambda plan: replace(plan, planes=True),
    rows.PAGES: lambda plan: replace(plan, block_size=128),
}
"""Plans that have a feature."""


def refusal(target: Target, plan: Plan) -> TqOnnxError | None:
    nodes = {layer.layer: f"attention_{layer.layer}" for layer in plan.layers}
    try:
        target.capabilities.expect(target.name, plan, nodes)
    except (UsageError, UnsupportedModelError) as error:
        return error
    return None


def plan_of(target: Target) -> Plan:
    """A plan that the target takes."""
    codecs = target.capabilities.codecs
    return PLAN if PLAN.layers[0].key.codec in codecs else all_cached(next(iter(codecs)))


@targets
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_is_taken_or_refused(target: Target, feature: Feature) -> None:
    usual = plan_of(target)
    assert refusal(target, usual) is None
    plan = HAVING[feature](usual)
    if feature is rows.PLANES and target.capabilities.in_planes:
        assert refusal(target, plan) is not None  # of another codec
        (codec,) = target.capabilities.in_planes
        plan = all_cached(codec, plan)
    if feature.needs in target.capabilities.lacking and feature.needs.layers(plan):
        feature = feature.needs  # refused before it
    if not feature.layers(plan):
        return  # no caches that the target takes have it
    (*_, layer) = feature.layers(plan)
    error = refusal(target, plan)
    if feature in target.capabilities.features:
        assert error is None
        return
    assert error is not None
    assert isinstance(error, UsageError) == bool(feature.options)
    first: LayerPlan = feature.layers(plan)[0]
    assert error.where == f"layer {first.layer} (node attention_{first.layer})"
    noun = feature.noun.format(feature.value(layer, plan))
    assert error.what.startswith(f"the target {target.name} has no {target.capabilities.means} for")
    assert noun in error.what
    assert feature.way_out in error.fix


@targets
def test_codecs_types_and_sizes_are_taken_or_refused(target: Target) -> None:
    for codec in CODECS:
        error = refusal(target, all_cached(codec))
        taken = codec in target.capabilities.codecs
        assert taken or (error is not None and f"for caches of {codec}, only for" in error.what)
    for element in ELEMENTS:
        error = refusal(target, layered(dtype=element)(plan_of(target)))
        assert (error is None) == (element in target.capabilities.elements)
        assert error is None or f"element type {element.lower()}" in str(error)
    sizes = target.capabilities.head_sizes
    error = refusal(target, layered(head_size=32)(plan_of(target)))
    assert not sizes or (error is not None and "a head size of 32, only for 64" in error.what)


def test_values_out_of_the_range_of_a_target_are_refused() -> None:
    target = TARGETS["cann"]
    assert refusal(target, layered(softcap=100.0)(PLAN)) is None
    error = refusal(target, layered(softcap=1000.0)(PLAN))
    assert error is not None and "a softcap of 1000, only for 1 to 100" in error.what
