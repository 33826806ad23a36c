"""``calibrate``: statistics of what the original itself puts into its caches, by every export."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from tests.agreement.surgery import embeddings_given
from tests.files.models import external, snapshot
from tests.runtime.models import DYNAMO, GENAI, VOCABULARY, converted, ids, original
from tq_onnx.codec.calibration import Calibration
from tq_onnx.errors import AlreadyConvertedError, UnsupportedModelError, UsageError
from tq_onnx.progress import Progress
from tq_onnx.quality import calibrate as module
from tq_onnx.quality import rotaries
from tq_onnx.quality.calibrate import POSITIONS, calibrate
from tq_onnx.runtime.opening import open_original

CONTEXT, HEAD_SIZE = 24, 16
FEWEST = 61
"""Token ids of the smallest fixture."""


def words(count: int) -> np.ndarray:
    return ids(count, seed=3)[0] % FEWEST


TEXT = words(65)

TABLES = ("k_mean", "k_energy", "v_mean", "v_energy", "q_energy", "query_covariance")


@pytest.fixture(scope="module", autouse=True)
def several_calls_in_a_window() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK", 10)
        patch.setattr(rotaries, "POSITIONS", 40)  # enough, and sooner read
        yield


@cache
def plain(name: str) -> Calibration:
    return gather(name)


def gather(name: str, text: np.ndarray = TEXT, **options: object) -> Calibration:
    options = {"context": CONTEXT, "threads": 1, "library": False, **options}
    return calibrate(original(name), text, **options)  # type: ignore[arg-type]


def rows(vectors: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts, means and energies ``[P, N, D]`` of windows ``[N, T, D]``."""
    parts = []
    for position in range(POSITIONS):
        last = position == POSITIONS - 1
        taken = [each[:, position : None if last else position + 1] for each in vectors]
        parts.append(np.concatenate(taken, axis=1).astype(np.float64))
    reached = [part for part in parts if part.shape[1]]
    return (
        np.array([part.shape[1] for part in reached]),
        np.array([part.mean(1) for part in reached]),
        np.array([(part**2).mean(1) for part in reached]),
    )


def cached(name: str, text: np.ndarray, context: int) -> list[list[np.ndarray]]:
    """What the original itself has in each cache, after each window."""
    decoder = open_original(original(name), threads=1).decoder()
    found: list[list[np.ndarray]] = [[] for _ in decoder.signature.caches]
    for start in range(0, len(text), context):
        decoder.reset()
        decoder.prefill(text[None, start : start + context])
        for index, vectors in enumerate(found):
            vectors.append(decoder.cache(index)[0])
    return found


@pytest.mark.parametrize(
    "name",
    [
        DYNAMO,
        GENAI,
        "dynamo-gemma3",  # sliding windows
        "dynamo-op18-sdpa-hd128-fp16",
        "hf-prefill",  # takes no caches
        "hf-decode",
        "hf-static-decode",  # does not grow its caches
        "legacy-one-token",  # one call for each token
        "mobius-static",
        "optimum",
    ],
)
def test_keys_and_values_are_those_of_the_originals_caches(name: str) -> None:
    found = plain(name)
    wanted = cached(name, TEXT, CONTEXT)
    assert 2 * len(found.layers) == len(wanted)
    rtol, atol = (1e-2, 1e-3) if "fp16" in name else (1e-4, 1e-5)
    for index, layer in enumerate(found.layers):
        for letter, vectors in zip("kv", wanted[2 * index : 2 * index + 2], strict=True):
            counts, means, energies = rows(vectors)
            np.testing.assert_array_equal(found.counts, counts)
            mean, energy = (getattr(layer, f"{letter}_{kind}") for kind in ("mean", "energy"))
            np.testing.assert_allclose(mean, means, rtol=rtol, atol=atol)
            np.testing.assert_allclose(energy, energies, rtol=rtol, atol=atol)


def unturned(vectors: np.ndarray, base: float = 1e6) -> np.ndarray:
    """Queries or keys ``[heads, T, D]`` from position 0 on, as they were before they turned."""
    pairs = vectors.shape[-1] // 2
    angles = np.arange(vectors.shape[1])[:, None] * base ** (-np.arange(pairs) / pairs)
    numbers = vectors[..., :pairs] + 1j * vectors[..., pairs:].astype(np.float64)
    still = numbers * np.exp(-1j * angles)
    return np.concatenate([still.real, still.imag], axis=-1)


