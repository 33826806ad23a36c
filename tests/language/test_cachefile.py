"""Files of caches: whose they are, and what is not one."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file, save_file

import tq_onnx
from tests.files.test_regular import KINDS, special
from tests.language.models import folder, language_model
from tests.recognise.test_passthrough import recurrent
from tests.runtime.models import DYNAMO, HALF, original
from tq_onnx import PRESETS
from tq_onnx.codec.window import rows_per_entry
from tq_onnx.errors import ModelFileError, OutputExistsError, TqOnnxError, UsageError
from tq_onnx.files.arrays import facts_of
from tq_onnx.files.transaction import Transaction
from tq_onnx.plan import Plan

IDS = list(b"the whale")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = language_model("growing")
    cache = model.new_cache()
    model.generate(IDS, cache=cache, max_new_tokens=3)
    path = tmp_path / "talk.safetensors"
    cache.save(path)
    return path


def test_bytes_are_those_of_the_used_rows(saved: Path) -> None:
    model = language_model("growing")
    found = load_file(saved)
    used = sum(array.nbytes for name, array in found.items() if name.startswith("cache."))
    assert used == len(found["tokens"]) * model.signature.bytes_per_token
    assert facts_of(saved)["format"] == "tq_onnx.cache"


@pytest.mark.parametrize(
    ("other", "told"),
    [("original", "another model"), ("int3", "another model"), ("window", "another model")],
)
def test_a_cache_of_another_model_is_refused(saved: Path, other: str, told: str) -> None:
    model = tq_onnx.load(folder(other), threads=1)
    with pytest.raises(UsageError, match=told):
        model.load_cache(saved)


@pytest.mark.parametrize(("name", "told"), [("plan", "conversion"), ("layout", "row layout")])
def test_each_digest_counts(saved: Path, name: str, told: str) -> None:
    save_file(load_file(saved), saved, {**facts_of(saved), name: "0" * 16})
    with pytest.raises(UsageError, match=f"another .*{told}"):
        language_model("growing").load_cache(saved)


def test_a_weight_that_changed_is_another_model(tmp_path: Path) -> None:
    for file in folder("int4").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    data = tmp_path / "model.onnx.data"
    before = tq_onnx.load(tmp_path, threads=1).identity
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert tq_onnx.load(tmp_path, threads=1).identity.model != before.model


def test_a_plan_that_says_more_is_the_same_conversion(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a later version, whose plans have more fields."""
    to_json = Plan.to_json
    monkeypatch.setattr(Plan, "to_json", lambda plan: to_json(plan)[:-1] + ', "more": 0}')
    model = tq_onnx.load(folder("int4"), threads=1)
    assert len(model.load_cache(saved)) > 0


def test_a_longer_text_than_the_context_is_refused(saved: Path) -> None:
    model = tq_onnx.load(folder("int4"), threads=1, context=8)
    with pytest.raises(UsageError, match="11 tokens do not fit into caches with a capacity of 8"):
        model.load_cache(saved)


