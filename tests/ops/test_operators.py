"""The operators' records: slots, optional inputs, a node's inputs by name."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations

import onnx_ir as ir
import pytest

from tests.covering import covering, features_of_operators
from tests.decoders.running import load
from tq_onnx.codec.presets import PRESETS
from tq_onnx.conversion.planning import make_plan
from tq_onnx.ops.domain import (
    ATTENTION,
    DECODER,
    DOMAIN,
    ENCODE,
    PAGED_ATTENTION,
    PAGED_ENCODE,
)
from tq_onnx.ops.features import (
    ATTENTION_BIAS,
    EXACT_WINDOW,
    FEATURES,
    GAINS,
    HEAD_SINK,
    MIXED_CODECS,
    OFFSETS,
    SPARE_ROWS,
    features_of,
)
from tq_onnx.ops.operator import Input, Operator
from tq_onnx.ops.operators import BY_NAME, OPERATORS, Attention, Encode, Gather
from tq_onnx.recognise.match import recognise


def values(count: int) -> list[ir.Value]:
    return [ir.Value(name=f"v{index}") for index in range(count)]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_members_know_their_names_and_slots(operator: type[Operator]) -> None:
    for parameters in (operator.inputs, operator.outputs):
        assert [each.slot for each in parameters] == list(range(len(parameters)))
        assert all(getattr(operator, each.name) is each for each in parameters)
    required = [not each.is_optional for each in operator.inputs]
    assert required == sorted(required, reverse=True)
    needed = [attribute.default is None for attribute in operator.attributes]
    assert needed == sorted(needed, reverse=True)
    assert all((each.default is None) == (not each.when) for each in operator.attributes)


def test_there_is_a_record_for_each_name() -> None:
    assert tuple(BY_NAME) == (ENCODE, ATTENTION, PAGED_ENCODE, PAGED_ATTENTION, *DECODER)


def test_a_node_is_read_by_the_names_of_its_inputs() -> None:
    data, indices, other = values(3)
    node = ir.Node(DOMAIN, Gather.name, [data, indices])
    assert (Gather.data.of(node), Gather.indices.of(node)) == (data, indices)
    assert Encode.offset.of(node) is None
    Gather.indices.replace(node, other)
    assert Gather.indices.of(node) is other


def test_nodes_of_an_operator() -> None:
    ours, theirs = (ir.Node(domain, "Gather", values(2)) for domain in (DOMAIN, ""))
    assert Gather.nodes([theirs, ours]) == [ours]
    assert Encode.nodes([theirs, ours]) == []


def test_arguments_stand_in_their_slots_and_end_with_the_last() -> None:
    query, sink = values(2)
    given: dict[Input, ir.Value | None] = {Attention.head_sink: sink, Attention.query: query}
    expected = [query, *[None] * 8, sink]
    assert Attention.arguments(given) == expected
    assert Attention.arguments(given | {Attention.value_offset: None}) == expected
    assert Attention.arguments({}) == []


def test_a_model_has_the_inputs_up_to_the_last_that_it_uses() -> None:
    assert Encode.inputs_with(frozenset()) == Encode.inputs[:6]
    assert Encode.inputs_with({ATTENTION_BIAS, HEAD_SINK}) == Encode.inputs[:6]
    assert Encode.inputs_with({OFFSETS})[-1] is Encode.offset
    assert Attention.inputs_with(frozenset()) == Attention.inputs[:8]
    assert Attention.inputs_with({ATTENTION_BIAS})[-1] is Attention.attention_bias
    assert Attention.inputs_with({HEAD_SINK})[-1] is Attention.head_sink
    assert Attention.inputs_with({OFFSETS, ATTENTION_BIAS})[-1] is Attention.value_offset


# The table of features: what operators, function bodies and refusals make of its rows.


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


# A process that registered the schemas ends cleanly.


def test_a_process_with_registered_schemas_exits_cleanly() -> None:
    code = "from tq_onnx.ops.schema import register_schemas; register_schemas()"

    finished = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)

    assert (finished.returncode, finished.stderr) == (0, b"")