@pytest.mark.parametrize(
    ("name", "bases", "source"),
    [
        (DYNAMO, [1e6, 1e6], "a table of the graph"),
        (GENAI, [1e6, 1e6], "powers of the base 1000000"),  # an operator turns queries and keys
        ("dynamo-gemma3", [1e4, 1e6], "a table of the graph"),  # local and global layers
        ("legacy-one-token", [1e6, 1e6], "powers of the base 1000000"),
        ("dynamo-op18-sdpa-hd128-fp16", [1e6, 1e6], "a table of the graph"),
    ],
)
def test_angles_are_measured_and_means_turn(name: str, bases: list[float], source: str) -> None:
    found = plain(name)
    caches = cached(name, TEXT, CONTEXT)[::2]
    for layer, keys, base in zip(found.layers, caches, bases, strict=True):
        assert layer.angles == source
        pairs = layer.head_size // 2
        frequencies = np.tile(base ** (-np.arange(pairs) / pairs), 2)
        np.testing.assert_allclose(layer.frequencies, frequencies, rtol=3e-7)
        still = np.concatenate([unturned(each, base)[:, 4:] for each in keys], axis=1)
        assert layer.k_turned_mean is not None
        mean, kept = layer.k_turned_mean[0], layer.k_turned_mean[0] != 0
        tolerance = 1e-2 if "fp16" in name else 1e-4
        np.testing.assert_allclose(mean[kept], still.mean(1)[kept], tolerance, 0.1 * tolerance)


def test_keys_with_learned_positions_are_not_centered(tmp_path: Path) -> None:
    model = ir.load(original(DYNAMO))
    (ids_node,) = (node for node in model.graph if model.graph.inputs[0] in node.inputs[1:2])
    embedded = ids_node.outputs[0]
    table = np.random.default_rng(0).standard_normal((512, embedded.shape[-1]))  # type: ignore
    positions = next(value for value in model.graph.inputs if value.name == "position_ids")
    rows = ir.val("learned", const_value=ir.tensor(table.astype(np.float32), name="learned"))
    model.graph.register_initializer(rows)
    gather_rows = ir.node("Gather", [rows, positions])
    summed = ir.node("Add", [embedded, gather_rows.outputs[0]])
    embedded.replace_all_uses_with(summed.outputs[0])
    summed.replace_input_with(0, embedded)
    model.graph.insert_after(ids_node, [gather_rows, summed])
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    found = calibrate(path, TEXT, context=CONTEXT, library=False, threads=1)
    assert found.turns_unknown.startswith("the keys of layer 0 and 1 more are not centered: ")
    for layer in found.layers:
        assert layer.pairing is None
        assert layer.k_turned_mean is not None
        assert not layer.k_turned_mean.any()


def test_queries_are_those_of_the_originals_attention() -> None:
    name = "dynamo-op23-sdpa"
    proto = onnx.load(original(name))
    queries = [node.input[0] for node in proto.graph.node if node.op_type == "Attention"]
    proto.graph.output.extend(onnx.ValueInfoProto(name=query) for query in queries)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    sums: list[np.ndarray] = [np.zeros(1)] * len(queries)
    products: list[np.ndarray] = [np.zeros(1)] * len(queries)
    shapes = {entry.name: entry.shape for entry in session.get_inputs()}
    for start in range(0, len(TEXT), CONTEXT):
        window = TEXT[None, start : start + CONTEXT]
        feeds = {
            "input_ids": window,
            "attention_mask": np.ones_like(window),
            "position_ids": np.arange(window.shape[1])[None],
        }
        for entry, shape in shapes.items():
            if entry not in feeds:
                feeds[entry] = np.zeros((1, shape[1], 0, shape[3]), np.float32)
        given = {key: value for key, value in feeds.items() if key in shapes}
        for index, query in enumerate(session.run(queries, given)):
            wide = unturned(query[0])
            assert wide.shape[1:] == (window.shape[1], HEAD_SIZE)
            sums[index] = sums[index] + (wide**2).sum(1)
            products[index] = products[index] + np.einsum("htd,hte->hde", wide, wide)
    found = gather(name)
    for layer, wanted, product in zip(found.layers, sums, products, strict=True):
        np.testing.assert_allclose(layer.q_energy, wanted / len(TEXT), rtol=1e-4, atol=1e-6)
        heads = layer.kv_num_heads
        assert layer.num_heads > heads  # so that there are groups
        each = product.reshape(heads, -1, HEAD_SIZE, HEAD_SIZE).mean(1) / len(TEXT)
        np.testing.assert_allclose(layer.query_covariance, each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [GENAI, "hf-prefill", "legacy-one-token"])
def test_exports_of_one_model_agree(name: str) -> None:
    """As far as they are of one: rotary embedding inside an operator, no caches, single tokens."""
    one, other = plain(REFERENCE[name]), plain(name)
    for left, right in zip(one.layers, other.layers, strict=True):
        for table in TABLES:
            wanted = getattr(left, table)
            np.testing.assert_allclose(getattr(right, table), wanted, rtol=1e-3, atol=1e-5)


REFERENCE = {GENAI: DYNAMO, "hf-prefill": "hf-decode", "legacy-one-token": "legacy-op17-sdpa"}


def test_kernels_and_bodies_agree() -> None:
    bodies, kernels = plain(DYNAMO), gather(DYNAMO, library=True)
    for left, right in zip(bodies.layers, kernels.layers, strict=True):
        for table in TABLES:
            wanted = getattr(left, table)
            np.testing.assert_allclose(getattr(right, table), wanted, rtol=1e-4, atol=1e-5)
    assert bodies.text_digest == kernels.text_digest