EDITS = {
    "no tokens": {"tokens": np.zeros(0, np.int64)},
    "other ids": {"tokens": np.full(11, 999)},
    "negative ids": {"tokens": np.full(11, -1)},
    "tokens of another type": {"tokens": np.zeros(11, np.float64)},
    "more tokens": {"tokens": np.zeros(12, np.int64)},
    "padding": {"mask": np.zeros((1, 11), np.int64)},
    "fewer rows": {"cache.3": np.zeros((1, 2, 10, 66), np.uint8)},
    "rows of another type": {"cache.3": np.zeros((1, 2, 11, 66), np.int8)},
    "wider rows": {"cache.3": np.zeros((1, 2, 11, 68), np.uint8)},
    "one cache more": {"cache.8": np.zeros((1, 2, 11, 66), np.uint8)},
    "a state": {"state.s": np.zeros(1)},
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_what_is_no_cache_of_the_model(saved: Path, edit: dict[str, np.ndarray]) -> None:
    save_file({**load_file(saved), **edit}, saved, facts_of(saved))
    with pytest.raises(ModelFileError, match="the file is not a cache"):
        language_model("growing").load_cache(saved)


def test_a_missing_file() -> None:
    for load in (language_model("growing").load_cache, language_model("growing").load_chat):
        with pytest.raises(ModelFileError, match="there is no such file"):
            load("no such file")


@pytest.mark.skipif(os.name != "posix", reason="there are no such files")
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_is_no_file_waits_for_nobody(kind: str, saved: Path, tmp_path: Path) -> None:
    model = language_model("growing")
    cache = model.load_cache(saved)
    (tmp_path / "folder").mkdir()
    path = special(tmp_path / "folder", kind)
    for load in (model.load_cache, model.load_chat):
        with pytest.raises(ModelFileError, match="the path is not a regular file"):
            load(path)
    with pytest.raises(OutputExistsError, match="is no cache"):
        cache.save(path)


@pytest.mark.parametrize("path", [None, 5, b"file", "", "a\0b"])
def test_what_is_no_path(path: Any, saved: Path) -> None:
    model = language_model("growing")
    for call in (model.load_cache(saved).save, model.load_cache, model.load_chat):
        with pytest.raises(UsageError, match=r"^path (must be|is empty|has)"):
            call(path)


def test_a_folder_that_is_none(saved: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot be written"):
        language_model("growing").load_cache(saved).save(saved / "file")


def window_file(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """A cache with a window of 8 tokens and two first ones, head size 128, rows of 66 bytes."""
    model = language_model("window")
    cache = model.new_cache()
    model.generate(list(b"Call me Ishmael"), cache=cache, max_new_tokens=3)
    cache.rewind(14)  # entries of tokens that were forgotten stay
    cache.save(path)
    return {name: np.array(array) for name, array in load_file(path).items()}, facts_of(path)


def test_a_window_has_finite_numbers_and_its_own_tokens(tmp_path: Path) -> None:
    path = tmp_path / "talk.safetensors"
    model = language_model("window")
    arrays, facts = window_file(path)
    assert len(model.load_cache(path)) == 14
    head_size = model.signature.caches[0].head_size
    entry = rows_per_entry(head_size, 66) * 66
    number, tag = slice(0, 2), slice(2 * head_size, 2 * head_size + 4)
    for name in ("cache.0", "cache.7"):
        for head in range(2):
            for index in (0, 9):
                for place, content in (
                    (number, np.array([np.inf], "<f2")),
                    (number, np.array([np.nan], "<f2")),
                    (tag, np.array([index + 2], "<u4")),
                    (tag, np.array([2**32 - 1 - index], "<u4")),
                ):
                    damaged = np.array(arrays[name])
                    plane = damaged[0, head].reshape(-1)
                    plane[index * entry :][place] = content.view(np.uint8)
                    save_file({**arrays, name: damaged}, path, facts)
                    with pytest.raises(ModelFileError, match=f"{name} has numbers that are not"):
                        model.load_cache(path)
    # What has no tag is of no token, and never read.
    unused = np.array(arrays["cache.0"])
    plane = unused[0, 0].reshape(-1)
    plane[:2] = np.array([np.nan], "<f2").view(np.uint8)
    plane[tag] = 0
    save_file({**arrays, "cache.0": unused}, path, facts)
    kept = model.load_cache(path)
    assert model.generate([*kept.tokens, 65], cache=kept, max_new_tokens=3).tokens


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(("name", "preset"), [(DYNAMO, None), (HALF, None), (HALF, "raw")])
def test_floats_are_finite(name: str, preset: str | None, wrong: float, tmp_path: Path) -> None:
    """Those of originals, and the same in the bytes of a conversion."""
    source, path = original(name), tmp_path / "talk.safetensors"
    if preset is not None:
        source = tmp_path / "model.onnx"
        tq_onnx.convert(original(name), source, preset=preset)
    model = tq_onnx.load(source, threads=1)
    cache = model.new_cache()
    model.generate([5, 6, 7], cache=cache, max_new_tokens=2)
    cache.save(path)
    arrays, facts = (
        {name: np.array(array) for name, array in load_file(path).items()},
        facts_of(path),
    )
    assert len(model.load_cache(path)) == 4
    floats = arrays["cache.2"]
    floats = floats if preset is None else floats.view(np.float16)
    floats[0, 1, 3, -1] = wrong
    save_file(arrays, path, facts)
    with pytest.raises(ModelFileError, match="2 has numbers that are not finite"):
        model.load_cache(path)


def test_states_are_finite(tmp_path: Path) -> None:
    ir.save(recurrent(), tmp_path / "model.onnx")
    model = tq_onnx.load(tmp_path / "model.onnx", threads=1)
    cache, path = model.new_cache(), tmp_path / "talk.safetensors"
    model.generate([5, 6, 7], cache=cache, max_new_tokens=4)
    cache.save(path)
    arrays, facts = load_file(path), facts_of(path)
    (name,) = (name for name in arrays if name.startswith("state."))
    state = np.array(arrays[name])
    state.flat[0] = np.nan
    save_file({**arrays, name: state}, path, facts)
    with pytest.raises(ModelFileError, match=f"{name} has numbers that are not finite"):
        model.load_cache(path)


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "raw"])
def test_any_file_that_is_loaded_gives_finite_logits(preset: str, tmp_path: Path) -> None:
    """Whatever its codes; metadata of rows are floats, which have to be finite."""
    path = tmp_path / "model.onnx"
    tq_onnx.convert(original(DYNAMO), path, preset=preset, residual_length=0, sink_tokens=0)
    model = tq_onnx.load(path, threads=1)
    cache, file = model.new_cache(), tmp_path / "talk.safetensors"
    model.generate([5, 6, 7], cache=cache, max_new_tokens=2)
    cache.save(file)
    arrays, facts = load_file(file), facts_of(file)
    for byte in (0, 0x7B, 0xFF, None):
        rng = np.random.default_rng(0)
        for name, array in arrays.items():
            if name.startswith("cache."):
                drawn = rng.integers(0, 256, array.shape, np.uint8)
                arrays[name] = drawn if byte is None else np.full_like(array, byte)
        save_file(arrays, file, facts)
        try:
            kept = model.load_cache(file)
        except ModelFileError as error:
            assert "has numbers that are not finite" in str(error)
            assert byte in (0xFF, None) or PRESETS[preset].key.is_signed
        else:
            assert np.isfinite(kept.decoder.copy().prefill([[5, 6]])).all()


@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1])
def test_a_file_that_is_cut(cut: int, saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:cut])
    with pytest.raises(ModelFileError, match="the file is not a cache"):
        language_model("growing").load_cache(saved)


