"""A cache belongs to one model, has one user, and changes by calls that succeed only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tq_onnx
from tests.language.models import PROMPT, folder, language_model
from tests.runtime.models import original
from tq_onnx import Cache, LanguageModel, Sampling
from tq_onnx.errors import ModelFileError, TqOnnxError, UsageError

IDS = list(PROMPT.encode())
ANOTHER = "the cache belongs to another model; make one by new_cache of this model"

CALLS: dict[str, Callable[[LanguageModel, Any], object]] = {
    "generate": lambda model, cache: model.generate(IDS, cache=cache, max_new_tokens=2),
    "stream": lambda model, cache: model.stream(IDS, cache=cache, max_new_tokens=2),
    "chat": lambda model, cache: model.chat(cache=cache),
}


def filled(model: LanguageModel, count: int = 3) -> Cache:
    cache = model.new_cache()
    model.generate(IDS, cache=cache, max_new_tokens=count)
    return cache


def bytes_of(cache: Cache) -> list[bytes]:
    return [cache.decoder.plane(index).tobytes() for index in range(8)]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("form", ["original", "window", "int4 again"])
def test_a_cache_of_another_model_is_refused_and_stays(
    form: str, call: Callable[[LanguageModel, Any], object]
) -> None:
    """Also if that model has opened the same file."""
    again = form == "int4 again"
    model = language_model("growing")
    cache = filled(tq_onnx.load(folder("int4"), threads=1) if again else language_model(form))
    before = cache.tokens, bytes_of(cache)
    with pytest.raises(UsageError, match=ANOTHER):
        call(model, cache)
    assert (cache.tokens, bytes_of(cache)) == before


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("cache", ["text", 5, [], language_model])
def test_what_is_no_cache(cache: object, call: Callable[[LanguageModel, Any], object]) -> None:
    with pytest.raises(UsageError, match=r"^cache must be a Cache, got .*"):
        call(language_model("growing"), cache)


BAD: dict[str, dict[str, Any]] = {
    "fraction": {"max_new_tokens": 1.5},
    "negative": {"max_new_tokens": -1},
    "sampling": {"sampling": {"temperature": 1}},
    "number for a stop": {"stop": 5},
    "half a character": {"stop": ["\ud800"]},
    "no text": {"stop": [""]},
}


@pytest.mark.parametrize("options", BAD.values(), ids=BAD)
def test_a_refused_call_leaves_the_cache(options: dict[str, Any]) -> None:
    model = language_model("growing")
    cache = filled(model)
    name = next(iter(options))
    before = cache.tokens, bytes_of(cache)
    for call in (model.generate, model.stream):
        with pytest.raises(UsageError, match=f"{name}.* (must be|is empty|is not valid)"):
            call(IDS[:3], cache=cache, **options)
    chat = model.chat(cache=cache)
    with pytest.raises(UsageError):
        chat.ask("x", **options)
    assert chat.messages == []
    assert (cache.tokens, bytes_of(cache)) == before
    assert model.generate(IDS, cache=cache, max_new_tokens=3).usage.cached_tokens == len(IDS) - 1


@pytest.mark.parametrize("name", ["mobius-default"])
def test_positions_end_a_text_as_a_full_cache_does(name: str) -> None:
    """The rows of its tables, here 64."""
    model = tq_onnx.load(original(name), threads=1)
    cache = model.new_cache()
    done = model.generate([1] * 60, cache=cache, max_new_tokens=9)
    assert (len(done.tokens), done.finish_reason, len(cache)) == (5, "length", 64)
    with pytest.raises(UsageError, match="65 tokens, and the cache holds 64"):
        model.generate([1] * 65, cache=cache)
    assert len(cache) == 64


@pytest.mark.parametrize("tokens", [-1, 1.0, True, None, "1", 2**70])
def test_rewinds_that_make_no_sense(tokens: Any) -> None:
    cache = filled(language_model("growing"))
    before = cache.tokens, bytes_of(cache)
    with pytest.raises(UsageError):
        cache.rewind(tokens)
    assert (cache.tokens, bytes_of(cache)) == before
    cache.rewind(np.int64(2))
    assert cache.tokens == tuple(IDS[:2])


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None, 10**9, 2**70])
def test_forks_that_make_no_sense(count: Any) -> None:
    with pytest.raises(UsageError, match=r"^count must be"):
        filled(language_model("growing")).fork(count)


def test_forks_need_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(language_model("growing"))
    monkeypatch.setattr("tq_onnx.language.cache.free_memory", lambda: 3 * cache.nbytes)
    assert len(cache.fork(3)) == 3
    with pytest.raises(
        UsageError, match=r"4 copies of .* bytes are more than the .* that are free"
    ):
        cache.fork(4)


@pytest.mark.parametrize("context", [0, -1, 1.5, True, "9", 2**31, 2**70])
def test_contexts_that_make_no_sense(context: Any) -> None:
    with pytest.raises(UsageError, match=r"^context must be "):
        tq_onnx.load(folder("int4"), threads=1, context=context)


def test_a_context_that_no_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tq_onnx.load(folder("int4"), threads=1, context=1000)

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("numpy.zeros", fail)
    with pytest.raises(UsageError, match=r"caches of 1000 tokens .* no memory for them"):
        model.new_cache()


def test_a_stream_that_is_dropped_lets_its_cache_go() -> None:
    model = language_model("growing")
    cache = filled(model)
    before = cache.tokens
    never_begun = model.stream(IDS[:4], cache=cache)
    assert cache.tokens == before
    running = model.stream([*IDS, 65], cache=cache)
    next(running)
    with pytest.raises(UsageError, match="in use by another call; close its stream"):
        next(never_begun)
    del running
    assert cache.tokens[: len(IDS) + 1] == (*IDS, 65)
    begun = model.stream(IDS, cache=cache, max_new_tokens=2)
    last = next(piece for piece in begun if piece.finish_reason)
    assert last.finish_reason == "length"
    assert model.generate(IDS, cache=cache, max_new_tokens=2).usage.cached_tokens == len(IDS) - 1
    begun.close()


@pytest.mark.parametrize("messages", [None, 5, "text", [5], [{"role": "user"}]])
def test_messages_that_are_changed_to_none(messages: Any, tmp_path: Path) -> None:
    chat = language_model("growing").chat("Be brief.")
    chat.ask("Who?", max_new_tokens=2)
    before = chat.cache.tokens
    chat.messages = messages
    for call in (
        lambda: chat.ask("x"),
        lambda: list(chat.stream("x")),
        chat.rewind,
        lambda: chat.save(tmp_path / "talk"),
    ):
        with pytest.raises(UsageError, match=r"no list|no role and content"):
            call()
    assert chat.cache.tokens == before
    assert not list(tmp_path.iterdir())


def test_messages_that_no_file_holds(tmp_path: Path) -> None:
    chat = language_model("growing").chat()
    chat.ask("Who?", max_new_tokens=2)
    for more in ({"content": [1]}, {"name": "me"}, {"content": object()}):
        chat.messages[0] = {"role": "user", "content": "x", **more}
        with pytest.raises(UsageError, match="more than the texts of a role and a content"):
            chat.save(tmp_path / "talk")
    assert not list(tmp_path.iterdir())


def test_a_conversation_and_its_stream() -> None:
    chat = language_model("growing").chat()
    chat.ask("Who?", max_new_tokens=2)
    before = list(chat.messages)
    for text in (5, None, b"x", "\ud800"):
        with pytest.raises(UsageError, match=r"^text (must be|is not valid)"):
            chat.ask(text)  # type: ignore[arg-type]
    for turns in (0, -1, 1.0, True, 2, 2**70):
        with pytest.raises(UsageError, match=r"turns must be|1 turn cannot go back by"):
            chat.rewind(turns)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^system must be a text, got 5"):
        language_model("growing").chat(5)  # type: ignore[arg-type]
    chat.stream("And?")  # never begun
    running = chat.stream("And?", max_new_tokens=9)
    next(running)
    for call in (chat.rewind, lambda: chat.ask("x"), lambda: next(chat.stream("x"))):
        with pytest.raises(UsageError, match="in use"):
            call()
    assert chat.messages == before
    del running
    assert [message["content"] for message in chat.messages][:3] == [
        *("Who?", before[1]["content"], "And?")
    ]


@pytest.mark.parametrize("sampling", [None, Sampling(1.0)])
def test_logits_that_are_not_finite_end_a_text_in_one_sentence(
    sampling: Sampling | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = language_model("growing")
    cache = model.new_cache()
    run, calls = type(cache.decoder)._run, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        logits = run(*arguments)
        return np.full_like(logits, np.nan) if len(calls) == 3 else logits

    monkeypatch.setattr(type(cache.decoder), "_run", failing)
    with pytest.raises(TqOnnxError, match="the logit of token 0 is nan, so no token can be chosen"):
        model.generate(IDS, cache=cache, sampling=sampling)
    assert len(cache) == len(IDS) + 2
    assert cache.tokens[: len(IDS)] == tuple(IDS)


def test_a_model_that_has_changed_saves_no_cache(tmp_path: Path) -> None:
    """The digests would be those of other weights."""
    for file in folder("int4").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    model = tq_onnx.load(tmp_path, threads=1)
    cache = filled(model)
    data = tmp_path / "model.onnx.data"
    content = data.read_bytes()
    data.unlink()
    for _ in range(2):  # once it is missing, once it is another one
        with pytest.raises(ModelFileError, match="the files have changed since"):
            cache.save(tmp_path / "talk")
        data.write_bytes(content + b"0")
