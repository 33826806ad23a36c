"""Prompts kept on disk: the same text as without, whoever else writes, and whatever is damaged.

With ``TQ_STORE_KILLS=1000`` so many processes are killed while they write.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import onnx_ir as ir
import pytest

import tq_onnx
from tests.language.models import FORMS, PROMPT, folder
from tests.recognise.test_passthrough import recurrent
from tests.runtime.models import original
from tq_onnx import LanguageModel, PromptStore
from tq_onnx.conversion import pipeline
from tq_onnx.conversion.options import Options
from tq_onnx.errors import ModelFileError, UnsupportedModelError, UsageError
from tq_onnx.files.arrays import read_arrays, write_arrays
from tq_onnx.language import promptstore

PIECE: Final = 16
KILLS: Final = int(os.environ.get("TQ_STORE_KILLS", "12"))
TEXT: Final = np.random.default_rng(5).integers(0, 97, 150).tolist()
NEW: Final = 8

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@pytest.fixture(autouse=True)
def short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_onnx.runtime.generate.PROMPT_PIECE", PIECE)


def model_of(form: str, store: PromptStore | None = None) -> LanguageModel:
    kind = form if form in ("original", "window", "paged") else "int4"
    context = 160 if form in ("in place", "window") else None
    library = form != "bodies"
    return tq_onnx.load(
        folder(kind), threads=1, context=context, library=library, prompt_store=store
    )


def text(lm: LanguageModel, ids: list[int]) -> tuple[tuple[int, ...], int]:
    """The tokens of an answer, and how many tokens of the prompt were not computed."""
    completion = lm.generate(ids, max_new_tokens=NEW)
    return completion.tokens, completion.usage.cached_tokens


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_is_computed_once(form: str, tmp_path: Path) -> None:
    """And what is read from the files is what would be computed, to the bit, exact tokens too."""
    plain, store = model_of(form), PromptStore(tmp_path / "prompts")
    assert text(model_of(form, store), TEXT[:130]) == (text(plain, TEXT[:130])[0], 0)
    assert len(files(store.folder)) == 130 // PIECE
    assert store.nbytes == sum(path.stat().st_size for path in files(store.folder))
    lm = model_of(form, PromptStore(store.folder))  # as in another process
    for length, known in ((130, 128), (150, 128), (129, 128), (128, 112), (50, 48), (9, 0)):
        caches = [plain.new_cache(), lm.new_cache()]
        completions = [
            model.generate(TEXT[:length], cache=cache, max_new_tokens=NEW)
            for model, cache in zip((plain, lm), caches, strict=True)
        ]
        assert completions[0].tokens == completions[1].tokens
        assert completions[1].usage.cached_tokens == known
        for index in range(len(lm.signature.caches)):
            planes = [cache.decoder.plane(index) for cache in caches]
            assert np.array_equal(*planes)
    changed = [*TEXT[:40], 96 - TEXT[40], *TEXT[41:130]]
    assert text(lm, changed) == (text(plain, changed)[0], 32)


@pytest.mark.parametrize("context", [None, 160])
def test_exact_tokens_behind_the_rows_are_kept(context: int | None, tmp_path: Path) -> None:
    options = Options(residual_length=8, sink_tokens=2, spare_rows=True)
    source, path = folder("original") / "model.onnx", tmp_path / "model.onnx"
    pipeline.convert(source, path, options=options)
    expected = text(tq_onnx.load(path, context=context, threads=1), TEXT[:130])[0]
    for known in (0, 128):
        store = PromptStore(tmp_path / "prompts")
        lm = tq_onnx.load(path, context=context, threads=1, prompt_store=store)
        assert text(lm, TEXT[:130]) == (expected, known)


@pytest.mark.parametrize(
    ("name", "length", "known"),
    [("genai-cpu-int4", 60, 48), ("hf-static-decode", 18, 16), ("mobius-static", 18, 16)],
)
def test_graphs_of_all_kinds(name: str, length: int, known: int, tmp_path: Path) -> None:
    """A token a call, and caches of a fixed size."""
    ids = [token % 60 for token in TEXT[:length]]
    tq_onnx.convert(original(name), tmp_path / "model.onnx")
    for path in (original(name), tmp_path / "model.onnx"):
        expected = text(tq_onnx.load(path, threads=1), ids)[0]
        for count in (0, known):
            lm = tq_onnx.load(path, threads=1, prompt_store=PromptStore(tmp_path / "prompts"))
            assert text(lm, ids) == (expected, count)


def test_states_of_recurrent_layers_are_kept(tmp_path: Path) -> None:
    ir.save(recurrent(), tmp_path / "model.onnx")
    ids = [token % 32 for token in TEXT[:50]]
    expected = text(tq_onnx.load(tmp_path / "model.onnx", threads=1), ids)[0]
    for known in (0, 48):
        store = PromptStore(tmp_path / "prompts")
        lm = tq_onnx.load(tmp_path / "model.onnx", threads=1, prompt_store=store)
        assert text(lm, ids) == (expected, known)


def test_a_conversation_begins_with_what_is_kept(tmp_path: Path) -> None:
    expected = model_of("growing").chat(PROMPT).ask("And then?", max_new_tokens=NEW)
    for known in (0, 64):
        lm = model_of("growing", PromptStore(tmp_path))
        chat = lm.chat(PROMPT)
        completion = chat.ask("And then?", max_new_tokens=NEW)
        assert (completion.text, completion.usage.cached_tokens) == (expected.text, known)
        count = len(files(tmp_path))
        # What goes on from a cache is read in other calls, and not kept.
        assert chat.ask("More?", max_new_tokens=3).usage.cached_tokens > 64
        assert len(files(tmp_path)) == count


def test_a_cache_with_less_of_the_prompt_is_replaced(tmp_path: Path) -> None:
    lm = model_of("window", PromptStore(tmp_path))
    expected, _ = text(lm, TEXT[:100])
    cache = lm.new_cache()
    lm.generate(TEXT[:20], cache=cache, max_new_tokens=1)
    completion = lm.generate(TEXT[:100], cache=cache, max_new_tokens=NEW)
    assert (completion.tokens, completion.usage.cached_tokens) == (expected, 96)


@pytest.mark.parametrize(
    "change",
    [
        lambda lm, patch: patch.setattr("tq_onnx.language.model.bits_of", lambda _: ("other",)),
        lambda lm, patch: os.utime(lm.path, ns=(0, 0)),
        lambda lm, patch: patch.setattr("tq_onnx.language.model.__version__", "0.0.0"),
    ],
    ids=["kernels", "file", "version"],
)
def test_files_of_what_computes_other_bits_are_not_read(
    change: Callable[[LanguageModel, pytest.MonkeyPatch], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in folder("int4").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    store = PromptStore(tmp_path / "prompts")
    lm = tq_onnx.load(model, threads=1, prompt_store=store)
    assert [text(lm, TEXT[:40])[1] for _ in range(2)] == [0, 32]
    change(lm, monkeypatch)
    assert text(tq_onnx.load(model, threads=1, prompt_store=store), TEXT[:40])[1] == 0
    assert len(files(store.folder)) == 4


def test_files_used_least_recently_go_first(tmp_path: Path) -> None:
    store = PromptStore(tmp_path)
    lm = model_of("growing", store)
    prompts = [[token, *TEXT[:40]] for token in range(4)]
    text(lm, prompts[0])
    assert len(files(tmp_path)) == 2
    limit = 3 * store.nbytes + 6 * 2048
    lm = model_of("growing", PromptStore(tmp_path, bytes=limit))
    for each in (1, 2, 0, 3):
        text(lm, prompts[each])
    assert [text(lm, prompts[each])[1] for each in (0, 2, 3)] == [32, 32, 32]
    assert text(lm, prompts[1])[1] == 0
    assert store.nbytes <= limit


def test_a_prompt_that_needs_more_is_kept_as_far_as_it_fits(tmp_path: Path) -> None:
    expected, _ = text(model_of("growing", PromptStore(tmp_path / "all")), TEXT[:130])
    size = max(path.stat().st_size for path in files(tmp_path / "all"))
    store = PromptStore(tmp_path / "few", bytes=3 * size + 3 * 2048)
    assert text(model_of("growing", store), TEXT[:130]) == (expected, 0)
    assert [path.name[:6] for path in files(store.folder)] == ["000000", "000001", "000002"]
    assert text(model_of("growing", store), TEXT[:130]) == (expected, 48)
    assert store.nbytes <= store.bytes


def damages(content: bytes) -> dict[str, bytes]:
    flips = random.Random(3).sample(range(len(content)), 24)
    damaged = {
        f"flip {at}": content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :] for at in flips
    }
    sizes = (0, 7, 8, 100, len(content) // 2, len(content) - 1)
    damaged |= {f"cut {size}": content[:size] for size in sizes}
    damaged |= {f"zeros {size}": content[:size].ljust(len(content), b"\0") for size in sizes}
    return damaged | {"longer": content + b"\0"}


@pytest.mark.filterwarnings("ignore:.*is damaged.*computed again")
def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    lm = model_of("window", PromptStore(tmp_path))
    expected, _ = text(lm, TEXT[:60])
    path = files(tmp_path)[1]
    content = path.read_bytes()
    for name, damaged in damages(content).items():
        path.write_bytes(damaged)
        assert text(lm, TEXT[:60]) == (expected, 16), name
        assert path.read_bytes() == content
        assert text(lm, TEXT[:60]) == (expected, 48)


@pytest.mark.filterwarnings("ignore:.*is damaged.*computed again")
def test_a_file_of_another_prompt_or_with_other_tensors_is_not_read(tmp_path: Path) -> None:
    lm = model_of("window", PromptStore(tmp_path))
    expected, _ = text(lm, TEXT[:60])
    paths = files(tmp_path)
    paths[2].write_bytes(paths[1].read_bytes())
    assert text(lm, TEXT[:60]) == (expected, 32)
    # Even with a checksum that fits.
    arrays, facts = read_arrays(paths[1], largest=1 << 30)
    for name, array in (
        ("tokens", arrays["tokens"] + 1),
        ("tokens", arrays["tokens"] - 97),
        ("mask", arrays["mask"] * 0),
        ("cache.1", arrays["cache.1"][:, :, 1:]),
    ):
        forged = {**arrays, name: np.ascontiguousarray(array)}
        named = {key: value for key, value in facts.items() if key != "sha256"}
        named["sha256"] = promptstore._digest(forged, named)
        write_arrays(paths[1], forged, named, overwrite=True)
        assert text(lm, TEXT[:60]) == (expected, 16), name


def test_a_damaged_file_is_told_once(tmp_path: Path) -> None:
    lm = model_of("growing", PromptStore(tmp_path))
    text(lm, TEXT[:60])
    for path in files(tmp_path):
        path.write_bytes(b"junk")
    with pytest.warns(RuntimeWarning, match="000000-.* is damaged") as warned:
        text(lm, TEXT[:60])
        files(tmp_path)[0].write_bytes(b"junk")
        text(lm, TEXT[:60])
    assert len(warned) == 1


def test_a_folder_that_cannot_be_written_changes_no_text(tmp_path: Path) -> None:
    lm = model_of("growing", PromptStore(tmp_path / "prompts"))
    (tmp_path / "prompts").rmdir()
    (tmp_path / "prompts").write_text("a file")
    with pytest.warns(RuntimeWarning, match="prompts are not kept: "):
        assert text(lm, TEXT[:60]) == text(model_of("growing"), TEXT[:60])


def test_what_is_no_store(tmp_path: Path) -> None:
    for folder_, limit, reason in (
        ("", 1, "folder is empty"),
        (None, 1, "folder must be a path"),
        (tmp_path, 0, "bytes must be at least 1"),
        (tmp_path, "4GiB", "bytes must be a whole number"),
    ):
        with pytest.raises(UsageError, match=reason):
            PromptStore(folder_, bytes=limit)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelFileError, match="the folder cannot be used"):
        PromptStore(tmp_path / "file")
    with pytest.raises(UsageError, match="prompt_store must be a PromptStore"):
        model_of("growing", str(tmp_path))  # type: ignore[arg-type]


def test_pages_that_end_within_a_call_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tq_onnx.convert(
        folder("original") / "model.onnx", tmp_path / "model.onnx", target="paged", block_size=32
    )
    with pytest.raises(UnsupportedModelError, match="a page has 32 tokens, and a call 16"):
        tq_onnx.load(tmp_path / "model.onnx", prompt_store=PromptStore(tmp_path / "prompts"))
    monkeypatch.setattr("tq_onnx.runtime.generate.PROMPT_PIECE", 64)
    expected = text(tq_onnx.load(tmp_path / "model.onnx", threads=1), TEXT[:140])[0]
    for known in (0, 128):
        store = PromptStore(tmp_path / "prompts")
        lm = tq_onnx.load(tmp_path / "model.onnx", threads=1, prompt_store=store)
        assert text(lm, TEXT[:140]) == (expected, known)


def forked(run: Callable[[], object]) -> int:
    """Run something in a process of its own."""
    process = os.fork()
    if process:
        return process
    try:
        run()
        os._exit(0)
    except BaseException:
        os._exit(1)


@posix
def test_two_processes_share_a_folder_that_is_too_small(tmp_path: Path) -> None:
    plain = model_of("window")
    prompts = [[token, *TEXT[:100]] for token in range(5)]
    expected = [text(plain, prompt)[0] for prompt in prompts]
    lm = model_of("window", PromptStore(tmp_path, bytes=300_000))  # of some 30 files 10

    def run(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(20):
            number = draw.randrange(5)
            assert text(lm, prompts[number])[0] == expected[number]

    processes = [forked(lambda seed=seed: run(seed)) for seed in range(2)]
    assert [os.waitpid(process, 0)[1] for process in processes] == [0, 0]
    text(lm, prompts[0])
    assert 0 < PromptStore(tmp_path).nbytes <= 300_000


@posix
def test_a_process_that_is_killed_leaves_no_wrong_text_and_no_broken_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, lm = model_of("window"), model_of("window", PromptStore(tmp_path))
    expected, _ = text(plain, TEXT[:130])
    started = time.perf_counter()
    text(lm, TEXT[:130])
    duration = time.perf_counter() - started
    draw = random.Random(KILLS)
    monkeypatch.setattr(lm._prompts, "_warn", pytest.fail)  # nothing is damaged
    seen: set[int] = set()
    for number in range(KILLS):
        for path in files(tmp_path)[draw.randrange(9) :]:
            path.unlink()
        process = forked(lambda: text(lm, TEXT[:130]))
        time.sleep(draw.random() * duration)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        seen.add(len(files(tmp_path)))
        if number % 2:
            assert text(lm, TEXT[:130])[0] == expected
            PromptStore(tmp_path)
            # A whole file may have its temporary name, too, which takes no room.
            assert all(path.stat().st_nlink == 2 for path in tmp_path.glob(".*"))
            assert text(lm, TEXT[:130]) == (expected, 128)
    print(f"{KILLS} kills left from {min(seen)} to {max(seen)} files")
