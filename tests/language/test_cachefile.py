"""Files of caches: whose they are, and what is not one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tq_onnx
from tests.language.models import folder, language_model
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


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "no such file"), (tmp_path, "is not a cache")):
        with pytest.raises(ModelFileError, match=message):
            language_model("growing").load_cache(path)


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
