"""A file that holds a decoder in both branches of an If is converted as a whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import tq_onnx
from tests.agreement.postprocessors import Processor, dynamic, half, q4
from tests.decoders.merging import merge, run, single_outside, transformers_pair
from tests.decoders.onelayer import CACHES, PRESENTS, decoder
from tests.decoders.running import EXACT, FIXTURES, Array, batch
from tests.recognise.test_soundness import BODY, MASK, MERGED
from tq_onnx.conversion.branches import find_switch
from tq_onnx.conversion.inspect import inspect
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert, prepare
from tq_onnx.errors import UnsupportedModelError
from tq_onnx.plan import ENCODER, METADATA_FIRST_PLAN, METADATA_PLAN, Plan
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import generate
from tq_onnx.runtime.opening import open_model
from tq_onnx.verification.verify import verify

UNSEEN = Options(residual_length=0, sink_tokens=0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The merged decoder, whose keys and queries have norms."""
    path = tmp_path_factory.mktemp("merged") / "decoder_model_merged.onnx"
    onnx.save(merge(*transformers_pair()), path)
    return path


@pytest.fixture(scope="module")
def made(path: Path) -> Path:
    target = path.with_name("int4.onnx")
    convert(path, target, preset="int4", options=UNSEEN)
    return target


def converted(path: Path, preset: str) -> ir.Model:
    return prepare(path, preset=preset, options=UNSEEN).loaded.model


@pytest.mark.parametrize("library", [True, False])
def test_both_branches_compute_what_they_did(path: Path, library: bool) -> None:
    model = converted(path, "raw")

    for size, padding in ((1, 0), (2, 3)):
        wanted = run(onnx.load(path), size=size, padding=padding)
        found = run(model, size=size, padding=padding, library=library)
        assert np.abs(found - wanted).max() <= EXACT * np.abs(wanted).max()


@pytest.mark.parametrize("process", [q4, dynamic, half], ids=lambda process: process.__name__)
def test_a_merged_decoder_that_went_through_a_tool(process: Processor, tmp_path: Path) -> None:
    """The float16 converter breaks an If: its branches are converted before they are merged."""
    parts = transformers_pair()
    model = merge(*map(process, parts)) if process is half else process(merge(*parts))
    if process is half:
        single_outside(model)
    path = tmp_path / "model.onnx"
    onnx.save(model, path)

    wanted, found = run(onnx.load(path)), run(converted(path, "raw"))

    bound = 5e-3 if process is half else EXACT
    assert np.abs(found - wanted).max() <= bound * np.abs(wanted).max()


def test_one_branch_goes_on_with_the_rows_of_the_other(path: Path, made: Path) -> None:
    model = ir.load(made)
    plans = [Plan.from_json(model.metadata_props[k]) for k in (METADATA_FIRST_PLAN, METADATA_PLAN)]

    assert [pair.past for plan in plans for pair in (plan.layers[0].key,)] == [
        None,
        "past_key_values.0.key",
    ]
    assert plans[0].unlike(plans[1]) is None
    assert plans[0].layers[0].equalised
    # Scales, rotations and codebooks are there once.
    assert not [name for name in model.graph.initializers if "_branch" in name]
    own, original = run(model), run(onnx.load(path))
    assert np.linalg.norm(own - original) <= 0.1 * np.linalg.norm(original)


def test_a_text_begins_with_the_branch_for_first_prompts(path: Path, made: Path) -> None:
    tokens = batch(9).tokens[0].tolist()
    alone = open_model(FIXTURES / "hf-decode.onnx")
    wanted = generate(alone.decoder(), tokens, max_new_tokens=5).tokens

    for file in (path, made):
        model = open_model(file)
        assert model.first is not None and model.first.signature.first_only
        found = generate(model.decoder(), tokens, max_new_tokens=5).tokens
        assert found == wanted or file is made


