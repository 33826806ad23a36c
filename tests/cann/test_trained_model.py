"""The trained Qwen3, converted for CANN, in the real wheel: 64 tokens beside the CPU provider.

The device is simulated and so are its kernels; provider, session, converted file, operators'
library and runner are those that a user has. What is compared with is the same file on the CPU
provider of the same wheel.

Two providers sum in different orders. Now and then a coordinate of a key or value lies within that
noise of the boundary between two codes, and then either code is right; or two gains have codes that
are equally good to within it. Behind such a tie a decoder goes its own way by a little. So several
texts are read: up to its first tie each is held to the limits, a tie may change one row, and some
text has none. That a tie is one is shown by
``verify --ep cann`` (tests/cann/test_ep_verify.py).

An exact window keeps float16 numbers, of which some are another from the first token on. So rows
are compared without one, and a model with one by what the reference makes of the device's own
vectors, entries to the byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.transformers.float16 import convert_float_to_float16

from simulated_kernels import ARCHITECTURES, Kernels
from tests.cann.bench import Measured
from tests.cann.fake_acl import FakeAcl
from tests.cann.session import CANN, CPU, Array, CannSession
from tq_onnx.ascend.targets import CANN as CANN_TARGET
from tq_onnx.codec.acceptance import FIELD_STEPS
from tq_onnx.conversion.options import Options
from tq_onnx.conversion.pipeline import convert
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.huggingface import load_tokenizer
from tq_onnx.measure.expose_internals import expose_internals
from tq_onnx.runtime import providers
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.library import get_library_path
from tq_onnx.runtime.model import OpenModel
from tq_onnx.runtime.opening import open_converted
from tq_onnx.verification.devices import MAX_VECTOR_ERROR, compare_providers

pytestmark = pytest.mark.cann

Made = tuple[str, str]
"""An export and a preset."""

ROUTES = ("dynamo", "genai")
HALF = "float16"
MODELS: tuple[Made, ...] = (
    *((route, "int4") for route in ROUTES),
    ("genai", "int3"),
    (HALF, "int4"),
    (HALF, "signed4"),
    ("dynamo", "signed4"),
)
WINDOWED: tuple[Made, ...] = (("dynamo", "int4"), ("genai", "int3"), ("dynamo", "signed4"))
"""As their presets are, with the exact window; the others have none."""
PLACES = (7000, 5000, 9000)
"""Where in the held-out text prompts begin."""
PROMPT, STEPS = 24, 64
LENGTHS = (PROMPT, 20, 17)
"""Of the prompts of a batch."""
CAPACITY = 128
LAYERS = 4
TOLERANCE = 1e-4
DIGITS = 1e-2
"""The same by CANN's attention, with queries and sums in float16."""
MOST_COPIES = 1
"""Between host and device in a step: the logits."""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The bundled model by exporters, and in float16, as ONNX Runtime's own tool rounds it."""
    files = {route: build_bundled(route, tmp_path_factory.mktemp(route)) for route in ROUTES}
    half = convert_float_to_float16(onnx.load(files["dynamo"]))
    files[HALF] = tmp_path_factory.mktemp(HALF) / "model.onnx"
    onnx.save(half, files[HALF])
    return files


@pytest.fixture(scope="module")
def converted(originals: dict[str, Path]) -> dict[Made, Path]:
    files = {}
    for export, preset in MODELS:
        files[export, preset] = originals[export].with_name(f"{preset}.cann.onnx")
        convert(
            originals[export], files[export, preset],
            preset=preset, options=Options(residual_length=0, sink_tokens=0), target=CANN_TARGET,
        )  # fmt: skip
    return files


@pytest.fixture(scope="module")
def windowed(originals: dict[str, Path]) -> dict[Made, Path]:
    files = {}
    for export, preset in WINDOWED:
        files[export, preset] = originals[export].with_name(f"{preset}.window.onnx")
        convert(
            originals[export], files[export, preset],
            preset=preset, options=Options(residual_length=64, sink_tokens=4), target=CANN_TARGET,
        )  # fmt: skip
    return files


@pytest.fixture(scope="module")
def prompts(originals: dict[str, Path]) -> list[list[int]]:
    tokenizer, text = load_tokenizer(originals["dynamo"].parent), heldout_text()
    return [tokenizer.encode(text[place : place + 400])[:PROMPT] for place in PLACES]


@dataclass(frozen=True)
class Bench:
    """The simulated device, the models, and where figures go."""

    fake: FakeAcl
    converted: dict[Made, Path]
    measured: Measured


@pytest.fixture
def bench(fake: FakeAcl, converted: dict[Made, Path], measured: Measured) -> Bench:
    return Bench(fake, converted, measured)


