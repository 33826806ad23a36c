"""The table of features: what operators, function bodies and refusals make of its rows."""

from __future__ import annotations

from itertools import combinations

from tests.covering import covering, features_of_operators
from tests.decoders.running import load
from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.planning import make_plan
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    EXACT_WINDOW,
    FEATURES,
    GAINS,
    MIXED_CODECS,
    SPARE_ROWS,
    features_of,
)
from tq_onnx.ops.operators import OPERATORS
from tq_onnx.recognise.match import recognise


def test_every_optional_part_of_an_operator_names_a_row() -> None:
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)
    brought = {
        feature
        for operator in OPERATORS
        for part in (*operator.inputs, *operator.attributes)
        for feature in part.when
    }
    assert brought <= set(FEATURES)
    assert set(features_of_operators(*OPERATORS)) == brought - {MIXED_CODECS}


def test_a_plan_has_the_features_of_its_layers() -> None:
    model = recognise(load("dynamo-op18-sdpa"))
    assert features_of(make_plan(model, PRESETS["int4"])) == {ATTENTION_BIAS, GAINS, EXACT_WINDOW}
    assert features_of(make_plan(model, PRESETS["k8v4"])) == {ATTENTION_BIAS, MIXED_CODECS}


def test_options_that_leave_a_feature_out_are_said_to_do_so() -> None:
    assert EXACT_WINDOW.way_out == "convert with `residual_length=0` and `sink_tokens=0`"
    assert SPARE_ROWS.way_out == EXACT_WINDOW.way_out  # folders always ask for spare rows
    assert GAINS.way_out == "convert with no `gains`"


def test_covering_subsets_have_every_pair_in_every_way() -> None:
    features = features_of_operators(*OPERATORS)
    rows = covering(features)
    assert len(rows) <= 9
    for one, other in combinations(features, 2):
        depends = one.needs is other or other.needs is one
        assert len({(one in row, other in row) for row in rows}) == 4 - depends
