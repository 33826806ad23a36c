"""Tokens and texts of the tokenizers library, and files that it cannot read."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.integrations.bundled import bundled_directory, heldout_text
from tq_onnx.integrations.huggingface import TextStream, Tokenizer, load_tokenizer

END = 256
END_TEXT = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(bundled_directory())


EXAMPLES = [
    "",
    "Call me Ishmael.",
    "  two  spaces\n\ttabs\r\n",
    "naïve — “quoted” 日本語 🙂 e\u0301",
    f"before{END_TEXT}after{END_TEXT}{END_TEXT}",
    "<|pad|>",
    "<|endoftext",
    "\x00\x7f\x80\xff\xad",
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    shown = text.replace(END_TEXT, "").replace("<|pad|>", "")
    assert tokenizer.decode(tokenizer.encode(text)) == shown


def test_heldout_text_survives(tokenizer: Tokenizer) -> None:
    text = heldout_text()
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text


def test_special_tokens_are_tokens_and_not_text(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(f"a{END_TEXT}b")
    assert tokens == [97, END, 98]
    assert tokenizer.decode(tokens) == "ab"
    assert tokenizer.eos_ids == (END,)


def test_incomplete_characters_are_replaced(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("🙂")
    assert len(smile) == 4
    assert tokenizer.decode(smile[:3]) == "\ufffd"
    assert tokenizer.decode([*smile[:2], 97]) == "\ufffda"


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*map(stream.take, tokens), stream.rest()]


def test_streaming_holds_back_half_a_character(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, tokenizer.encode("é!")) == ["", "é", "!", ""]
    assert pieces(tokenizer, tokenizer.encode("🙂")[:2]) == ["", "", "\ufffd"]
    assert pieces(tokenizer, [97, END, 98]) == ["a", "", "b", ""]
    assert pieces(tokenizer, []) == [""]


@given(tokens=st.lists(st.integers(0, 259), max_size=40))
def test_the_pieces_of_any_tokens_join_to_their_text(
    tokenizer: Tokenizer, tokens: list[int]
) -> None:
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_streaming_keeps_the_spaces_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Its decoder drops the space before the first token, so every token needs its context."""
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    vocabulary = ["<unk>", "▁", "▁he", "llo", "▁world", "é"]
    description = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in vocabulary]},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode("hello world hello")
    assert pieces(tokenizer, tokens) == ["he", "llo", " world", " he", "llo", ""]


def test_text_that_is_not_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="not valid Unicode"):
        tokenizer.encode("\udcff")


def test_other_threads_run_while_a_text_is_read(tokenizer: Tokenizer) -> None:
    """A server answers others meanwhile."""
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        tokenizer.encode("a " * 50_000)
        ended.set()

    def runs_meanwhile() -> bool:
        begun.clear()
        ended.clear()
        thread = threading.Thread(target=read)
        thread.start()
        begun.wait()
        meanwhile = not ended.is_set()
        thread.join()
        return meanwhile

    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)  # a thread runs until it gives the interpreter's lock away
    try:
        # A busy machine may wake this thread late.
        assert any(runs_meanwhile() for _ in range(20))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 3}', "[" * 100_000])
def test_a_damaged_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no readable tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config.json": '{"eos_token_id": 7}'}, (7,)),
        ({"config.json": '{"eos_token_id": 7}', "generation_config.json": "{}"}, (7,)),
        ({"config.json": '{"eos_token_id": 7}', "generation_config.json": "broken"}, (7,)),
        (
            {"config.json": '{"eos_token_id": 7}', "generation_config.json": '{"eos_token_id": 8}'},
            (8,),
        ),
        ({"genai_config.json": '{"model": {"eos_token_id": [8, 9]}}'}, (8, 9)),
        ({"config.json": '{"eos_token_id": "7"}'}, ()),
        ({"config.json": "[]"}, ()),
    ],
)
def test_end_of_text_tokens(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, ...]
) -> None:
    shutil.copy(bundled_directory() / "tokenizer.json", tmp_path)
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert load_tokenizer(tmp_path).eos_ids == expected
