"""Both operators on CANNExecutionProvider of the real wheel, with the simulated kernels.

The library that is tested is the one that ships. What is compared with is its CPU operators in the
same wheel: caches to the byte, attention to 1e-4.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from simulated_kernels import CODECS, INT4, SIGNED4, ByArchitecture, Kernels, has_kernels
from tests.cann.decoding import CACHES, IN_PLANES, Decoding, assert_agree, assert_same_cache
from tests.cann.fake_acl import FakeAcl
from tests.cann.operators import OURS, Sizes, decoder_attention
from tests.cann.session import CANN, CannSession, on_cpu
from tq_onnx.codec.kind import UNBIASED
from tq_onnx.codec.spec import Codec
from tq_onnx.runtime.library import get_library_path

# Products of floats on the CPU: those with integers differ from them by more than 1e-4.
pytestmark = [pytest.mark.cann, pytest.mark.usefixtures("exact_products")]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("sizes", [Sizes(d, group) for d in (64, 128) for group in (1, 2, 4)])
def test_prefill_and_decode_in_place(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, dtype: str, sizes: Sizes
) -> None:
    model = decoder_attention(dtype, sizes.head_size)
    decoding = Decoding(model, sizes, slots=16, folder=tmp_path)
    past = 0
    for seed, tokens in enumerate((9, 1, 1, 2)):
        decoding.step(sizes.vectors(tokens, dtype, seed), np.array([past]))
        past += tokens
    placed = {node.name: node.provider for node in decoding.cann.end()}
    assert set(placed) >= set(OURS)
    assert set(placed.values()) == {CANN}, placed
    assert fake.counts()[f"kernel.tq_encode_{dtype}"] == 8
    assert fake.counts()[f"kernel.tq_attention_{dtype}"] == 4
    assert simulated.hazards == 0, simulated.messages()


@pytest.mark.parametrize(
    ("codec", "planes"), [*((codec, False) for codec in CODECS), (SIGNED4, True)], ids=str
)
def test_every_codec(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, codec: Codec, planes: bool
) -> None:
    sizes = Sizes(128, 2, codec=codec, planes=planes)
    if not has_kernels(simulated.arch, codec, 128):
        return
    model = decoder_attention("float32", 128, codec=codec, **(IN_PLANES if planes else {}))
    decoding = Decoding(model, sizes, 16, tmp_path)
    for past, tokens in ((0, 9), (9, 1), (10, 2)):
        decoding.step(sizes.vectors(tokens, "float32", past), np.array([past]))
    assert {node.provider for node in decoding.cann.end()} == {CANN}
    assert simulated.hazards == 0, simulated.messages()


def test_an_encoder_that_searches_and_offsets(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path
) -> None:
    """As a calibrated model of the default preset has them; 2 tokens have offsets of their own."""
    rng = np.random.default_rng(2)
    offset = {
        f"{side}_offset": rng.standard_normal((3, 2, 64)).astype(np.float32) for side in CACHES
    }
    # Of two gains there are hardly ever two that are equally good.
    gains = {f"{side}_gains": np.array([1.0, 0.8], np.float32) for side in CACHES}
    model = decoder_attention(encode={"norm_correction": UNBIASED}, constants={**offset, **gains})
    decoding = Decoding(model, Sizes(), slots=16, folder=tmp_path)
    for past, tokens in ((0, 1), (1, 3), (4, 2)):
        decoding.step(Sizes().vectors(tokens, "float32", past), np.array([past]))
    assert {node.provider for node in decoding.cann.end()} == {CANN}
    assert simulated.hazards == 0, simulated.messages()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sliding_window_a_softcap_and_sinks(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, dtype: str
) -> None:
    """A long cache of which little is seen is not cut."""
    sizes = Sizes(64, 2, batch=1)
    sinks = {"head_sink": np.array([1.5, -np.inf, 0.0, -2.0], dtype)}
    bounds = {"sliding_window": 100, "softcap": 20.0}
    model = decoder_attention(dtype, attention=bounds, constants=sinks)
    decoding = Decoding(model, sizes, slots=700, folder=tmp_path)
    for past, tokens in ((0, 9), (9, 591), (600, 1), (601, 2)):
        decoding.step(sizes.vectors(tokens, dtype, past), np.array([past]))
    assert {node.provider for node in decoding.cann.end()} == {CANN}
    assert f"kernel.tq_attention_merge_{dtype}" not in fake.counts()
    assert simulated.hazards == 0, simulated.messages()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_padding_on_the_left(fake: FakeAcl, simulated: Kernels, tmp_path: Path, dtype: str) -> None:
    """Neighbours with the same padding share a launch."""
    sizes = Sizes(64, 2, batch=4)
    model = decoder_attention(dtype, constants={"left_padding": np.array([3, 3, 0, 12])})
    decoding = Decoding(model, sizes, slots=100, folder=tmp_path)
    launches = []
    for past, tokens in ((0, 9), (9, 1), (10, 70), (80, 1)):
        decoding.step(sizes.vectors(tokens, dtype, past), np.array([past]))
        launches.append(fake.counts()[f"kernel.tq_attention_{dtype}"])
    assert launches == [3, 6, 9, 12]
    assert {node.provider for node in decoding.cann.end()} == {CANN}
    assert simulated.hazards == 0, simulated.messages()


def test_a_long_window_is_cut(fake: FakeAcl, simulated: Kernels, tmp_path: Path) -> None:
    sizes = Sizes(64, 2, batch=1)
    sinks = {"head_sink": np.array([1.5, -np.inf, 0.0, -2.0], np.float32)}
    model = decoder_attention(attention={"sliding_window": 600}, constants=sinks)
    decoding = Decoding(model, sizes, slots=1000, folder=tmp_path)
    for past, tokens in ((0, 900), (900, 1)):
        decoding.step(sizes.vectors(tokens, "float32", past), np.array([past]))
    assert fake.counts()["kernel.tq_attention_merge_float32"] == 1
    assert simulated.hazards == 0, simulated.messages()


def test_sequences_of_other_lengths_and_delays(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path
) -> None:
    sizes = Sizes(128, 2)
    decoding = Decoding(decoder_attention("float32", 128), sizes, slots=80, folder=tmp_path)
    fake.set_delay(2000)
    lengths = np.array([0, 0])
    for seed, (tokens, kept) in enumerate([(70, [70, 5]), (1, [71, 6]), (3, [74, 9])]):
        decoding.step(sizes.vectors(tokens, "float32", seed), lengths)
        lengths = np.array(kept)
    assert simulated.hazards == 0, simulated.messages()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_keys_of_a_long_cache_are_cut(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, dtype: str
) -> None:
    """Behind 512 tokens: a launch for all cores, and one that merges what they leave."""
    sizes = Sizes(64, 2, batch=1)
    decoding = Decoding(decoder_attention(dtype, 64), sizes, slots=1100, folder=tmp_path)
    fake.set_delay(500)
    past, merges = 0, []
    for seed, tokens in enumerate((511, 1, 1, 3, 500, 1)):
        simulated.reset()
        decoding.step(sizes.vectors(tokens, dtype, seed), np.array([past]))
        assert simulated.hazards == 0, simulated.messages()
        past += tokens
        merges.append(fake.counts().get(f"kernel.tq_attention_merge_{dtype}", 0))
    # 512 tokens are one part; 500 new tokens are tasks enough.
    assert merges == [0, 0, 1, 2, 2, 3]
    assert simulated.cores_used == min(2 * 2, 40)
    assert {node.provider for node in decoding.cann.end()} == {CANN}


def test_sequences_of_a_long_cache_are_launched_one_behind_the_other(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path
) -> None:
    """Where they are too many for the scratch memory of one launch."""
    sizes = Sizes(64, 1, heads=1, batch=300)
    decoding = Decoding(decoder_attention(), sizes, slots=513, folder=tmp_path)
    rng = np.random.default_rng(3)
    for kind in CACHES:
        rows = decoding.theirs[f"past_{kind}"]
        few = rng.integers(0, 60, (7, 1, 513, rows.shape[-1])).astype(np.uint8)
        rows[:] = few[np.arange(sizes.batch) % 7]
        decoding.caches[kind] = ort.OrtValue.ortvalue_from_numpy(rows, "cann", 0)
    decoding.step(sizes.vectors(1, "float32"), np.array([512]))
    assert simulated.hazards == 0, simulated.messages()
    counts = fake.counts()
    assert counts["kernel.tq_attention_float32"] == 2
    assert counts["kernel.tq_attention_merge_float32"] == 2


def test_in_place_nothing_but_the_new_vectors_and_the_output_is_copied(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path
) -> None:
    sizes = Sizes()
    decoding = Decoding(decoder_attention(), sizes, slots=16, folder=tmp_path)
    for past in range(3):
        fake.reset()
        decoding.step(sizes.vectors(1, "float32", past), np.array([past]))
        counts = fake.copies()
        # Two of the copies to the host are of this test, which reads the caches.
        assert counts == {"host_to_device": 3, "device_to_host": 1 + 2}


@pytest.mark.parametrize("slots", [16, 9, 5])
@pytest.mark.parametrize("planes", [False, True])
def test_without_binding_the_past_is_copied_on_the_device(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, slots: int, planes: bool
) -> None:
    """Slots for all, for some and for none of the new tokens."""
    sizes = Sizes(head_size=64, group=4, codec=SIGNED4 if planes else INT4, planes=planes)
    model = decoder_attention(codec=sizes.codec, **(IN_PLANES if planes else {}))
    ours = CannSession(model, tmp_path, library=get_library_path())
    first = on_cpu(
        model,
        {
            **sizes.vectors(5, "float32"),
            **{f"past_{kind}": sizes.empty_cache(slots) for kind in CACHES},
            "past_length": np.array([0]),
        },
        get_library_path(),
    )
    feeds = {
        **sizes.vectors(5, "float32", 1),
        **{f"past_{kind}": cache for kind, cache in zip(CACHES, first[1:], strict=True)},
        "past_length": np.array([5, 3]),
    }
    fake.set_delay(2000)
    found, wanted = ours.run(feeds), on_cpu(model, feeds, get_library_path())
    for present, expected in zip(found[1:], wanted[1:], strict=True):
        assert_same_cache(present, expected, sizes)
    assert_agree(found[0], wanted[0])
    assert simulated.hazards == 0, simulated.messages()
    assert {node.provider for node in ours.end()} == {CANN}


@pytest.mark.parametrize("slots", [10, 24, 28, 40])
def test_planes_with_exact_tokens_grow(
    fake: FakeAcl, simulated: Kernels, tmp_path: Path, slots: int
) -> None:
    """From less than the rows of the overlay, from just these, from some and to no more."""
    sizes = Sizes(128, codec=SIGNED4, planes=True)
    # An entry of 260 bytes takes four rows.
    window = {"planes": 1, "recent": 4, "sinks": 2, "overlay_rows": 24}
    new = ("new_keys", "new_values")
    model = decoder_attention(
        head_size=128, encode=window, attention=window, optional=new, codec=SIGNED4
    )
    past = max(0, slots - 24) // 2
    vectors = sizes.vectors(7, "float32", past)
    feeds = {
        **vectors,
        **dict(zip(new, (vectors["key"], vectors["value"]), strict=True)),
        **{f"past_{kind}": sizes.empty_cache(slots) for kind in CACHES},
        "past_length": np.array([past]),
    }
    session = CannSession(model, tmp_path, library=get_library_path())
    found, wanted = session.run(feeds), on_cpu(model, feeds, get_library_path())
    for present, expected in zip(found[1:], wanted[1:], strict=True):
        assert_same_cache(present, expected, sizes, window["overlay_rows"])
    assert_agree(found[0], wanted[0])
    assert simulated.hazards == 0, simulated.messages()


def test_kernels_beside_the_library_are_found(
    fake: FakeAcl,
    kernel_files: ByArchitecture[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TQ_ONNX_CANN_KERNELS", raising=False)
    library = Path(shutil.copy(get_library_path(), tmp_path))
    shutil.copy(kernel_files[2201], tmp_path / "libtq_kernels_ascend910b.so")
    CannSession(decoder_attention(), tmp_path, library=library)


def test_the_library_needs_nothing_of_cann() -> None:
    command = ["nm", "-D", "--undefined-only", str(get_library_path())]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "dlopen" in listed
    assert "acl" not in listed