def test_windows_of_a_graph_that_takes_a_fixed_prompt() -> None:
    """It sees whole prompts of its length only; what is left of the text is not read."""
    found = gather("hf-static-prefill", words(200), context=1000)
    assert found.context == 6
    whole = 200 // found.context
    assert found.counts.sum() == whole * found.context
    assert found.tokens == whole * found.context


def test_windows_are_no_longer_than_the_room_of_the_caches() -> None:
    room = open_original(original("hf-static-decode"), threads=1).room
    assert room is not None
    found = gather("hf-static-decode", words(3 * room + 1), context=room + 50)
    assert found.context == room
    assert found.counts[0] == 4
    assert found.counts[1] == 3
    assert found.counts.sum() == 3 * room + 1


def test_each_window_begins_as_texts_do() -> None:
    begin = [1, 2]
    found = gather(DYNAMO, context=CONTEXT, begin=begin)
    new = CONTEXT - len(begin)
    # The third window is two tokens shorter without.
    assert found.counts.sum() == len(TEXT) + 3 * len(begin)
    parts = [np.append(begin, TEXT[start : start + new]) for start in range(0, len(TEXT), new)]
    vectors = [cached(DYNAMO, part, CONTEXT)[0][0] for part in parts]
    counts, means, _ = rows(vectors)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.layers[0].k_mean, means, rtol=1e-4, atol=1e-5)
    assert (found.tokens, found.context) == (len(TEXT), CONTEXT)


def test_long_windows_have_several_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHORTEST_PART", 5)
    found = gather(DYNAMO, context=20)  # 20, 10, 5, 20 and the last 10
    assert found.counts.tolist() == [5] * 5 + [4] * 5 + [2] * 6 + [8]
    assert (found.tokens, found.context) == (65, 20)
    starts = ((0, 20), (20, 30), (30, 35), (35, 55), (55, 65))
    vectors = [cached(DYNAMO, TEXT[slice(*part)], CONTEXT)[0][0] for part in starts]
    np.testing.assert_allclose(found.layers[0].k_mean, rows(vectors)[1], rtol=1e-4, atol=1e-5)
    monkeypatch.undo()
    assert module._windows(3000, 1023) == [slice(start, start + 1023) for start in (0, 1023, 2046)]
    assert [part.stop for part in module._windows(2000, 1024)] == [1024, 1536, 1792, 2816]


def test_beginnings_of_more_windows_are_read_for_the_first_positions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_BEGINNINGS", 5)
    seen: list[Progress] = []
    found = gather(DYNAMO, on_progress=seen.append)
    starts = [65 // 4, 3 * 65 // 4]  # besides three whole windows
    assert seen[-2:] == [Progress("Reading the beginnings of windows", n, 2) for n in (1, 2)]
    assert found.counts.tolist() == [5] * 16 + [17]
    assert (found.tokens, found.text_digest) == (65, plain(DYNAMO).text_digest)
    parts = [TEXT[start : start + CONTEXT] for start in range(0, 65, CONTEXT)]
    parts += [TEXT[start : start + POSITIONS - 1] for start in starts]
    vectors = [cached(DYNAMO, part, CONTEXT)[0][0] for part in parts]
    counts, means, _ = rows(vectors)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.layers[0].k_mean, means, rtol=1e-4, atol=1e-5)


def test_what_is_told() -> None:
    seen: list[Progress] = []
    found = gather(DYNAMO, on_progress=seen.append)
    counts = (10, 20, 24, 34, 44, 48, 58, 65)
    assert seen == [Progress("Reading the text", done, 65) for done in counts]
    assert (found.tokens, found.context) == (65, 24)
    assert found.counts.tolist() == [3] * 16 + [8 + 8 + 1]
    assert plain(DYNAMO).text_digest == found.text_digest
    assert gather(DYNAMO, TEXT[::-1]).text_digest != found.text_digest


def test_the_original_and_its_data_stay(tmp_path: Path) -> None:
    path = external(tmp_path / "m")
    before = snapshot(path.parent)
    found = calibrate(path, TEXT, context=CONTEXT, library=False, threads=1)
    assert snapshot(path.parent) == before
    np.testing.assert_array_equal(found.layers[0].k_mean, plain(DYNAMO).layers[0].k_mean)


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AlreadyConvertedError):
        calibrate(converted(DYNAMO), TEXT, library=False)
    with pytest.raises(UsageError, match="0 tokens are too few"):
        gather(DYNAMO, TEXT[:0])
    with pytest.raises(UsageError, match=f"but the model knows {VOCABULARY}"):
        gather(DYNAMO, np.append(TEXT, VOCABULARY))
    with pytest.raises(UsageError, match="reach from -1 "):
        gather(DYNAMO, begin=[-1])
    with pytest.raises(UsageError, match="windows of 2 tokens have no room for a text"):
        gather(DYNAMO, context=2, begin=[1, 2])
    with pytest.raises(UsageError, match="windows of 0 tokens"):
        gather(DYNAMO, context=0)
    model = ir.load(original(GENAI))
    embeddings_given(model)
    path = tmp_path / "model.onnx"
    ir.save(model, path)
    with pytest.raises(UnsupportedModelError, match="takes embeddings"):
        calibrate(path, TEXT, library=False)
