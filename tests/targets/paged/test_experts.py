"""Experts in pages: each computes rows of its own tokens, which no other token may change."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from tests.agreement.harness import packed
from tests.decoders.running import EXACT, load
from tq_onnx.conversion.pipeline import prepare
from tq_onnx.graph import liveness
from tq_onnx.targets.registry import target_of

FIXTURE = "genai09-cpu-fp32"
WIDTH = 16

#: Of the first of three experts, as torch's legacy exporter writes it for Qwen3-MoE.
SELECTED = """
    rows = Reshape(x, flat)
    scores = MatMul(rows, router)
    best, chosen = TopK<axis = -1>(scores, two)
    hot = OneHot<axis = -1>(chosen, depth, levels)
    by_expert = Transpose<perm = [2, 1, 0]>(hot)
    mask = Gather<axis = 0>(by_expert, first)
    is_its = Cast<to = 9>(mask)
    places = NonZero(is_its)
    turned = Transpose<perm = [1, 0]>(places)
    slots, tokens = Split<axis = 1>(turned, halves)
    slot = Squeeze(slots, one)
    token = Squeeze(tokens, one)
    its = Gather<axis = 0>(rows, token)
    made = MatMul(its, expert)
    weights = Reshape(best, column)
    scaled = Mul(token, two)
    place = Add(slot, scaled)
    weight = Gather<axis = 0>(weights, place)
    weighed = Mul(made, weight)
    size = Shape(weighed)
    place_of_each = Unsqueeze(token, one)
    where = Expand(place_of_each, size)
    shape = Shape(rows)
    zeros = ConstantOfShape(shape)
    back = ScatterElements<axis = 0>(zeros, where, weighed)
    sum = Add(rows, back)
    whole = Shape(x)
    y = Reshape(sum, whole)
"""
#: All tokens for every expert, as in gpt-oss.
REPEATED = """
    rows = Reshape(x, flat)
    copies = Tile(rows, three_times)
    blocks = Reshape(copies, by_expert)
    made = MatMul(blocks, experts)
    sum = ReduceSum<keepdims = 0>(made, zero)
    whole = Shape(x)
    y = Reshape(sum, whole)
"""
PADDED = """
    wide = Pad(x, behind_each)
    y = Slice(wide, zero, width, two)
"""
PARTS = """
    turned = Transpose<perm = [2, 0, 1]>(x)
    parts = GatherND(turned, pairs)
    y = Transpose<perm = [1, 2, 0]>(parts)
"""
LOOKED_UP = """
    scores = MatMul(x, router)
    best = ArgMax<axis = -1, keepdims = 1>(scores)
    like = Shape(x)
    wide = Expand(best, like)
    looked_up = GatherElements<axis = 1>(table, wide)
    y = Add(x, looked_up)
"""
RNG = np.random.default_rng(0)
CONSTANTS = {
    **{
        name: np.array([number], np.int64) for name, number in [("zero", 0), ("one", 1), ("two", 2)]
    },
    **{"first": np.array(0), "second": np.array(1), "depth": np.array(3)},
    "flat": np.array([-1, WIDTH]),
    "column": np.array([-1, 1]),
    "halves": np.array([1, 1]),
    "levels": np.array([0, 1]),
    "three_times": np.array([3, 1]),
    "by_expert": np.array([3, -1, WIDTH]),
    "by_token": np.array([-1, 3, WIDTH]),
    "behind_each": np.array([0, 0, 0, 0, 0, 4]),
    "before_all": np.array([0, 1, 0, 0, 0, 0]),
    "width": np.array([WIDTH]),
    "pairs": np.repeat(np.arange(WIDTH // 2), 2)[:, None],
    "router": RNG.normal(size=(WIDTH, 3)).astype(np.float32),
    "expert": RNG.normal(size=(WIDTH, WIDTH)).astype(np.float32),
    "experts": RNG.normal(size=(3, WIDTH, WIDTH)).astype(np.float32),
    "table": RNG.normal(size=(1, 3, WIDTH)).astype(np.float32),
}


def splice(model: ir.Model, value: ir.Value, text: str) -> None:
    """Puts nodes behind a value ``x``, whose readers then read ``y``."""
    graph = model.graph
    proto = onnx.parser.parse_graph(f"spliced (float[b, t, w] x) => (float[b, t, w] y) {{{text}}}")
    uses, place = list(value.uses()), value.producer()
    assert place is not None
    known = {"x": value}
    for node in proto.node:
        for name in node.input:
            if name not in known:
                tensor = ir.tensor(CONSTANTS[name])
                constant = ir.Value(name=f"spliced_{name}", const_value=tensor)
                constant.dtype, constant.shape = tensor.dtype, tensor.shape
                graph.register_initializer(constant)
                known[name] = constant
        attributes = [ir.serde.deserialize_attribute(each) for each in node.attribute]
        made = ir.Node(
            node.domain,
            node.op_type,
            [known[name] for name in node.input],
            attributes,
            num_outputs=len(node.output),
            name=f"spliced_{node.output[0]}",
        )
        for output, name in zip(made.outputs, node.output, strict=True):
            output.name, known[name] = f"spliced_{name}_made", output
        graph.insert_after(place, made)
        place = made
    known["y"].dtype, known["y"].shape = value.dtype, value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, known["y"])


def with_nodes(text: str, folder: Path, *, behind_attention: bool = False) -> Path:
    """A fixture with such nodes behind its token embeddings, or before its head."""
    model = load(FIXTURE)
    model.graph.opset_imports[""] = max(model.graph.opset_imports[""], 18)
    (head,) = (node for node in model.graph if node.name == "/lm_head/MatMul")
    (ids,) = (value for value in model.graph.inputs if value.name == "input_ids")
    lookup = next(node for node in ids.consumers() if node.op_type == "Gather")
    value = head.inputs[0] if behind_attention else lookup.outputs[0]
    assert value is not None
    splice(model, value, text)
    ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def packed_with(text: str, folder: Path, *, behind_attention: bool = False) -> tuple[float, str]:
    """Packed requests of a fixture with such nodes, against each alone; or a refusal."""
    return packed(with_nodes(text, folder, behind_attention=behind_attention))


def test_work_grows_with_the_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not with their square: Qwen3-30B has 6,144 of them. Each step of a walk counts."""

    def counting(node: ir.Node) -> Iterator[ir.Graph]:
        walked.append(node)
        return original(node)

    walked: list[ir.Node] = []
    original = liveness._graphs
    monkeypatch.setattr(liveness, "_graphs", counting)
    lines = SELECTED.strip().splitlines()
    shared, own, end = "\n".join(lines[:5]), "\n".join(lines[5:-3]), "\n".join(lines[-2:])
    names = "|".join(("rows", *re.findall(r"(\w+)(?=[\w, ]* = \w+[<(])", own)))

    def steps(experts: int) -> int:
        text = re.sub(r"\brows\b", "rows_0", shared)
        for number in range(experts):
            text += "\n" + re.sub(rf"\b({names})\b", rf"\1_{number}", own)
            text += f"\nrows_{number + 1} = Add(rows_{number}, back_{number})\n"
        whole = text + end.replace("sum", f"rows_{experts}")
        model = with_nodes(whole, tmp_path, behind_attention=True)
        walked.clear()
        prepare(model, preset="raw", target=target_of("paged"))
        return len(walked)

    few, many = steps(8), steps(32)
    assert many < 4 * few