def test_more_of_a_text_goes_token_by_token(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch with caches was traced with one token, and may have no mask between several."""
    tokens = batch(9).tokens
    whole = open_model(FIXTURES / "hf-decode.onnx").decoder().prefill(tokens)
    calls = []
    running = Decoder._run

    def run_and_count(self: Decoder, tokens: Array, mask: Array) -> Array:
        calls.append(tokens.shape[1])
        return running(self, tokens, mask)

    monkeypatch.setattr(Decoder, "_run", run_and_count)
    decoder = open_model(path).decoder()

    found = np.concatenate([decoder.prefill(tokens[:, :5]), decoder.prefill(tokens[:, 5:])], axis=1)

    assert calls == [5, 1, 1, 1, 1]
    assert np.abs(found - whole).max() <= EXACT * np.abs(whole).max()


def test_verify_checks_each_branch(path: Path, made: Path, tmp_path: Path) -> None:
    report = verify(path, made, 32, source="ids", context=16, new_tokens=4)

    assert report.holds
    names = [check.name for check in report.checks]
    assert sum(name.startswith("first prompt: ") for name in names) == 15
    broken = onnx.load(made)
    (switch,) = (node for node in broken.graph.node if node.op_type == "If")
    (first,) = (a.g for a in switch.attribute if a.name == "else_branch")
    (product,) = [node for node in first.node if "logits" in node.output]
    product.input[0], moved = "moved", product.input[0]
    first.node.insert(
        len(first.node) - 1, onnx.NodeProto(op_type="Add", input=[moved, moved], output=["moved"])
    )
    onnx.save(broken, tmp_path / "broken.onnx")

    found = verify(path, tmp_path / "broken.onnx", 32, source="ids", context=16, new_tokens=4)

    failed = [check.name for check in found.checks if check.holds is False]
    assert failed
    assert all(name.startswith("first prompt: ") for name in failed)


def test_inspect_tells_what_stands_in_the_way_of_either_branch(path: Path, tmp_path: Path) -> None:
    assert inspect(path).convertible
    first, following = transformers_pair()
    softmax = next(node for node in first.graph.node if node.op_type == "Softmax")
    softmax.attribute[0].i = 1
    onnx.save(merge(first, following), tmp_path / "model.onnx")

    report = inspect(tmp_path / "model.onnx")

    assert not report.convertible
    with pytest.raises(UnsupportedModelError, match="layer 0"):
        converted(tmp_path / "model.onnx", "int4")


def test_branches_whose_caches_change_places_are_refused(tmp_path: Path) -> None:
    first, following = transformers_pair()
    swapped = {f"present.{layer}.key": f"present.{1 - layer}.key" for layer in (0, 1)}
    for node in first.graph.node:
        node.input[:] = [swapped.get(name, name) for name in node.input]
        node.output[:] = [swapped.get(name, name) for name in node.output]
    onnx.save(merge(first, following), tmp_path / "model.onnx")

    with pytest.raises(UnsupportedModelError, match="same caches in the same order"):
        converted(tmp_path / "model.onnx", "raw")
    (miss,) = inspect(tmp_path / "model.onnx").misses
    assert "same caches in the same order" in miss.reason


def test_scales_that_one_branch_cannot_take_are_foreseen(tmp_path: Path) -> None:
    first, following = transformers_pair()
    weights = {tensor.name for tensor in first.graph.initializer if "q_norm" in tensor.name}
    scaled = next(node for node in first.graph.node if weights & {*node.input})
    plain = [name for name in scaled.input if name not in weights]
    scaled.op_type, scaled.input[:] = "Identity", plain
    onnx.save(merge(first, following), tmp_path / "model.onnx")

    with pytest.raises(UnsupportedModelError, match="give `equalize=False`"):
        converted(tmp_path / "model.onnx", "int4")
    (miss,) = inspect(tmp_path / "model.onnx").misses
    assert "scales find a place in one of them only; give `equalize=False`" in miss.reason


def test_two_branches_with_caches_are_no_merged_decoder(tmp_path: Path) -> None:
    _, following = transformers_pair()
    _, same = transformers_pair()
    onnx.save(merge(same, following), tmp_path / "model.onnx")

    with pytest.raises(UnsupportedModelError, match="made by If"):
        converted(tmp_path / "model.onnx", "raw")


def test_a_branch_that_is_chosen_by_a_cache_stays(path: Path) -> None:
    model = onnx.load(path)
    (switch,) = model.graph.node
    switch.input[0] = "chosen"
    size = onnx.NodeProto(op_type="Size", input=["past_key_values.0.key"], output=["size"])
    flag = onnx.NodeProto(op_type="Cast", input=["size"], output=["chosen"])
    flag.attribute.add(name="to", type=onnx.AttributeProto.INT, i=onnx.TensorProto.BOOL)
    del model.graph.node[:]
    model.graph.node.extend([size, flag, switch])

    assert find_switch(ir.from_proto(model).graph) is None


FIRST = (
    ("old = Shape<start = 2, end = 3>(past_key)", "old = Identity(zero_1)"),
    ("present_key = Concat<axis = 2>(past_key, k)", "present_key = Identity(k)"),
    ("present_value = Concat<axis = 2>(past_value, v)", "present_value = Identity(v)"),
)
MADE = """ek0 = MatMul(encoder, w_k)
        ev0 = MatMul(encoder, w_v)
        ek1 = Reshape(ek0, kv_shape)
        ev1 = Reshape(ev0, kv_shape)
        present_cross_key = Transpose<perm = [0, 2, 1, 3]>(ek1)
        present_cross_value = Transpose<perm = [0, 2, 1, 3]>(ev1)
"""
GIVEN = """present_cross_key = Identity(past_cross_key)
        present_cross_value = Identity(past_cross_value)
"""
CROSS = """o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, merged_shape)
        ck = Transpose<perm = [0, 1, 3, 2]>(present_cross_key)
        cs = MatMul(q, ck)
        cp = Softmax<axis = -1>(cs)
        co = MatMul(cp, present_cross_value)
        c1 = Transpose<perm = [0, 2, 1, 3]>(co)
        c2 = Reshape(c1, merged_shape)
        merged = Add(o2, c2)
