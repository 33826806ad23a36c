"""The real onnxruntime-genai drives converted folders: same tokens as ``tq-onnx generate``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.run import run
from tests.integrations.genai_folder import genai_config, write_config
from tq_onnx.conversion.options import Options
from tq_onnx.integrations.bundled import build_bundled, heldout_text
from tq_onnx.integrations.folderconversion import FolderReport, convert_folder
from tq_onnx.runtime.decoder import Decoder
from tq_onnx.runtime.generate import generate
from tq_onnx.runtime.library import library_name
from tq_onnx.runtime.opening import open_converted

og = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")

NEW = 24
PAD = 257
SPARE_ROWS = 4 * (32 + 4)
"""Rows that ``max_length`` has beyond a text, in which all its exact tokens find room."""
SIZES = {"layers": 4, "heads": 4, "kv_heads": 2, "head_size": 128, "vocabulary": 260}
Prompts = list[list[int]]


def prompts(count: int, length: int = 40) -> Prompts:
    """Prompts from places all over the held-out text; a token is a byte."""
    text = heldout_text().encode()
    step = len(text) // count
    return [list(text[index * step : index * step + length]) for index in range(count)]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> FolderReport:
    """The bundled model as a folder of onnxruntime-genai, converted."""
    source = tmp_path_factory.mktemp("genai") / "qwen3"
    build_bundled("genai", source)
    config = genai_config(**SIZES)  # type: ignore[arg-type]
    config["search"]["past_present_share_buffer"] = True
    write_config(source, config)
    return convert_folder(source, source.with_name("int4"))


Configure = Callable[..., Path]


@pytest.fixture
def configured(tmp_path: Path) -> Configure:
    """Makes a copy of a folder whose configuration is changed."""

    def make(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
        copy = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(folder, copy)
        document = json.loads((copy / "genai_config.json").read_text())
        change(document)
        write_config(copy, document)
        return copy

    return make


def share(folder: Path, configured: Configure, on: bool) -> Path:
    return configured(folder, lambda d: d["search"].update(past_present_share_buffer=on))


def start(
    folder: Path, batch: Prompts, *, new: int = NEW, beams: int = 1, spare: int = SPARE_ROWS
) -> Any:
    """Beams are chosen at the end of a text, which is ``max_length``."""
    params = og.GeneratorParams(og.Model(str(folder)))
    length = len(batch[0]) + new + (spare if beams == 1 else 0)
    params.set_search_options(
        max_length=length, batch_size=len(batch), num_beams=beams, do_sample=False
    )
    generator = og.Generator(og.Model(str(folder)), params)
    generator.append_tokens(np.asarray(batch if len(batch) > 1 else batch[0], np.int32))
    return generator


def continued(folder: Path, batch: Prompts, **options: int) -> Prompts:
    generator = start(folder, batch, **options)
    for _ in range(NEW):
        if not generator.is_done():
            generator.generate_next_token()
    return [
        [int(token) for token in generator.get_sequence(index)][len(prompt) :]
        for index, prompt in enumerate(batch)
    ]


def decoder(folder: Path, *, library: bool = True, growing: bool = False) -> Decoder:
    """Of our own run-time; caches that grow have no spare rows, so that only a call is exact."""
    opened = open_converted(folder / "model.onnx", library=library, threads=2)
    caches = opened.signature.caches
    if growing:
        caches = tuple(replace(spec, spare_rows=0) for spec in caches)
    return replace(opened, signature=replace(opened.signature, caches=caches)).decoder()


def expected(folder: Path, batch: Prompts, new: int = NEW, **options: bool) -> Prompts:
    of_each = (generate(decoder(folder, **options), prompt, max_new_tokens=new) for prompt in batch)
    return [list(generation.tokens) for generation in of_each]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("on", [True, False])
def test_the_same_tokens_as_here(
    report: FolderReport, configured: Configure, on: bool, count: int
) -> None:
    batch = prompts(count)
    answers = continued(share(report.output, configured, on), batch)
    assert answers == expected(report.output, batch, growing=not on)
    assert len({tuple(answer) for answer in answers}) == count


@pytest.mark.parametrize("on", [True, False])
def test_prompts_of_several_lengths(report: FolderReport, configured: Configure, on: bool) -> None:
    """Padded at the end, as onnxruntime-genai's tokenizer does it."""
    batch = [prompt[-length:] for prompt, length in zip(prompts(4), (40, 25, 33, 11), strict=True)]
    padded = [prompt + [PAD] * (40 - len(prompt)) for prompt in batch]
    answers = continued(share(report.output, configured, on), padded)
    assert answers == expected(report.output, batch, growing=not on)


@pytest.mark.parametrize("spare", [0, 30, 100])
def test_a_text_that_fills_its_buffer(report: FolderReport, spare: int) -> None:
    """There are fewer exact tokens then, as in buffers of our own with as many rows."""
    assert report.genai is not None and report.genai.spare_rows == SPARE_ROWS
    batch = prompts(2)
    opened = open_converted(report.output / "model.onnx", threads=2)
    caches = tuple(replace(spec, spare_rows=spare) for spec in opened.signature.caches)
    opened = replace(opened, signature=replace(opened.signature, caches=caches))
    answers = [
        list(generate(opened.decoder(capacity=40 + NEW), prompt, max_new_tokens=NEW).tokens)
        for prompt in batch
    ]
    assert continued(report.output, batch, spare=spare) == answers
    assert spare or answers != expected(report.output, batch)


