"""The rows of the registry, and what a conversion promises to every target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.cli.run import run
from tests.files.models import external, inline, snapshot
from tq_onnx.conversion.check import InterfaceSnapshot, check, snapshot_interface
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert, prepare
from tq_onnx.conversion.target import CPU, Lowering, Target, Values
from tq_onnx.errors import (
    ModelFileError,
    TqOnnxError,
    UnsupportedModelError,
    UsageError,
    located,
)
from tq_onnx.files.load import load
from tq_onnx.plan import METADATA_PLAN, Plan
from tq_onnx.runtime.opening import open_model
from tq_onnx.targets.registry import TARGETS, target_of, target_of_plan

WEB = TARGETS["web"]


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_a_row_tells_all_that_is_shown_of_it(target: Target) -> None:
    assert TARGETS[target.name] is target
    assert bool(target.help) == bool(target.summary) == bool(target.lower)
    for option in target.options:
        assert option.help[-1] in ".]"
        values = {option.name: option.least}
        assert target.having(**values).values == values


def test_values_are_those_of_an_option() -> None:
    assert target_of("cann", max_positions=8).values == {"max_positions": 8}
    assert target_of("cpu") is CPU or target_of("cpu") == CPU
    for name, values, sentence in (
        ("npu", {}, "target 'npu' is not one of cpu, cann, web, paged"),
        (["cpu"], {}, "target 'list' is not one of"),
        (
            "cpu",
            {"max_positions": 8},
            '`max_positions` is an option that only a model for `target="cann"` has',
        ),
        ("cann", {"size": 8}, "no target has the option size"),
        (
            "cann",
            {"max_positions": 0},
            "cann: max_positions must be a number from 1 to 2147483647, got 0",
        ),
        (
            "cann",
            {"max_positions": "8"},
            "max_positions must be a number from 1 to 2147483647, got '8'",
        ),
    ):
        with pytest.raises(UsageError, match=sentence):
            target_of(name, **values)
    with pytest.raises(UsageError, match="a model for the target cpu has no max_positions"):
        CPU.having(max_positions=8)


@pytest.mark.parametrize(
    "target",
    TARGETS.values(),
    ids=lambda target: str(target.name),
)
def test_the_plan_in_the_metadata_is_the_last_one(tmp_path: Path, target: Target) -> None:
    prepared = prepare(inline(tmp_path, "dynamo-op18-sdpa-hd128-fp16"), target=target)
    model = prepared.loaded.model
    assert Plan.from_json(model.metadata_props[METADATA_PLAN]) == prepared.plan
    assert prepared.plan.target == target.name
    assert target_of_plan(prepared.plan) is target


def test_a_model_for_an_unknown_target_is_refused(tmp_path: Path) -> None:
    path, source = tmp_path / "new.onnx", inline(tmp_path)
    convert(source, path)
    proto = onnx.load(path)
    for entry in proto.metadata_props:
        if entry.key == METADATA_PLAN:
            entry.value = replace(Plan.from_json(entry.value), target="abacus").to_json()
    onnx.save(proto, path)
    reason = "'abacus', and the"
    with pytest.raises(ModelFileError, match=rf"new\.onnx: .* converted for {reason}") as e:
        open_model(path)
    assert "use the version that converted it" in str(e.value)
    assert reason in run("inspect", path).sentence(4)
    assert reason in run("verify", source, path, "--tokens", 16).sentence(4)


class Half(ir.passes.InPlacePass):
    """Takes a node away and refuses then."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        node = next(node for node in model.graph if node.op_type == "MatMul")
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        model.graph.remove(node, safe=True)
        raise UnsupportedModelError("it is half done", where="node 7")


class Broken(Half):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        raise KeyError("seven")


def failing(made: type[Half]) -> Target:
    def lower(plan: Plan, path: Path, values: Values) -> Lowering:
        return Lowering(replace(plan, target="example"), (made(),))

    return Target("example", lower=lower)