"""
KEYS = "float[B, 2, E, 16] {0}_cross_key, float[B, 2, E, 16] {0}_cross_value"


def over_an_encoder(*, first: bool) -> onnx.ModelProto:
    """A decoder that makes an encoder's keys and values at first, and is given them afterwards."""
    body = BODY.replace(MERGED, (MADE if first else GIVEN) + CROSS)
    for old, new in FIRST if first else ():
        assert old in body
        body = body.replace(old, new)
    source = "float[B, E, 32] encoder" if first else f"{KEYS.format('past')}, {CACHES}"
    outputs = f"{PRESENTS}, {KEYS.format('present')}"
    return ir.to_proto(decoder(body, inputs=MASK + source, outputs=outputs))


def test_what_an_encoder_makes_stays(tmp_path: Path) -> None:
    path, target = tmp_path / "model.onnx", tmp_path / "int4.onnx"
    onnx.save(merge(over_an_encoder(first=True), over_an_encoder(first=False)), path)

    model = converted(path, "raw")

    wanted, found = run(onnx.load(path), size=2), run(model, size=2)
    assert np.abs(found - wanted).max() <= EXACT * np.abs(wanted).max()
    plan = convert(path, target, preset="int4", options=UNSEEN).plan
    roles = {entry.name: entry.role for entry in plan.interface.fed}
    assert roles == {"past_cross_key": ENCODER, "past_cross_value": ENCODER}
    assert verify(path, target, 32, source="ids", context=16, new_tokens=4).holds
    with pytest.raises(UnsupportedModelError, match="encoder makes"):
        tq_onnx.load(target)