@dataclass(frozen=True, eq=False)
class Compared:
    """A text on the device and on the CPU.

    Attributes:
        same_tokens: whether all greedy tokens are.
        logit_error: largest difference of a logit before the first difference of a cache.
        tie_bytes: bytes of the first cache row that differs; 0 if none does.
        row_bytes: bytes of a row.
        bytes_differing: those of all caches at the end.
        copies: the most between host and device in a step.
        kernels: launches of our kernels in the last step.
        operators: launches of the provider's single operators, likewise.
        layers: of the model.
    """

    same_tokens: bool
    logit_error: float
    tie_bytes: int
    row_bytes: int
    bytes_differing: int
    copies: int
    kernels: int
    operators: int
    layers: int

    @property
    def launches(self) -> dict[str, float]:
        """What run.sh prints: all of a step, and by layer."""
        told = {"kernels": self.kernels, "operators": self.operators}
        return {**told, "by_layer": (self.kernels + self.operators) / self.layers}


def compare(host: OpenModel, device: OpenModel, fake: FakeAcl, *prompts: list[int]) -> Compared:
    """Decodes greedily on both, with caches of fixed capacity, in place.

    Several prompts are a batch; shorter ones are padded on the left.
    """
    rows = len(prompts)
    own, its = (model.decoder(capacity=CAPACITY, batch=rows) for model in (host, device))
    ids = np.zeros((rows, max(map(len, prompts))), np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
    same, error, tie, copies = True, 0.0, 0, 0
    for step in range(1 + STEPS):
        expected = own.prefill(ids, mask)[:, -1]
        fake.reset()
        found = its.prefill(ids, mask)[:, -1]
        counts, launched = fake.copies(), fake.counts()
        if step > 0:
            between = counts.get("host_to_device", 0) + counts.get("device_to_host", 0)
            copies = max(copies, between)
        same = same and np.array_equal(found.argmax(axis=-1), expected.argmax(axis=-1))
        tie = tie or _first_difference(own, its)
        if not tie:
            error = max(error, float(np.abs(found - expected).max()))
        ids = expected.argmax(axis=-1)[:, None]
        mask = np.ones_like(ids)
    assert its.in_place
    width = own.cache(0).shape[-1]
    layers = len(own.signature.caches) // 2
    kernels, operators = (_launches(launched, kind) for kind in ("kernel.", "op."))
    differing = sum(_differing(own, its))
    return Compared(same, error, tie, width, differing, copies, kernels, operators, layers)


def _launches(counts: dict[str, int], kind: str) -> int:
    return sum(count for name, count in counts.items() if name.startswith(kind))


def _differing(own: Decoder, its: Decoder) -> Iterator[int]:
    for index in range(len(own.signature.caches)):
        yield int((own.cache(index) != its.cache(index)).sum())


def _first_difference(own: Decoder, its: Decoder) -> int:
    """How many bytes differ in the first layer that has a difference."""
    per_cache = list(_differing(own, its))
    layers = [max(per_cache[at : at + 2]) for at in range(0, len(per_cache), 2)]
    return next((count for count in layers if count), 0)


@pytest.mark.parametrize(
    ("simulated", "route", "preset", "delay"),
    [
        (2201, "dynamo", "int4", 0),
        (2201, "genai", "int4", 200),
        (2002, "dynamo", "int4", 200),
        # Rows of 26 bytes, which a 310P does not move.
        (2201, "genai", "int3", 200),
    ],
    indirect=["simulated"],
)
def test_decodes_as_on_the_cpu(  # noqa: PLR0917
    simulated: Kernels, bench: Bench, prompts: list[list[int]], route: str, preset: str, delay: int
) -> None:
    model = bench.converted[route, preset]
    host = open_converted(model, exact=True)
    device = open_converted(model, ep=providers.CANN)
    assert device.session.get_providers() == [CANN, CPU]
    bench.fake.set_delay(delay)
    found = [compare(host, device, bench.fake, prompt) for prompt in prompts]

    if delay == 0:
        shown = min(found, key=lambda one: one.bytes_differing)
        bench.measured("provider", device.session.get_providers()[0])
        bench.measured("copies_per_step", max(one.copies for one in found))
        bench.measured("same_greedy_tokens", all(one.same_tokens for one in found))
        bench.measured("cache_bytes_differing", shown.bytes_differing)
        bench.measured("max_logit_error", max(one.logit_error for one in found))
        bench.measured("launches_per_step", shown.launches)
    for one in found:
        assert one.same_tokens
        assert one.logit_error <= TOLERANCE
        assert one.tie_bytes <= one.row_bytes
        assert one.copies <= MOST_COPIES
        # Two encodes and an attention of each layer at least; each text asks for as many.
        assert one.kernels >= 3 * one.layers
        assert one.launches == found[0].launches
    # A coordinate may lie between two codes, by the order of sums of a machine.
    assert any(one.bytes_differing <= 1 for one in found)
    assert simulated.hazards == 0, simulated.messages()


@pytest.mark.parametrize("simulated", [2201], indirect=True)
@pytest.mark.parametrize("preset", ["int4", "signed4"])
def test_a_batch_with_padding_on_the_left(
    simulated: Kernels,
    bench: Bench,
    windowed: dict[Made, Path],
    prompts: list[list[int]],
    preset: str,
) -> None:
    """With ``signed4`` and exact tokens CANN attends to the codes in the middle, in float16."""
    by_cann = preset == "signed4"
    model = (windowed if by_cann else bench.converted)["dynamo", preset]
    host = open_converted(model, exact=True)
    device = open_converted(model, ep=providers.CANN)
    bench.fake.set_delay(200)
    batch = [prompt[-length:] for prompt, length in zip(prompts, LENGTHS, strict=True)]
    found = compare(host, device, bench.fake, *batch)
    assert found.same_tokens
    assert found.logit_error <= (DIGITS if by_cann else TOLERANCE)
    assert by_cann or found.tie_bytes <= found.row_bytes
    assert found.copies <= MOST_COPIES
    joined = bench.fake.counts().get("op.aclnnFusedInferAttentionScoreV2", 0)
    assert joined == (LAYERS * len(batch) if by_cann else 0)
    assert simulated.hazards == 0, simulated.messages()


def expect_ties_alone(simulated: Kernels, fake: FakeAcl, model: Path, prompt: list[int]) -> None:
    """64 greedy tokens as on the CPU, and every byte what the device's own vectors say."""
    found = compare_providers(
        expose_internals(model), np.asarray(prompt), new_tokens=STEPS, ep=providers.CANN
    )
    # Two logits of a float16 model may be two roundings apart.
    roundings = 2 if HALF in model.parent.name else 0
    near = (found.gap or 0.0) <= roundings * np.spacing(np.float16(found.largest_logit))
    assert near if roundings else found.same_tokens == STEPS
    assert found.codes_wrong == 0
    assert found.scale_steps <= (FIELD_STEPS if "signed4" in model.name else 0)
    assert found.vector_error <= MAX_VECTOR_ERROR
    decoder = open_converted(model, ep=providers.CANN).decoder(capacity=CAPACITY)
    decoder.prefill([prompt])
    fake.reset()
    decoder.step([prompt[0]])
    copies = fake.copies()
    assert copies.get("host_to_device", 0) + copies.get("device_to_host", 0) <= MOST_COPIES
    assert simulated.hazards == 0, simulated.messages()


@pytest.mark.parametrize("simulated", [2201], indirect=True)
@pytest.mark.parametrize("made", [(HALF, "int4"), (HALF, "signed4"), ("dynamo", "signed4")])
def test_other_numbers_decode_as_on_the_cpu(
    simulated: Kernels, bench: Bench, prompts: list[list[int]], made: Made
) -> None:
    """Of float16, which are float32 between nodes of the CPU; and scales of float32, whose sums
    have another order there. CANN's attention reads those, in float16."""
    expect_ties_alone(simulated, bench.fake, bench.converted[made], prompts[2])
    counts = bench.fake.counts()
    attended = sum(count for name, count in counts.items() if "kernel.tq_attention_f" in name)
    assert attended == (LAYERS if made[1] == "int4" else 0)


@pytest.mark.parametrize(
    ("simulated", "made"),
    [*((arch, made) for arch in ARCHITECTURES for made in WINDOWED[::2]), (2201, WINDOWED[1])],
    indirect=["simulated"],
)
def test_an_exact_window_decodes_as_on_the_cpu(
    simulated: Kernels,
    fake: FakeAcl,
    windowed: dict[Made, Path],
    prompts: list[list[int]],
    made: Made,
) -> None:
    """The window slides over the prompt and on: 24 + 64 tokens, of which 68 have entries."""
    fake.set_delay(200)
    expect_ties_alone(simulated, fake, windowed[made], prompts[1])
    assert fake.counts()["kernel.tq_attention_float32"] == LAYERS
    assert fake.counts()["kernel.tq_encode_float32"] == 2 * LAYERS


@pytest.mark.parametrize(
    ("simulated", "route"), [(2201, "dynamo"), (2201, "genai")], indirect=["simulated"]
)
def test_every_node_of_floats_runs_on_the_device(
    simulated: Kernels, bench: Bench, tmp_path: Path, route: str
) -> None:
    """By the profile of what ran, not by what was planned."""
    session = CannSession(
        str(bench.converted[route, "int4"]),
        tmp_path,
        disabled=providers.CANN.disabled_optimizers,
        library=get_library_path(),
    )
    session.run(feeds_of(session, tokens=3))
    ran = session.end()
    on_cpu = [node for node in ran if node.provider == CPU and node.is_float]
    if route == ROUTES[0]:
        bench.measured("float_nodes_on_cpu", len(on_cpu))
    assert {node.provider for node in ran} == {CANN, CPU}
    assert on_cpu == []


def feeds_of(session: CannSession, tokens: int) -> dict[str, Array]:
    """A prompt, and caches with room for more."""
    given: dict[str, Array] = {
        "input_ids": np.arange(tokens)[None],
        "attention_mask": np.ones((1, tokens), np.int64),
        "position_ids": np.arange(tokens)[None],
    }
    inputs = {entry.name: entry.shape for entry in session.session.get_inputs()}
    for name, shape in inputs.items():
        if name not in given:
            given[name] = np.zeros((1, shape[1], CAPACITY, shape[3]), np.uint8)
    return {name: given[name] for name in inputs}