def test_a_file_that_no_memory_holds(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tq_onnx.language.cachefile.free_memory", lambda: 1000)
    with pytest.raises(ModelFileError, match=r"has \d+ bytes, and 1000 are the most"):
        language_model("growing").load_cache(saved)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "the file holds no conversation"),
        ("[]", "the file holds no conversation"),
        ("{", "the file is not a cache"),
        ("[" * 100_000, "the file is not a cache"),
        ('[{"role": "user"}]', "its messages are invalid"),
        ('[{"role": "user", "content": 5}]', "its messages are invalid"),
    ],
    ids=["none", "no turns", "no JSON", "deep", "no content", "no text"],
)
def test_what_is_no_conversation(messages: str | None, message: str, saved: Path) -> None:
    facts = facts_of(saved) if messages is None else {**facts_of(saved), "messages": messages}
    save_file(load_file(saved), saved, facts)
    with pytest.raises(ModelFileError, match=message):
        language_model("growing").load_chat(saved)


@pytest.mark.parametrize("version", ["0", "2", "", "1" * 5000])
def test_a_file_of_another_version(version: str, saved: Path) -> None:
    save_file(load_file(saved), saved, {**facts_of(saved), "format_version": version})
    with pytest.raises(ModelFileError, match=r"not a cache \(version .* of the format\)"):
        language_model("growing").load_cache(saved)


def test_damaged_files_are_refused_or_read(saved: Path) -> None:
    """A damage of the rows cannot be told, and must do no harm."""
    model = language_model("growing")
    content = saved.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for number in range(300):
        draw = random.Random(number)
        damaged = bytearray(content)
        for _ in range(draw.choice((1, 2, 8))):
            damaged[draw.randrange(draw.choice((end, len(damaged))))] = draw.randrange(256)
        if draw.random() < 0.2:
            del damaged[draw.randrange(len(damaged)) :]
        saved.write_bytes(damaged)
        try:
            cache = model.load_cache(saved)
        except TqOnnxError as error:
            refused += 1
            assert str(error).count("\n") == 0
        else:
            model.generate([*cache.tokens, 65], cache=cache, max_new_tokens=2)
    assert 150 < refused < 300


def test_a_save_that_fails_leaves_the_old_file(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = saved.read_bytes()
    cache = language_model("growing").load_cache(saved)
    cache.rewind(5)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Transaction, "commit", fail)
    with pytest.raises(ModelFileError, match="No space left"):
        cache.save(saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
    cache.save(saved)
    assert len(language_model("growing").load_cache(saved)) == 5


def test_only_caches_are_replaced(tmp_path: Path) -> None:
    model = language_model("growing")
    cache = model.new_cache()
    model.generate(IDS, cache=cache, max_new_tokens=1)
    path = tmp_path / "notes.txt"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(OutputExistsError, match="is no cache"):
        cache.save(path)
    with pytest.raises(UsageError, match="empty cache"):
        model.new_cache().save(tmp_path / "new")
    assert path.read_text(encoding="utf-8") == "mine"


def test_exact_tokens_in_pages_are_kept(tmp_path: Path) -> None:
    path, file = tmp_path / "model.onnx", tmp_path / "talk.safetensors"
    tq_onnx.convert(original(DYNAMO), path, target="paged", block_size=32)
    model = tq_onnx.load(path, threads=1)
    prompt = list(range(3, 46))
    cache = model.new_cache()
    model.generate(prompt, cache=cache, max_new_tokens=3)
    cache.save(file)
    kept = model.load_cache(file)
    ids = [*cache.tokens, 65]
    expected = model.generate(ids, cache=cache, max_new_tokens=5).tokens
    assert model.generate(ids, cache=kept, max_new_tokens=5).tokens == expected
    arrays = {name: np.array(array) for name, array in load_file(file).items()}
    pages = model.signature.caches[0].pages
    assert pages is not None
    begin = pages.page_bytes + pages.begin(pages.place(len(prompt), len(arrays["tokens"])))
    arrays["cache.0"].reshape(-1)[begin : begin + 2] = np.array([np.inf], "<f2").view(np.uint8)
    save_file(arrays, file, facts_of(file))
    with pytest.raises(ModelFileError, match=r"cache.0 has numbers that are not finite"):
        model.load_cache(file)
