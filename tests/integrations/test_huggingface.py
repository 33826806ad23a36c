"""The tokenizer with and without the tokenizers library: the same tokens, the same text."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.integrations.bundled import bundled_directory, heldout_text
from tq_onnx.integrations.huggingface import Tokenizer, load_tokenizer, stream_text

END = 256
END_TEXT = "<|endoftext|>"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules makes the import fail as if the library were not installed.
    monkeypatch.setitem(sys.modules, "tokenizers", None)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tokenizers", None)
        return load_tokenizer(bundled_directory())


@pytest.fixture(scope="module")
def library() -> Tokenizer:
    return load_tokenizer(bundled_directory())


def test_the_two_are_not_the_same(plain: Tokenizer, library: Tokenizer) -> None:
    assert type(plain) is not type(library)


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
def test_both_paths_agree(plain: Tokenizer, library: Tokenizer, text: str) -> None:
    tokens = plain.encode(text)
    assert tokens == library.encode(text)
    assert plain.decode(tokens) == library.decode(tokens)


@given(text=st.text())
def test_both_paths_agree_on_any_text(plain: Tokenizer, library: Tokenizer, text: str) -> None:
    assert plain.encode(text) == library.encode(text)
    assert plain.decode(plain.encode(text)) == text


@given(tokens=st.lists(st.integers(0, 259)))
def test_both_paths_agree_on_any_tokens(
    plain: Tokenizer, library: Tokenizer, tokens: list[int]
) -> None:
    assert plain.decode(tokens) == library.decode(tokens)


def test_heldout_text_survives(plain: Tokenizer) -> None:
    text = heldout_text()
    tokens = plain.encode(text)
    assert len(tokens) == len(text.encode())
    assert plain.decode(tokens) == text


def test_special_tokens_are_tokens_and_not_text(plain: Tokenizer) -> None:
    tokens = plain.encode(f"a{END_TEXT}b")
    assert tokens == [97, END, 98]
    assert plain.decode(tokens) == "ab"
    assert plain.eos_ids == (END,)


def test_incomplete_characters_are_replaced(plain: Tokenizer) -> None:
    smile = plain.encode("🙂")
    assert len(smile) == 4
    assert plain.decode(smile[:3]) == "\ufffd"
    assert plain.decode([*smile[:2], 97]) == "\ufffda"


def test_streaming_holds_back_half_a_character(plain: Tokenizer) -> None:
    assert list(stream_text(plain, plain.encode("é!"))) == ["", "é", "!"]
    assert list(stream_text(plain, plain.encode("🙂")[:2])) == ["", "", "\ufffd"]
    assert list(stream_text(plain, [97, END, 98])) == ["a", "", "b"]
    assert list(stream_text(plain, [])) == []


def test_streaming_takes_a_token_only_when_it_is_asked(plain: Tokenizer) -> None:
    taken: list[int] = []

    def tokens() -> Iterator[int]:
        for token in plain.encode("abc"):
            taken.append(token)
            yield token

    pieces = stream_text(plain, tokens())
    assert (next(pieces), taken) == ("a", [97])
    assert (next(pieces), taken) == ("b", [97, 98])


@pytest.mark.parametrize("kind", ["plain", "library"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 259), max_size=40))
def test_the_pieces_of_any_tokens_join_to_their_text(
    request: pytest.FixtureRequest, kind: str, tokens: list[int]
) -> None:
    tokenizer = request.getfixturevalue(kind)
    assert "".join(stream_text(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_streaming_keeps_the_spaces_of_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    """Its decoder drops the space before the first token, so every token needs its context."""
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    pieces = ["<unk>", "▁", "▁he", "llo", "▁world", "é"]
    description = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [[piece, -1.0] for piece in pieces]},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = load_tokenizer(tmp_path)
    tokens = tokenizer.encode("hello world hello")
    assert list(stream_text(tokenizer, tokens)) == ["he", "llo", " world", " he", "llo"]


def test_text_that_is_not_unicode_is_refused(plain: Tokenizer, library: Tokenizer) -> None:
    for tokenizer in (plain, library):
        with pytest.raises(UsageError, match="not valid Unicode"):
            tokenizer.encode("\udcff")


def test_other_threads_run_while_a_text_is_read(library: Tokenizer) -> None:
    """A server answers others meanwhile."""
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        begun.set()
        library.encode("a " * 50_000)
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


def edited(tmp_path: Path, **fields: Any) -> Path:
    """A folder with the bundled tokenizer, some of its fields replaced."""
    description = json.loads((bundled_directory() / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(description | fields))
    return tmp_path


MODEL = json.loads((bundled_directory() / "tokenizer.json").read_text())["model"]
ADDED = {
    **{"id": 256, "content": "x", "special": True},
    **{"lstrip": False, "rstrip": False, "single_word": False},
}
OTHER_KINDS: dict[str, dict[str, Any]] = {
    "merges": {"model": MODEL | {"merges": [["Ā", "ā"]]}},
    "another model": {"model": {"type": "Unigram", "vocab": []}},
    "a byte is missing": {"model": MODEL | {"vocab": {"a": 0}}},
    "normaliser": {"normalizer": {"type": "Lowercase"}},
    "prefix space": {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}},
    "pre-tokeniser": {"pre_tokenizer": {"type": "Whitespace"}},
    "no decoder": {"decoder": None},
    "a beginning-of-text token": {
        "post_processor": {"type": "TemplateProcessing", "special_tokens": {"<s>": {}}}
    },
    "two bytes of one token": {"model": MODEL | {"vocab": MODEL["vocab"] | {"a": 98}}},
    "a byte without a number": {"model": MODEL | {"vocab": MODEL["vocab"] | {"a": "97"}}},
    "an added token without a text": {"added_tokens": [ADDED | {"content": 5}]},
    "an added token without a number": {"added_tokens": [ADDED | {"id": "256"}]},
    "added tokens that strip": {
        "added_tokens": [
            {"id": 256, "content": "x", "special": True, "lstrip": True, "rstrip": False}
        ]
    },
}


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("fields", OTHER_KINDS.values(), ids=OTHER_KINDS.keys())
def test_other_kinds_need_the_library(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError, match=r"pip install 'tq-onnx\[text\]'") as caught:
        load_tokenizer(edited(tmp_path, **fields))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 3}', "[" * 100_000])
def test_a_damaged_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("content", ["", "{", "[" * 100_000])
def test_a_damaged_tokenizer_without_the_library(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match="cannot be read"):
        load_tokenizer(tmp_path)


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
    directory = edited(tmp_path)
    for name, content in files.items():
        (directory / name).write_text(content)
    assert load_tokenizer(directory).eos_ids == expected