@pytest.mark.parametrize(
    ("text", "behind_attention"),
    [
        *((text, False) for text in (SELECTED, REPEATED, PADDED, PARTS, LOOKED_UP)),
        (SELECTED, True),
    ],
    ids=["selected", "repeated", "padded", "parts", "looked up", "selected behind attention"],
)
def test_packed_requests_are_as_each_alone(
    text: str, behind_attention: bool, tmp_path: Path
) -> None:
    difference, refusal = packed_with(text, tmp_path, behind_attention=behind_attention)

    assert refusal == ""
    assert difference <= EXACT


#: Nodes that take the place of a line: a text, the line's beginning, and why that is refused.
MIXED = {
    "a place is computed with": (
        SELECTED,
        "made = ",
        """number = Cast<to = 1>(tokens)
    more = Add(its, number)
    made = MatMul(more, expert)""",
        "places of tokens",
    ),
    "weights of another token": (
        SELECTED,
        "weight = ",
        "weight = Gather<axis = 0>(weights, token)",
        "places of tokens",
    ),
    "weights behind those of a token": (
        SELECTED,
        "place = ",
        """after = Add(slot, one)
    place = Add(after, scaled)""",
        "places of tokens",
    ),
    "rows go where slots say": (
        SELECTED,
        "place_of_each = ",
        "place_of_each = Unsqueeze(slot, one)",
        "places of tokens",
    ),
    "rows of all tokens": (SELECTED, "weighed = ", "weighed = Mul(rows, weight)", "some of them"),
    "rows of another expert": (
        SELECTED,
        "weighed = ",
        """mask_b = Gather<axis = 0>(by_expert, second)
    is_b = Cast<to = 9>(mask_b)
    places_b = NonZero(is_b)
    turned_b = Transpose<perm = [1, 0]>(places_b)
    slots_b, tokens_b = Split<axis = 1>(turned_b, halves)
    token_b = Squeeze(tokens_b, one)
    its_b = Gather<axis = 0>(rows, token_b)
    weighed = Mul(made, its_b)""",
        "some of them",
    ),
    "the number of an expert's tokens": (
        SELECTED,
        "weighed = ",
        """counts = Shape<start = 0, end = 1>(made)
    count = Cast<to = 1>(counts)
    weighed = Div(made, count)""",
        "number of tokens",
    ),
    **{
        f"{name} of an expert's tokens": (
            SELECTED,
            "weighed = ",
            f"all = {name}\n    weighed = Mul(made, all)",
            name.partition("(")[0].partition("<")[0],
        )
        for name in ("ReduceMean(made, zero)", "Softmax<axis = 0>(made)", "CumSum(made, zero)")
    },
    "copies by token": (REPEATED, "blocks = ", "blocks = Reshape(copies, by_token)", "Reshape"),
    "copies that are read as they are": (
        REPEATED,
        "blocks = ",
        """more = Neg(copies)
    blocks = Reshape(more, by_expert)""",
        "repeats all tokens",
    ),
    "padding among the tokens": (PADDED, "wide = ", "wide = Pad(x, before_all)", "Pad"),
    "parts along the tokens": (
        PARTS,
        "turned = ",
        "turned = Transpose<perm = [1, 2, 0]>(x)",
        "rows for each token|GatherND",
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_tokens_is_refused(name: str, tmp_path: Path) -> None:
    text, start, substitute, reason = MIXED[name]
    lines = [line.strip() for line in text.splitlines()]
    (place,) = (index for index, line in enumerate(lines) if line.startswith(start))
    lines[place] = substitute
    _, refusal = packed_with("\n".join(lines), tmp_path)

    assert re.search(reason, refusal), refusal
