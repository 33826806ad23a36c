"""Caches that are kept go on as if nothing had happened to them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import onnx_ir as ir
import pytest

import tq_onnx
from tests.language.models import FORMS, PROMPT, folder, language_model
from tests.recognise.test_passthrough import recurrent
from tests.runtime.models import DYNAMO, original
from tq_onnx import PRESETS, Cache
from tq_onnx.errors import UnsupportedModelError, UsageError

IDS = list(range(3, 23))
BEGINNING = list(PROMPT.encode())


def tokens(form: str, count: int, cache: Cache | None = None, ids: list[int] = BEGINNING) -> list:
    done = language_model(form).generate(ids, cache=cache, max_new_tokens=count)
    return [*ids, *done.tokens]


@pytest.mark.parametrize("form", FORMS)
def test_a_text_goes_on_where_it_ended(form: str) -> None:
    cache = language_model(form).new_cache()
    first = tokens(form, 7, cache)
    assert list(cache.tokens) == first[:-1]
    done = language_model(form).generate(first, cache=cache, max_new_tokens=7)
    assert [*first, *done.tokens] == tokens(form, 14)
    assert done.usage.cached_tokens == len(first) - 1


@pytest.mark.parametrize("form", FORMS)
def test_forks_go_their_own_ways(form: str) -> None:
    cache = language_model(form).new_cache()
    first = tokens(form, 7, cache)
    one, other = cache.fork(2)
    assert tokens(form, 7, one, [*first, 10]) != tokens(form, 7, other, [*first, 65])
    assert tokens(form, 7, cache, first) == tokens(form, 14)
    assert one.tokens[: len(first)] == other.tokens[: len(first)] == tuple(first)


@pytest.mark.parametrize("form", ["original", "growing", "in place", "bodies"])
def test_going_back_is_never_having_gone_on(form: str) -> None:
    cache = language_model(form).new_cache()
    whole = tokens(form, 14, cache)
    cache.rewind(len(BEGINNING) + 6)
    assert len(cache) == len(BEGINNING) + 6
    assert tokens(form, 7, cache, whole[: len(BEGINNING) + 7]) == whole
    # A prompt that differs takes back what differs by itself.
    changed = [*whole[: len(BEGINNING) + 3], 33]
    done = language_model(form).generate(changed, cache=cache, max_new_tokens=3)
    assert done.usage.cached_tokens == len(BEGINNING) + 3


def test_what_a_window_lost_by_going_back_is_read_by_its_codes() -> None:
    cache = language_model("window").new_cache()
    whole = tokens("window", 40, cache)
    cache.rewind(20)
    assert cache.tokens == tuple(whole[:20])
    assert len(tokens("window", 10, cache, whole[:22])) == 32


def test_nothing_is_kept_of_nothing() -> None:
    cache = language_model("growing").new_cache()
    tokens("growing", 3, cache)
    cache.rewind(0)
    assert (cache.tokens, len(cache), cache.nbytes) == ((), 0, 0)
    assert tokens("growing", 5, cache) == tokens("growing", 5)


def test_a_cache_says_how_large_it_is() -> None:
    model = language_model("growing")
    cache = model.new_cache()
    tokens("growing", 4, cache)
    assert cache.nbytes == len(cache) * model.signature.bytes_per_token
    assert cache.capacity is None
    assert language_model("in place").new_cache().capacity == 160
    assert language_model("in place").new_cache().nbytes == 160 * model.signature.bytes_per_token


@pytest.mark.parametrize(
    ("call", "message"),
    [("rewind", "cannot go back to 9"), ("fork", "count must be at least 1, got 0")],
)
def test_what_makes_no_sense(call: str, message: str) -> None:
    cache = language_model("growing").new_cache()
    with pytest.raises(UsageError, match=message):
        getattr(cache, call)(9 if call == "rewind" else 0)


def test_a_cache_has_one_owner(tmp_path: Path) -> None:
    model = language_model("growing")
    cache = model.new_cache()
    running = model.stream(BEGINNING, cache=cache)
    next(running)
    for call in (
        lambda: cache.rewind(1),
        lambda: cache.fork(1),
        lambda: cache.save(tmp_path / "file"),
        lambda: model.generate(BEGINNING, cache=cache),
    ):
        with pytest.raises(UsageError, match="in use by another call"):
            call()
    running.close()
    assert tokens("growing", 5, cache) == tokens("growing", 5)


def test_states_of_recurrent_layers_cannot_go_back(tmp_path: Path) -> None:
    ir.save(recurrent(), tmp_path / "model.onnx")
    model = tq_onnx.load(tmp_path / "model.onnx", threads=1)
    cache = model.new_cache()
    first = model.generate([5, 6, 7], cache=cache, max_new_tokens=4).tokens
    with pytest.raises(UnsupportedModelError, match="cannot go back"):
        cache.rewind(2)
    (other,) = cache.fork(1)
    cache.save(tmp_path / "talk.safetensors")
    kept = model.load_cache(tmp_path / "talk.safetensors")
    whole = model.generate([5, 6, 7], max_new_tokens=8).tokens
    for each in (cache, other, kept):
        done = model.generate([5, 6, 7, *first], cache=each, max_new_tokens=4)
        assert (*first, *done.tokens) == whole
    # Another text begins anew.
    again = model.generate([5, 6, 8], cache=cache, max_new_tokens=4)
    assert again.usage.cached_tokens == 0
    assert again.tokens == model.generate([5, 6, 8], max_new_tokens=4).tokens


@pytest.mark.parametrize("form", FORMS)
def test_a_saved_cache_goes_on(form: str, tmp_path: Path) -> None:
    cache = language_model(form).new_cache()
    first = tokens(form, 7, cache)
    cache.save(tmp_path / "talk.safetensors")
    kept = language_model(form).load_cache(tmp_path / "talk.safetensors")
    assert kept.tokens == cache.tokens
    assert tokens(form, 7, kept, first) == tokens(form, 14)


def test_a_cache_goes_on_in_another_process(tmp_path: Path) -> None:
    """And in caches of another kind: what was saved by growing ones is read by fixed ones."""
    cache = language_model("growing").new_cache()
    first = tokens("growing", 7, cache)
    cache.save(tmp_path / "talk.safetensors")
    code = (
        "import sys, tq_onnx\n"
        "model = tq_onnx.load(sys.argv[1], threads=1, context=100)\n"
        "cache = model.load_cache(sys.argv[2])\n"
        "ids = [int(each) for each in sys.argv[3].split()]\n"
        "print(*model.generate(ids, cache=cache, max_new_tokens=7).tokens)\n"
    )
    given = (str(folder("int4")), str(tmp_path / "talk.safetensors"), " ".join(map(str, first)))
    done = subprocess.run(
        [sys.executable, "-c", code, *given], check=True, capture_output=True, text=True
    )
    assert [*first, *map(int, done.stdout.split())] == tokens("growing", 14)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_cache_of_every_preset_goes_on(preset: str, tmp_path: Path) -> None:
    """Saved by growing caches, read by fixed ones: the tokens of one uninterrupted run."""
    path = tmp_path / "model.onnx"
    tq_onnx.convert(original(DYNAMO), path, preset=preset, external_data="copy")
    growing = tq_onnx.load(path, threads=1)
    whole = growing.generate(IDS, max_new_tokens=12).tokens
    cache = growing.new_cache()
    first = growing.generate(IDS, cache=cache, max_new_tokens=5).tokens
    cache.save(tmp_path / "talk.safetensors")
    fixed = tq_onnx.load(path, threads=1, context=64)
    for model in (growing, fixed):
        kept = model.load_cache(tmp_path / "talk.safetensors")
        done = model.generate([*IDS, *first], cache=kept, max_new_tokens=7)
        assert done.usage.cached_tokens == len(IDS) + 4
        assert (*first, *done.tokens) == whole


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="nothing kills like that here")
def test_a_save_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    code = (
        "import sys, tq_onnx\n"
        "model = tq_onnx.load(sys.argv[1], threads=1)\n"
        "cache = model.new_cache()\n"
        "model.generate(list(b'Call me Ishmael') * 60, cache=cache, max_new_tokens=1)\n"
        "while True:\n"
        "    cache.save(sys.argv[2])\n"
        "    print('saved', flush=True)\n"
    )
    file = tmp_path / "talk.safetensors"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder("int4")), str(file)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.kill()
    process.wait()
    kept = language_model("growing").load_cache(file)
    assert bytes(kept.tokens) == b"Call me Ishmael" * 60
