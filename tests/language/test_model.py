"""Texts from a language model: pieces, ends, batches, threads."""

from __future__ import annotations

import threading

import pytest

import tq_onnx
from tests.language.models import FORMS, PROMPT, folder, language_model
from tests.runtime.models import DYNAMO, converted
from tq_onnx import Sampling
from tq_onnx.errors import ModelFileError, UnsupportedModelError, UsageError
from tq_onnx.language.text import LENGTH, STOP


@pytest.mark.parametrize("form", FORMS)
def test_pieces_are_the_text(form: str) -> None:
    model = language_model(form)
    done = model.generate(PROMPT, max_new_tokens=20)
    parts = list(model.stream(PROMPT, max_new_tokens=20))
    assert "".join(part.text for part in parts) == done.text == bytes(done.tokens).decode()
    assert sum((part.tokens for part in parts), ()) == done.tokens
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [LENGTH]
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(PROMPT), 20)
    assert done.usage.total_tokens == len(PROMPT) + 20
    assert done.seconds.prefill > 0
    assert done.seconds.decode > 0


def test_pages_give_the_text_of_caches_of_sequences() -> None:
    """The same codecs without an exact window; the greedy tokens cross pages of 16 tokens."""
    paged, growing = (
        language_model(form).generate(PROMPT, max_new_tokens=40) for form in ("paged", "growing")
    )
    assert paged.tokens == growing.tokens


def test_a_text_ends_before_a_stop_string() -> None:
    model = language_model("growing")
    text = model.generate(PROMPT, max_new_tokens=40).text
    stop = text[12:15]
    at = text.index(stop)
    cache = model.new_cache()
    done = model.generate(PROMPT, cache=cache, max_new_tokens=40, stop=["nothing like it", stop])
    assert (done.text, done.finish_reason) == (text[:at], STOP)
    assert len(done.tokens) == at + 3
    assert cache.tokens == (*PROMPT.encode(), *done.tokens[:-1])
    parts = list(model.stream(PROMPT, max_new_tokens=40, stop=stop))
    assert "".join(part.text for part in parts) == text[:at]
    assert parts[-1].finish_reason == STOP


def test_no_half_character_is_given_out() -> None:
    """With draws of this heat, bytes are any."""
    model = language_model("growing")
    sampling = Sampling(temperature=3.0, seed=3)
    parts = list(model.stream(PROMPT, max_new_tokens=80, sampling=sampling))
    whole = b"".join(bytes([each]) for part in parts for each in part.tokens if each < 256)
    assert "".join(part.text for part in parts) == whole.decode(errors="replace")
    assert any(b > 127 for b in whole)


def test_a_full_cache_ends_the_text() -> None:
    model = tq_onnx.load(folder("int4"), threads=1, context=40)
    cache = model.new_cache()
    done = model.generate(PROMPT, cache=cache, max_new_tokens=100)
    assert done.finish_reason == LENGTH
    assert len(cache) == 40
    assert len(done.tokens) == 41 - len(PROMPT)
    with pytest.raises(UsageError, match="the prompt has 41 tokens, and the cache holds 40"):
        model.generate("x" * 41)


def test_ids_need_no_tokenizer() -> None:
    model = tq_onnx.load(converted(DYNAMO), threads=1)
    done = model.generate([5, 6, 7], max_new_tokens=5)
    assert (done.text, len(done.tokens)) == ("", 5)
    assert [part.tokens for part in model.stream([5, 6, 7], max_new_tokens=2)] == [
        *((each,) for each in done.tokens[:2]),
        (),
    ]
    with pytest.raises(ModelFileError, match="no tokenizer"):
        model.generate("text")
    with pytest.raises(ModelFileError, match="no tokenizer"):
        model.generate([5], stop=["x"])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([300], r"prompt\[0\] is 300, and the model knows the ids 0 to"),
        ({"role": "user", "content": "x"}, "prompt must be a list of token ids, got type dict"),
        ("\ud800", "not valid Unicode"),
        ([{"role": "user", "content": "x"}, 5], "no role and content"),
        ([{"role": "user"}], "no role and content"),
    ],
)
def test_prompts_that_are_none(prompt: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        language_model("growing").generate(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["growing", "in place"])
def test_threads_do_not_disturb_each_other(form: str) -> None:
    model = language_model(form)
    prompts = [f"{PROMPT}{'!' * index}" for index in range(8)]
    wanted = [model.generate(prompt, max_new_tokens=12).tokens for prompt in prompts]
    found: dict[int, tuple[int, ...]] = {}

    def run(index: int) -> None:
        found[index] = model.generate(prompts[index], max_new_tokens=12).tokens

    threads = [threading.Thread(target=run, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[index] for index in range(8)] == wanted


def test_messages_need_a_template() -> None:
    model = tq_onnx.load(converted(DYNAMO), threads=1)
    with pytest.raises(UnsupportedModelError, match="no chat template"):
        model.generate([{"role": "user", "content": "hello"}])
    with pytest.raises(UnsupportedModelError, match="no chat template"):
        model.chat()


def test_a_conversation_computes_its_new_tokens_only() -> None:
    model = language_model("growing")
    chat = model.chat(system="Be brief.")
    first = chat.ask("Who are you?", max_new_tokens=10)
    second = chat.ask("And then?", max_new_tokens=10)
    before = "system: Be brief.\nuser: Who are you?\nassistant: "
    assert second.usage.cached_tokens >= len(before) + len(first.text.encode()) - 4
    text = f"{before}{first.text}\nuser: And then?\nassistant: "
    assert second.text == model.generate(text, max_new_tokens=10).text
    assert [each["role"] for each in chat.messages] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    chat.rewind()
    assert len(chat.messages) == 3
    streamed = "".join(part.text for part in chat.stream("And then?", max_new_tokens=10))
    assert streamed == second.text
    with pytest.raises(UsageError, match="2 turns cannot go back by 3"):
        chat.rewind(3)


def test_an_answer_that_is_left_early_counts_as_far_as_it_went() -> None:
    chat = language_model("growing").chat()
    running = chat.stream("Who are you?", max_new_tokens=30)
    given = "".join(next(running).text for _ in range(5))
    running.close()
    assert chat.messages[-1] == {"role": "assistant", "content": given}
    assert chat.ask("Go on.", max_new_tokens=3).usage.cached_tokens > 20