@pytest.mark.parametrize("on", [True, False])
def test_without_loss_it_is_the_original(
    report: FolderReport, configured: Configure, tmp_path_factory: pytest.TempPathFactory, on: bool
) -> None:
    """The preset raw changes nothing but the caches' form: no token may differ, beams included."""
    raw = tmp_path_factory.mktemp("raw") / "out"
    convert_folder(report.source, raw, preset="raw")
    raw = share(raw, configured, on)
    for count, beams in ((1, 1), (4, 1), (2, 3)):
        batch = prompts(count)
        answers = continued(raw, batch, beams=beams)
        assert answers == continued(report.source, batch, beams=beams)
    # Two bits do change which of several beams wins.
    coarse = tmp_path_factory.mktemp("coarse") / "out"
    convert_folder(report.source, coarse, preset="int2")
    assert continued(share(coarse, configured, on), batch, beams=3) != answers


@pytest.mark.parametrize(
    "chosen",
    [
        ("k5v3", Options()),
        ("k8v4", Options(boundary_layers=1)),
        ("4bit_nc", Options(layers="1-2", bits_k=5)),
    ],
)
@pytest.mark.parametrize("on", [True, False])
def test_keys_unlike_values_and_layers_unlike_others(
    report: FolderReport,
    configured: Configure,
    tmp_path_factory: pytest.TempPathFactory,
    chosen: tuple[str, Options],
    on: bool,
) -> None:
    """Padded rows, and layers of several widths."""
    out = tmp_path_factory.mktemp("mixed") / "out"
    made = convert_folder(report.source, out, preset=chosen[0], options=chosen[1])
    assert made.genai is not None and made.genai.padding > 0
    folder = share(out, configured, on)
    assert continued(folder, prompts(2)) == expected(folder, prompts(2), growing=not on)


def test_the_folder_runs_as_it_is(report: FolderReport) -> None:
    [prompt] = prompts(1)
    [answer] = continued(report.output, [prompt])
    text = bytes(prompt).decode()
    outcome = run("generate", report.output, "--prompt", text, "--max-new-tokens", NEW, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["tokens"] == answer


def best_of_beams(folder: Path, prompt: list[int], beams: int) -> list[int]:
    """Beam search by our own run-time, every answer read again in each step, token by token."""
    growing = decoder(folder, growing=True)
    kept: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(NEW):
        found = []
        for score, answer in kept:
            growing.reset()
            logits = growing.prefill(np.asarray([prompt], np.int64))[0, -1]
            for token in answer:
                logits = growing.step([token])[0]
            chances = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
            best = np.argsort(-chances)[:beams]
            found += [(score + float(chances[token]), [*answer, int(token)]) for token in best]
        kept = sorted(found, key=lambda item: -item[0])[:beams]
    return kept[0][1]


def test_beams(report: FolderReport, configured: Configure) -> None:
    """onnxruntime-genai reorders the rows of growing caches; with beams it shares no buffers."""
    batch = prompts(2)
    on = continued(share(report.output, configured, True), batch, beams=3)
    assert on == continued(share(report.output, configured, False), batch, beams=3)
    assert on == [best_of_beams(report.output, prompt, 3) for prompt in batch]
    assert on != expected(report.output, batch)


@pytest.mark.parametrize("on", [True, False])
def test_back_to_an_earlier_token(report: FolderReport, configured: Configure, on: bool) -> None:
    [prompt] = prompts(1)
    folder = share(report.output, configured, on)
    generator = start(folder, [prompt])
    for _ in range(8):
        generator.generate_next_token()
    generator.rewind_to(len(prompt) - 10)
    generator.append_tokens(np.asarray(prompt[-10:], np.int32))
    for _ in range(NEW):
        generator.generate_next_token()
    own = decoder(folder, growing=not on)
    generate(own, prompt, max_new_tokens=8)
    own.rewind(len(prompt) - 10)
    answer = generate(own, prompt[-10:], max_new_tokens=NEW).tokens
    assert [int(token) for token in generator.get_sequence(0)][len(prompt) :] == list(answer)


def test_a_second_prompt_after_the_first_answer(
    report: FolderReport, configured: Configure
) -> None:
    """With shared buffers; with growing caches onnxruntime-genai loses count in originals too."""
    first, second = prompts(2, length=20)
    generator = start(share(report.output, configured, True), [first], new=60)
    for _ in range(10):
        generator.generate_next_token()
    generator.append_tokens(np.asarray(second, np.int32))
    text = [int(token) for token in generator.get_sequence(0)]
    assert text[30:] == second
    for _ in range(10):
        generator.generate_next_token()
    answer = [int(token) for token in generator.get_sequence(0)][len(text) :]
    assert [answer] == expected(report.output, [text], new=10)


def test_the_library_is_what_runs(report: FolderReport, configured: Configure) -> None:
    """Without the entry the function bodies run; with it, the file must be there."""
    batch = prompts(1)
    bodies = configured(
        report.output,
        lambda d: d["model"]["decoder"]["session_options"].pop("custom_ops_library"),
    )
    (bodies / library_name()).unlink()
    # Kernels and bodies round differently, and greedy tokens may part at a near-tie.
    assert continued(bodies, batch) == expected(report.output, batch, library=False)
    missing = configured(
        report.output,
        lambda d: d["model"]["decoder"]["session_options"].update(custom_ops_library="no.so"),
    )
    with pytest.raises(RuntimeError, match=r"no\.so"):
        continued(missing, batch)


def test_the_graph_sizes_the_caches(report: FolderReport, configured: Configure) -> None:
    """This release asks the graph; the entry head_size is for older ones."""
    batch = prompts(1)
    as_before = configured(report.output, lambda d: d["model"]["decoder"].update(head_size=128))
    assert continued(as_before, batch) == expected(report.output, batch)
