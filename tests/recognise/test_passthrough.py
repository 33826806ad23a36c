"""States of recurrent layers and what an encoder makes stay as they are, beside caches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from tests.decoders.onelayer import CACHES, PRESENTS, TOKENS, decoder
from tests.decoders.running import NUMPY, Array, convert, session
from tests.recognise.test_soundness import BODY, CACHED, EXACT, MASK, MERGED, reason
from tq_onnx.plan import CachePair
from tq_onnx.recognise.match import recognise

CHUNKS = (5, 1, 3, 1)
SEEN = 4

RECURRENT = """o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, merged_shape)
        turned = Transpose<perm = [0, 1, 3, 2]>(k)
        outer = MatMul(turned, v)
        decayed = Mul(past_state, quarter)
        present_state = Add(decayed, outer)
        read = MatMul(q, present_state)
        r1 = Transpose<perm = [0, 2, 1, 3]>(read)
        r2 = Reshape(r1, merged_shape)
        merged = Add(o2, r2)
"""
STATE = "float[B, 2, 16, 16] past_state, "
CROSS = """o1 = Transpose<perm = [0, 2, 1, 3]>(o)
        o2 = Reshape(o1, merged_shape)
        ek0 = MatMul(SOURCE, w_k)
        ev0 = MatMul(SOURCE, w_v)
        ek1 = Reshape(ek0, kv_shape)
        ev1 = Reshape(ev0, kv_shape)
        present_cross = Transpose<perm = [0, 2, 3, 1]>(ek1)
        cv = Transpose<perm = [0, 2, 1, 3]>(ev1)
        cs = MatMul(q, present_cross)
        cp = Softmax<axis = -1>(cs)
        co = MatMul(cp, cv)
        c1 = Transpose<perm = [0, 2, 1, 3]>(co)
        c2 = Reshape(c1, merged_shape)
        merged = Add(o2, c2)
"""


def recurrent(change: Callable[[str], str] = str) -> ir.Model:
    """A hybrid: attention with caches beside a linear attention with a state."""
    return decoder(
        change(BODY.replace(MERGED, RECURRENT)),
        inputs=MASK + STATE + CACHES,
        outputs=f"float[B, 2, 16, 16] present_state, {PRESENTS}",
    )


def by_transformers(made: ir.Model) -> ir.Model:
    """The state as transformers' exporter tells it, which names the sizes of inputs."""
    past, present = states_of(made)
    past.name, present.name = "input.layers.0.state", "output.layers.0.state"
    past.shape = ir.Shape(["B", "2", "16", "16"])
    return made


def states_of(made: ir.Model) -> tuple[ir.Value, ir.Value]:
    values = {value.name: value for value in (*made.graph.inputs, *made.graph.outputs)}
    return values["past_state"], values["present_state"]


def first_prompt(tokens: str = "T", change: Callable[[str], str] = str) -> ir.Model:
    """The hybrid without caches, for so many tokens."""
    body = BODY.replace(MERGED, RECURRENT)
    for old, new in (
        ("old = Shape<start = 2, end = 3>(past_key)", "old = Identity(zero_1)"),
        (CACHED, "present_key = Identity(k)\n present_value = Identity(v)\n"),
        ("[0, 1, 3, 2]>(k)", "[0, 1, 3, 2]>(q)"),
        ("outer = MatMul(turned, v)", "present_state = MatMul(turned, q)"),
        ("decayed = Mul(past_state, quarter)\n", ""),
        ("present_state = Add(decayed, outer)\n", ""),
    ):
        assert body.count(old) == 1, old
        body = body.replace(old, new)
    made = decoder(
        change(body), inputs=MASK, outputs=f"float[B, 2, 16, 16] present_state, {PRESENTS}"
    )
    if tokens != "T":
        made.graph.inputs[0].shape = ir.Shape(["B", int(tokens)])
    return made


def attended(body: str) -> str:
    """Attention reads the state."""
    return body.replace(
        "read = MatMul(q, present_state)",
        "st = Transpose<perm = [0, 1, 3, 2]>(present_state)\n ss = MatMul(q, st)\n"
        "sp = Softmax<axis = -1>(ss)\n read = MatMul(sp, present_state)",
    )


def over_an_encoder(source: str = "encoder") -> ir.Model:
    """A decoder of a pair: its keys and values of the encoder are an output, or are not."""
    cross = ", float[B, 2, 16, E] present_cross" if source == "encoder" else ""
    return decoder(
        BODY.replace(MERGED, CROSS.replace("SOURCE", source)),
        inputs=f"{MASK}float[B, E, 32] encoder, {CACHES}",
        outputs=PRESENTS + cross,
    )


