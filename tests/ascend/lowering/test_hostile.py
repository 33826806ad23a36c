"""Odd exports for CANN: the same numbers, or a refusal that says why. Never other numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner

from tests.ascend.lowering.parts import part
from tests.decoders.running import (
    EXACT,
    Array,
    Decoder,
    agree,
    batch,
    batches,
    convert,
    load,
    lower,
    session,
)
from tq_onnx.ascend.lowering import claims as provider
from tq_onnx.ascend.lowering.decoder import lowering_of
from tq_onnx.ascend.lowering.mask import NOT_ON_THE_LEFT, PADDING
from tq_onnx.ascend.targets import CANN
from tq_onnx.cli.main import main
from tq_onnx.conversion.check import complaint
from tq_onnx.errors import UnsupportedModelError, UsageError
from tq_onnx.ops.domain import DOMAIN, ENCODE
from tq_onnx.ops.operators import Attention, Encode
from tq_onnx.plan import Plan

BASE = "dynamo-op18-sdpa"
POSITIONS = 64
SIZE = 2
CHUNKS = (4, 1, 2)

INT64, INT32, BOOL, FLOAT = (
    *(ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL),
    ir.DataType.FLOAT,
)
IDS = ["batch_size", "sequence_length"]
HIDDEN = [*IDS, 16]
LOWEST = np.float32(-3e38)

pytestmark = pytest.mark.usefixtures("exact_products")


class Edit:
    """Nodes that a user's export may have, before a node of a fixture."""

    def __init__(self, name: str = BASE) -> None:
        self.model = load(name)
        self._count = 0

    def __getitem__(self, name: str) -> ir.Value:
        values = [*self.model.graph.inputs, *self.model.graph.initializers.values()]
        values += [value for node in self.model.graph for value in node.outputs]
        return next(value for value in values if value.name == name)

    def constant(self, numbers: object, dtype: type = np.int64) -> ir.Value:
        self._count += 1
        tensor = ir.tensor(np.asarray(numbers, dtype), name=f"odd_constant_{self._count}")
        value = ir.Value(
            name=tensor.name,
            type=ir.TensorType(tensor.dtype),
            shape=tensor.shape,
            const_value=tensor,
        )
        self.model.graph.register_initializer(value)
        return value

    def input(self, name: str, dtype: ir.DataType, shape: list[int | str]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.model.graph.inputs.append(value)
        return value

    def op(
        self,
        before: str,
        kind: str,
        inputs: list[ir.Value],
        dtype: ir.DataType,
        shape: Sequence[int | str] | None = None,
        *,
        domain: str = "",
        **attributes: int,
    ) -> ir.Value:
        self._count += 1
        made = [ir.AttrInt64(name, value) for name, value in attributes.items()]
        node = ir.Node(domain, kind, inputs, made, name=f"odd_{kind}_{self._count}")
        (output,) = node.outputs
        output.name, output.type = f"odd_{self._count}", ir.TensorType(dtype)
        output.shape = None if shape is None else ir.Shape(shape)
        maker = self[before].producer()
        assert maker is not None
        self.model.graph.insert_before(maker, node)
        return output

    def instead(self, name: str, make: Callable[[ir.Value], ir.Value], *, of: str = "") -> None:
        """Lets readers of a value, all or those of one operator, read what is made of it."""
        value = self[name]
        uses = [use for use in value.uses() if use.node.op_type == of or not of]
        made = make(value)
        for use in uses:
            use.node.replace_input_with(use.idx, made)


def lowered(model: ir.Model) -> tuple[ir.Model, ir.Model, Plan]:
    """A converted model, and the same lowered; none of what was edited before is shared."""
    assert complaint(model) == ""
    one, other = (ir.from_proto(ir.to_proto(model)) for _ in range(2))
    convert(one)
    plan = convert(other)
    return one, other, lower(other, lowering_of(plan, POSITIONS))


class ExtraInput(Decoder):
    """A decoder with inputs of its own."""

    more: Callable[[dict[str, Array]], dict[str, Array]] = staticmethod(lambda feeds: {})

    def feed(self, feeds: dict[str, Array]) -> Array:
        return super().feed({**feeds, **self.more(feeds)})


def stays_the_same(
    model: ir.Model, more: Callable[[dict[str, Array]], dict[str, Array]] | None = None
) -> ir.Model:
    """Expects the same logits with growing caches, and with garbage in slots that are not used."""
    original, found, _ = lowered(model)
    assert complaint(found) == ""

    def runner(of: ir.Model, capacity: int) -> Callable[[object], Array]:
        open_session = session(of)

        def run(data: object) -> Array:
            decoder = ExtraInput(open_session, SIZE, capacity=capacity)
            decoder.more = more or decoder.more
            return decoder.run(data, CHUNKS)  # type: ignore[arg-type]

        return run

    several = batches(sum(CHUNKS), SIZE)
    assert agree(runner(original, 0), runner(found, sum(CHUNKS) + 3), several, EXACT)
    return found


def refuses(model: ir.Model, match: str) -> None:
    """Expects one sentence that names what it is."""
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        lowered(model)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith('`target="cann"`: ')
    assert text.count("; ") >= 1  # what to do


def biased(make: Callable[[Edit, ir.Value], ir.Value]) -> ir.Model:
    """A decoder whose mask is another one."""
    edit = Edit()
    edit.instead("val_241", lambda bias: make(edit, bias), of="Add")
    return edit.model


def hiding(condition: Callable[[Edit], ir.Value]) -> ir.Model:
    """A decoder whose mask hides more."""

    def make(edit: Edit, bias: ir.Value) -> ir.Value:
        lowest = edit.constant(LOWEST, np.float32)
        return edit.op("val_242", "Where", [condition(edit), lowest, bias], FLOAT)

    return biased(make)


def window(size: int) -> ir.Model:
    def far(edit: Edit) -> ir.Value:
        first = edit.op("val_242", "Sub", [edit["unsqueeze_8"], edit.constant([size])], INT64)
        return edit.op("val_242", "LessOrEqual", [edit["unsqueeze_11"], first], BOOL)

    return hiding(far)


def of_rows(edit: Edit, rows: ir.Value) -> ir.Value:
    """``[B, T]`` as ``[B, 1, T, 1]``."""
    shape: list[int | str] = ["batch_size", 1, "sequence_length", 1]
    return edit.op("val_242", "Unsqueeze", [rows, edit.constant([1, 3])], INT64, shape)


def certain_tokens(edit: Edit) -> ir.Value:
    """Tokens of a kind see nothing but themselves."""
    kind = edit.op("val_242", "Equal", [of_rows(edit, edit["input_ids"]), edit.constant(5)], BOOL)
    past = edit.op("val_242", "Less", [edit["unsqueeze_11"], edit["unsqueeze_8"]], BOOL)
    return edit.op("val_242", "And", [kind, past], BOOL)


def beyond_positions(edit: Edit) -> ir.Value:
    rows = of_rows(edit, edit["position_ids"])
    return edit.op("val_242", "Greater", [edit["unsqueeze_11"], rows], BOOL)


def of_prefix(edit: Edit) -> ir.Value:
    types = edit.input("token_type_ids", INT64, IDS)  # type: ignore[arg-type]
    return edit.op("val_242", "Cast", [of_rows(edit, types)], BOOL, to=9)


@pytest.mark.parametrize(
    ("condition", "match"),
    [
        (certain_tokens, "mask of layer 0 .* depends on the contents of input_ids"),
        (beyond_positions, "mask of layer 0 .* depends on the contents of position_ids"),
        (of_prefix, "mask of layer 0 .* depends on token_type_ids"),
    ],
)
def test_masks_by_more_than_lengths(condition: Callable[[Edit], ir.Value], match: str) -> None:
    refuses(hiding(condition), match)


@pytest.mark.parametrize("size", [3, 100_000])
def test_masks_with_a_window(size: int) -> None:
    model = stays_the_same(window(size))
    windows = [node.attributes.get_int("sliding_window") for node in Attention.nodes(model.graph)]
    assert windows == [size] * len(windows)


def test_masks_with_a_hole() -> None:
    """A key that is hidden between others is no end of a window."""

    def second(edit: Edit) -> ir.Value:
        return edit.op("val_242", "Equal", [edit["unsqueeze_11"], edit.constant([1])], BOOL)

    refuses(hiding(second), "mask of layer 0 .* hides more than the future")


def without_mask(edit: Edit) -> None:
    """A graph in which nothing reads attention_mask, which it does not take any more."""
    for use in list(edit["val_72"].uses()):
        (other,) = (value for value in use.node.inputs if value is not edit["val_72"])
        assert other is not None
        use.node.outputs[0].replace_all_uses_with(other)
    edit.model.graph.remove(edit["bitwise_and_1"].producer(), safe=True)  # type: ignore[arg-type]
    edit.model.graph.remove(edit["val_72"].producer(), safe=True)  # type: ignore[arg-type]
    edit.model.graph.remove(edit["_to_copy"].producer(), safe=True)  # type: ignore[arg-type]
    edit.model.graph.inputs.remove(edit["attention_mask"])


@pytest.mark.parametrize("dtype", [INT32, BOOL])
def test_masks_of_other_types(dtype: ir.DataType) -> None:
    edit = Edit()
    edit["attention_mask"].type = ir.TensorType(dtype)
    model = stays_the_same(edit.model)
    data = batch(4, SIZE, left_padding=1)
    Decoder(session(model), SIZE, capacity=8).run(data, (4,))
    data.mask[0, 2] = 0
    with pytest.raises(Exception, match=NOT_ON_THE_LEFT):
        Decoder(session(model), SIZE, capacity=8).run(data, (4,))


def test_masks_that_show_some_padding() -> None:
    """Each token sees the one before it, padding or not: what is not shown is refused."""

    def shown(edit: Edit, bias: ir.Value) -> ir.Value:
        first = edit.op("val_242", "Sub", [edit["unsqueeze_8"], edit.constant([1])], INT64)
        before = edit.op("val_242", "Equal", [edit["unsqueeze_11"], first], BOOL)
        none = edit.constant(0.0, np.float32)
        return edit.op("val_242", "Where", [before, none, bias], FLOAT)

    model = stays_the_same(biased(shown))
    with pytest.raises(Exception, match=PADDING):
        Decoder(session(model), SIZE, capacity=8).run(batch(4, SIZE, left_padding=1), (4,))


def test_positions_by_the_mask_take_no_padding() -> None:
    """Where they are counted without it, they are no longer those of the tokens."""
    edit = Edit()
    mask = edit["attention_mask"]
    ends = edit.op("unsqueeze_12", "CumSum", [mask, edit.constant(1)], INT64, ["B", "S"])
    places = edit.op("unsqueeze_12", "Sub", [ends, edit.constant(1)], INT64, ["B", "S"])
    size = edit.op("unsqueeze_12", "Shape", [edit["input_ids"]], INT64, [1], start=1, end=2)
    first = edit.op("unsqueeze_12", "Neg", [size], INT64, [1])
    last = edit.constant([np.iinfo(np.int64).max])
    new = edit.op("unsqueeze_12", "Slice", [places, first, last, edit.constant([1])], INT64, IDS)
    for use in list(edit["position_ids"].uses()):
        use.node.replace_input_with(use.idx, new)
    model = stays_the_same(edit.model)
    with pytest.raises(Exception, match=PADDING):
        Decoder(session(model), SIZE, capacity=8).run(batch(4, SIZE, left_padding=1), (4,))


def test_a_mask_of_floats() -> None:
    edit = Edit()
    edit["attention_mask"].type = ir.TensorType(FLOAT)
    refuses(edit.model, "depends on attention_mask")


def test_an_only_list_that_is_no_positions() -> None:
    """Lengths are not read from what is only as long as the tokens."""
    edit = Edit()
    without_mask(edit)
    edit["position_ids"].name = "token_type_ids"
    refuses(edit.model, "no attention_mask .* and no position_ids")


def test_positions_of_int32_tell_lengths() -> None:
    edit = Edit()
    without_mask(edit)
    for name in ("position_ids", "unsqueeze_12"):
        edit[name].type = ir.TensorType(INT32)
    stays_the_same(edit.model)


def first_row(feeds: dict[str, Array]) -> dict[str, Array]:
    return {"position_ids": feeds["position_ids"][:1]}


def test_one_row_of_positions_for_all() -> None:
    """And what is asked for its shape is answered as it is, not as that of another batch."""
    edit = Edit()
    one_row = ("position_ids", "unsqueeze_12", "_to_copy_1", "mul_68", "cat_4", "cos", "sin")
    for name in (*one_row, "unsqueeze_13", "unsqueeze_14"):
        dims = edit[name].shape
        assert dims is not None
        edit[name].shape = ir.Shape([1, *list(dims)[1:]])
    rows = edit.op("linear_3", "Shape", [edit["cos"]], INT64, [1], start=0, end=1)
    factor = edit.op("linear_3", "Cast", [rows], FLOAT, [1], to=1)
    edit.instead("linear_3", lambda v: edit.op("add_438", "Mul", [v, factor], FLOAT, HIDDEN))
    stays_the_same(edit.model, first_row)


def positions_made(make: Callable[[Edit, ir.Value], ir.Value]) -> ir.Model:
    edit = Edit()
    edit.instead("position_ids", lambda given: make(edit, given))
    return edit.model


def clamped(edit: Edit, given: ir.Value) -> ir.Value:
    return edit.op("unsqueeze_12", "Max", [given, edit.constant(0)], INT64, IDS)


def offset(edit: Edit, given: ir.Value) -> ir.Value:
    return edit.op("unsqueeze_12", "Add", [given, edit.constant(2)], INT64, IDS)


def of_text(edit: Edit, given: ir.Value) -> ir.Value:
    """Counts on from the past, all tokens but those of a kind."""
    del given
    at, one = "unsqueeze_12", edit.constant(1)
    odd = edit.op(at, "Equal", [edit["input_ids"], edit.constant(5)], BOOL, IDS)
    ones = edit.op(at, "Where", [odd, edit.constant(0), one], INT64, IDS)
    counted = edit.op(at, "CumSum", [ones, one], INT64, IDS)
    cache = edit["past_key_values.0.key"]
    past = edit.op(at, "Shape", [cache], INT64, [1], start=2, end=3)
    return edit.op(at, "Add", [counted, past], INT64, IDS)


def shifted(feeds: dict[str, Array]) -> dict[str, Array]:
    return {"position_ids": feeds["position_ids"] + 3}


def test_positions_are_what_is_given() -> None:
    stays_the_same(positions_made(clamped), shifted)
    stays_the_same(positions_made(offset))


def test_positions_by_tokens_are_not_counted() -> None:
    """The length of the caches is no part of it: their capacity is another number."""
    refuses(positions_made(of_text), r"\(Shape\) reads past_key_values.0.key")


def long_angles(edit: Edit, length: ir.Value, threshold: int) -> None:
    """Other angles for texts of more tokens."""
    inverse = edit["decoder.model.rotary_emb.inv_freq"]
    tensor = inverse.const_value
    assert tensor is not None and inverse.shape is not None
    other = edit.constant(tensor.numpy() * 0.5, np.float32)
    is_long = edit.op("mul_68", "Greater", [length, edit.constant(threshold)], BOOL, [])
    shape = list(inverse.shape)
    chosen = edit.op("mul_68", "Where", [is_long, other, inverse], FLOAT, shape)  # type: ignore[arg-type]
    product = edit["mul_68"].producer()
    assert product is not None
    product.replace_input_with(1, chosen)


@pytest.mark.parametrize("threshold", [1, 32])
def test_angles_by_the_largest_position(threshold: int) -> None:
    edit = Edit()
    largest = edit.op("mul_68", "ReduceMax", [edit["position_ids"]], INT64, [], keepdims=0)
    long_angles(edit, largest, threshold)
    refuses(edit.model, "rotary embedding stays, because .* depends on more than positions")


def test_angles_by_the_length_of_the_mask() -> None:
    edit = Edit()
    length = edit.op("mul_68", "Shape", [edit["attention_mask"]], INT64, [1], start=1)
    long_angles(edit, length, 32)
    refuses(edit.model, "rotary embedding stays, because .* depends on attention_mask")


def test_angles_that_tables_are_too_short_to_change() -> None:
    edit = Edit()
    largest = edit.op("mul_68", "ReduceMax", [edit["position_ids"]], INT64, [], keepdims=0)
    long_angles(edit, largest, POSITIONS)
    stays_the_same(edit.model)


def test_constants_that_a_call_may_replace() -> None:
    edit = Edit()
    edit.model.graph.inputs.append(edit["decoder.model.rotary_emb.inv_freq"])
    refuses(edit.model, "depends on decoder.model.rotary_emb.inv_freq")


def test_sizes_that_nothing_tells_are_not_answered() -> None:
    """A factor from the size of something as long as the largest token id."""
    edit, at = Edit(), "linear_3"
    axes = edit.constant([0, 1])
    largest = edit.op(at, "ReduceMax", [edit["input_ids"], axes], INT64, [1, 1])
    end = edit.op(at, "Reshape", [largest, edit.constant([1])], INT64, [1])
    bounds = [edit["mul_102"], edit.constant([0]), end, edit.constant([1])]
    cut = edit.op(at, "Slice", bounds, FLOAT)
    size = edit.op(at, "Shape", [cut], INT64, [1], start=1, end=2)
    factor = edit.op(at, "Cast", [size], FLOAT, [1], to=1)
    edit.instead("linear_3", lambda v: edit.op("add_438", "Mul", [v, factor], FLOAT, HIDDEN))
    refuses(edit.model, r"\(Slice\) is floating-point")


def test_a_length_of_caches_that_is_another_one() -> None:
    model = load(BASE)
    plan = convert(model)
    nodes = [n for n in model.graph if n.domain == DOMAIN]
    old = Encode.past_length.of(nodes[0])
    assert nodes[0].op_type == ENCODE and old is not None
    one = ir.Value(name="odd_one", const_value=ir.tensor(np.array([1]), name="odd_one"))
    one.type, one.shape = ir.TensorType(INT64), ir.Shape([1])
    model.graph.register_initializer(one)
    more = ir.Node("", "Add", [old, one], name="odd_length")
    more.outputs[0].name, more.outputs[0].type = "odd_length", ir.TensorType(INT64)
    model.graph.insert_before(nodes[0], more)
    Encode.past_length.replace(nodes[0], more.outputs[0])
    with pytest.raises(UnsupportedModelError, match="odd_length is not shown to be the number"):
        lower(model, lowering_of(plan, POSITIONS))


def test_masks_in_branches_leave_nothing() -> None:
    """What only a dead If reads is dead too."""
    edit = Edit()

    def branch(name: str, of: ir.Value) -> ir.Graph:
        node = ir.Node("", "Identity", [of], name=name)
        node.outputs[0].name, node.outputs[0].type = name, ir.TensorType(FLOAT)
        return ir.Graph([], node.outputs, nodes=[node], name=name)

    def either(bias: ir.Value) -> ir.Value:
        past = edit["sym_size_int_44"]
        is_first = edit.op("val_242", "Equal", [past, edit.constant(0)], BOOL, [])
        branches = [
            ir.AttrGraph("then_branch", branch("then", bias)),
            ir.AttrGraph("else_branch", branch("else", bias)),
        ]
        node = ir.Node("", "If", [is_first], branches, name="odd_if")
        node.outputs[0].name, node.outputs[0].type = "odd_bias", ir.TensorType(FLOAT)
        node.outputs[0].shape = bias.shape
        edit.model.graph.insert_before(edit["val_242"].producer(), node)  # type: ignore[arg-type]
        return node.outputs[0]

    edit.instead("val_241", either, of="Add")
    stays_the_same(edit.model)


def test_calls_of_functions_are_refused_with_what_to_do() -> None:
    edit = Edit()
    linear = edit["linear_4"].producer()
    assert linear is not None
    inside = ir.Node("", "MatMul", [ir.Value(name="x"), ir.Value(name="w")])
    inside.outputs[0].name = "y"
    given = [value for value in inside.inputs if value is not None]
    graph = ir.Graph(given, inside.outputs, nodes=[inside], opset_imports={"": 18})
    function = ir.Function("odd", "Linear", graph=graph, attributes=[])
    edit.model.functions[function.identifier()] = function
    edit.model.opset_imports["odd"] = 1
    called = edit.op("linear_4", "Linear", list(linear.inputs), FLOAT, [*IDS, 24], domain="odd")  # type: ignore[arg-type]
    linear.outputs[0].replace_all_uses_with(called)
    refuses(edit.model, "odd::Linear.* inline its functions")


def test_functions_that_nothing_calls() -> None:
    """Those of a newer opset would not be valid beside the opset that is declared."""
    _, model, _ = lowered(load("mobius-default"))
    assert complaint(model) == ""


def test_attributes_of_newer_opsets() -> None:
    edit = Edit("dynamo-op20-sdpa")
    node = next(iter(edit.model.graph))
    cast = ir.Node(
        "", "Cast", [edit["input_ids"]], [ir.AttrInt64("to", 7), ir.AttrInt64("saturate", 1)]
    )
    cast.outputs[0].name, cast.outputs[0].type = "odd_ids", ir.TensorType(INT64)
    cast.outputs[0].shape = ir.Shape(IDS)
    edit.model.graph.insert_before(node, cast)
    gather = edit["embedding"].producer()
    assert gather is not None
    gather.replace_input_with(1, cast.outputs[0])
    _, model, _ = lowered(edit.model)
    assert model.opset_imports[""] == provider.NEWEST_OPSET
    assert complaint(model) == ""


def test_numbers_of_other_types() -> None:
    edit = Edit()

    def twice(value: ir.Value) -> ir.Value:
        wide = edit.op("add_438", "Cast", [value], ir.DataType.DOUBLE, HIDDEN, to=11)
        return edit.op("add_438", "Cast", [wide], FLOAT, HIDDEN, to=1)

    edit.instead("linear_3", twice)
    refuses(edit.model, "type DOUBLE .*float32 or float16")


@pytest.mark.parametrize(
    ("one", "other", "wrong"),
    [
        ("M, ?, 64", "1, ?, 64", True),
        ("M, ?, 64", "M, 1, 64", False),
        ("M, K, 1", "M, K, 64", False),
        ("M, 1, 64", "1, K, 64", True),
        ("M, K, 64", "64", False),
    ],
)
def test_operands_of_sizes_that_are_not_known(one: str, other: str, wrong: bool) -> None:
    """Two that are not known may be two numbers, and the provider broadcasts one operand only."""
    model = part(f"float[{one}] x, float[{other}] y", "float[A, B, 64] z", "z = Mul(x, y)")
    assert bool(list(provider.left_over(model))) == wrong


def test_what_is_to_be_done_is_true() -> None:
    for name, match in (
        ("optimum", "head size of 16.*; use another target$"),
        ("dynamo-op18-sdpa-bf16", "bfloat16.*; export it in float or float16"),
    ):
        with pytest.raises(UnsupportedModelError, match=match):
            CANN.capabilities.expect(CANN.name, convert(load(name)))
    prompts = convert(load("hf-prefill"))
    larger = replace(prompts, layers=tuple(replace(one, head_size=64) for one in prompts.layers))
    with pytest.raises(UnsupportedModelError, match=r"first prompt.*; export it with past"):
        CANN.capabilities.expect(CANN.name, larger)
    with pytest.raises(
        UsageError, match="; use a preset such as int4, int5 or int3 for all layers"
    ):
        CANN.capabilities.expect(CANN.name, convert(load(BASE), "k8v4"))
    model = load("genai-cpu-int4")
    with pytest.raises(UnsupportedModelError, match=r"MatMulNBits.*; export its weights in"):
        lower(model, lowering_of(convert(model), POSITIONS))


@pytest.mark.parametrize(
    ("name", "code", "match"),
    [("tokens", 3, "mask of layer 0"), ("optimum", 3, "head size of 16")],
)
def test_nothing_is_written_of_what_is_refused(
    tmp_path: Path, name: str, code: int, match: str
) -> None:
    source = tmp_path / "odd.onnx"
    ir.save(hiding(certain_tokens) if name == "tokens" else load(name), source)
    result = CliRunner().invoke(main, ["convert", str(source), "--target", "cann"])

    assert result.exit_code == code
    assert match in result.output
    assert "Traceback" not in result.output
    assert (str(source) in result.output) == (code == 3)
    assert [path.name for path in tmp_path.iterdir()] == ["odd.onnx"]