def test_a_lowering_that_fails_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[ir.Model] = []
    clone = ir.Model.clone

    def watched(model: ir.Model) -> ir.Model:
        seen.append(model)
        return clone(model)

    monkeypatch.setattr(ir.Model, "clone", watched)
    path = inline(tmp_path)
    before = snapshot(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        convert(path, tmp_path / "new.onnx", target=failing(Half))
    assert str(caught.value) == f"{path}: node 7: it is half done"
    assert snapshot(tmp_path) == before
    (model,) = seen
    own = load(path).model.graph
    products = [sum(node.op_type == "MatMul" for node in graph) for graph in (model.graph, own)]
    assert products[0] == products[1] - 4  # two of each layer are in its attention


def test_a_lowering_that_breaks_is_a_defect(tmp_path: Path) -> None:
    with pytest.raises(TqOnnxError, match=r"seven.*this is a defect") as caught:
        convert(inline(tmp_path), tmp_path / "new.onnx", target=failing(Broken))
    assert caught.value.exit_code == 1
    assert not (tmp_path / "new.onnx").exists()


def test_a_clone_shares_the_weights(tmp_path: Path) -> None:
    model = load(external(tmp_path)).model
    copied = model.clone()
    for name, value in model.graph.initializers.items():
        assert copied.graph.initializers[name].const_value is value.const_value
    assert any(
        isinstance(value.const_value, ir.ExternalTensor)
        for value in copied.graph.initializers.values()
    )


def operator_left(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "MatMul")
    node.domain = "ai.turboquant"


def body_left(model: ir.Model) -> None:
    function = onnx.parser.parse_function(
        '<domain: "ai.turboquant", opset_import: ["": 16]> Same (x) => (y) { y = Identity(x) }'
    )
    own = ir.serde.deserialize_function(function)
    model.functions[own.identifier()] = own


def domain_left(model: ir.Model) -> None:
    model.opset_imports["ai.turboquant"] = 1


def other_row(model: ir.Model) -> None:
    cache = next(value for value in model.graph.inputs if value.dtype is ir.DataType.UINT8)
    assert cache.shape is not None
    cache.shape = ir.Shape([*cache.shape[:3], 67])


def no_plan(model: ir.Model) -> None:
    plan = Plan.from_json(model.metadata_props[METADATA_PLAN])
    model.metadata_props[METADATA_PLAN] = replace(plan, target="cpu").to_json()


def invalid_node(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "MatMul")
    node.attributes["bogus"] = ir.AttrInt64("bogus", 1)


@pytest.fixture(scope="module")
def standard(tmp_path_factory: pytest.TempPathFactory) -> tuple[InterfaceSnapshot, bytes, Plan]:
    """A graph of standard operators that keeps its promises, its interface before, and its plan."""
    path = inline(tmp_path_factory.mktemp("graph"), "dynamo-op18-sdpa")
    before = snapshot_interface(load(path).model)
    prepared = prepare(path, target=WEB)
    model = prepared.loaded.model
    check(before, model, prepared.plan, WEB)
    return before, ir.to_proto(model).SerializeToString(), prepared.plan


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (operator_left, r"\(MatMul\) is left"),
        (body_left, "the body of Same is left"),
        (domain_left, "the domain ai.turboquant is imported"),
        (other_row, "67"),
        (no_plan, "plan in the metadata is another one"),
        (invalid_node, "onnx.checker"),
    ],
)
def test_a_broken_promise_of_standard_operators_is_found(
    standard: tuple[InterfaceSnapshot, bytes, Plan],
    damage: Callable[[ir.Model], None],
    text: str,
) -> None:
    before, data, plan = standard
    model = ir.from_proto(onnx.load_model_from_string(data))
    damage(model)
    with pytest.raises(TqOnnxError, match=text):
        check(before, model, plan, WEB)


def test_the_plan_must_be_for_the_target(tmp_path: Path) -> None:
    path = inline(tmp_path)
    before = snapshot_interface(load(path).model)
    prepared = prepare(path)
    with pytest.raises(TqOnnxError, match="the plan is for the target cpu, not cann"):
        check(before, prepared.loaded.model, prepared.plan, TARGETS["cann"])


def test_standard_operators_begin_with_sound_tables(tmp_path: Path) -> None:
    """Nothing is left of them afterwards, so they are checked before."""
    prepared = prepare(
        inline(tmp_path), options=Options(gains=False, residual_length=0, sink_tokens=0)
    )
    rotation = prepared.loaded.model.graph.initializers["tq.rotation.0"]
    assert rotation.const_value is not None
    crooked = rotation.const_value.numpy() * np.float32(1.5)
    rotation.const_value = ir.tensor(crooked, name=rotation.name)
    lowering = WEB.lowering(prepared.plan, prepared.loaded.path)
    assert lowering is not None
    with pytest.raises(ir.passes.PreconditionError, match="not orthogonal"):
        lowering.passes[0](prepared.loaded.model)


def test_an_error_names_its_file_once() -> None:
    for error, text in (
        (UnsupportedModelError("is odd", where="node a", fix="go"), "m.onnx: node a: is odd; go"),
        (UnsupportedModelError("is odd"), "m.onnx: is odd"),
        (ModelFileError("is odd", where="m.onnx"), "m.onnx: is odd"),
        (UsageError("is odd", where="--x"), "--x: is odd"),
    ):
        with pytest.raises(TqOnnxError) as caught, located(Path("m.onnx")), located("m.onnx"):
            raise error
        assert caught.value is error
        assert str(error) == text