def run(
    model: ir.Model, chunks: tuple[int, ...] = CHUNKS, batch: int = 2
) -> list[dict[str, Array]]:
    """All outputs that are no caches, of some calls."""
    running = session(model, library=True)
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, TOKENS, (batch, sum(chunks)))
    mask = np.ones_like(tokens)
    mask[0, :2] = 0
    given = {"encoder": rng.standard_normal((batch, SEEN, 32))}
    held: dict[str, Array] = {}
    found, start = [], 0
    for chunk in chunks:
        stop = start + chunk
        calls = {"input_ids": tokens[:, start:stop], "attention_mask": mask[:, :stop]} | given
        feeds = {}
        for entry in running.get_inputs():
            sizes = [batch, *(size if isinstance(size, int) else 0 for size in entry.shape[1:])]
            value = held.get(entry.name, calls.get(entry.name))
            value = np.zeros(sizes) if value is None else value
            feeds[entry.name] = value.astype(NUMPY[entry.type])
        names = [entry.name for entry in running.get_outputs()]
        results = dict(zip(names, running.run(names, feeds), strict=True))
        held = {name.replace("present", "past"): value for name, value in results.items()}
        real = mask[:, start:stop].astype(bool)
        results["logits"] = results["logits"][real]
        found.append(
            {k: v for k, v in results.items() if k not in ("present_key", "present_value")}
        )
        start = stop
    return found


def agrees(make: Callable[[], ir.Model], chunks: tuple[int, ...] = CHUNKS) -> bool:
    made = make()
    convert(made, "raw")
    return all(
        np.abs(found[name] - value).max() <= EXACT * np.abs(value).max()
        for wanted, found in zip(run(make(), chunks), run(made, chunks), strict=True)
        for name, value in wanted.items()
    )


def test_a_state_stays_and_is_named() -> None:
    recognition = recognise(recurrent())

    assert recognition.misses == ()
    assert recognition.interface is not None
    assert recognition.interface.states == (CachePair("past_state", "present_state"),)
    assert len(recognition.sites) == 1
    assert agrees(recurrent)


def test_a_state_by_the_names_of_transformers() -> None:
    recognition = recognise(by_transformers(recurrent()))

    assert recognition.misses == ()
    assert recognition.interface is not None
    pair = CachePair("input.layers.0.state", "output.layers.0.state")
    assert recognition.interface.states == (pair,)


def test_a_state_of_a_first_prompt_has_no_input() -> None:
    recognition = recognise(first_prompt())

    assert recognition.misses == ()
    assert recognition.interface is not None
    assert recognition.interface.states == (CachePair(None, "present_state"),)
    assert agrees(first_prompt, CHUNKS[:1])


def test_what_may_grow_with_the_tokens_is_no_state() -> None:
    """In a graph for five tokens a cache has one size, too."""
    assert "the scores go through Transpose" in reason(first_prompt("5"))


@pytest.mark.parametrize("make", [recurrent, lambda it: by_transformers(recurrent(it))])
def test_a_state_that_attention_reads_is_refused(
    make: Callable[[Callable[[str], str]], ir.Model],
) -> None:
    """It is a cache of a size that never changes, and of an update that is not known."""
    assert "state is made by Add" in reason(make(attended))


def test_a_state_of_a_first_prompt_that_attention_reads_is_refused() -> None:
    assert reason(first_prompt(change=attended))


def test_an_input_of_another_size_is_no_state() -> None:
    made = recurrent()
    states_of(made)[0].shape = ir.Shape(["B", 2, 16, 1])

    assert "present_state is made by Add" in reason(made)


def test_an_output_that_no_input_continues_is_no_state() -> None:
    made = recurrent()
    states_of(made)[0].name = "other"

    assert "present_state is made by Add" in reason(made)


def test_nothing_but_states() -> None:
    made = recurrent()
    keep = [value for value in made.graph.outputs if value.name in ("logits", "present_state")]
    made.graph.outputs.clear()
    made.graph.outputs.extend(keep)

    assert recognise(made).sites == ()
    assert "present_state" in reason(made)


def test_attention_over_an_encoder_stays() -> None:
    assert len(recognise(over_an_encoder()).sites) == 1
    assert agrees(over_an_encoder)


@pytest.mark.parametrize("source", ["x", "y0"])
def test_other_attention_without_a_cache_is_refused(source: str) -> None:
    made = over_an_encoder("x")
    if source == "y0":  # of the encoder and of the tokens
        node = next(node for node in made.graph if node.outputs[0].name == "ev0")
        encoder = next(value for value in made.graph.inputs if value.name == "encoder")
        node.replace_input_with(0, encoder)

    assert "has no cache that was recognised" in reason(made)
