"""Conversations through a pipe and on a terminal."""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest

import tq_onnx
from tests.cli.processes import start
from tests.cli.run import Outcome, run
from tests.language.models import folder
from tq_onnx.runtime.sampling import Sampling

LONG = ("--max-new-tokens", "1900", "--threads", "1")
MODEL = ("--max-new-tokens", "6", "--threads", "1")


def talk(monkeypatch: pytest.MonkeyPatch, text: str, *options: object) -> Outcome:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return run("chat", folder("int4"), *MODEL, *options)


def answers(*questions: str) -> list[str]:
    chat = tq_onnx.load(folder("int4"), threads=1).chat()
    return [chat.ask(question, max_new_tokens=6).text for question in questions]


def test_each_line_is_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = talk(monkeypatch, "Call me Ishmael.\n\nAnd then?")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out == "".join(f"{text}\n" for text in answers("Call me Ishmael.", "And then?"))


def test_a_conversation_is_saved_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "talk.safetensors"
    first = talk(monkeypatch, f"Call me Ishmael.\n/save {file}\n/exit\nnot read\n")
    assert first.code == 0
    assert first.err.startswith("saved: 1 turn, ")
    then = talk(monkeypatch, f"/load {file}\nAnd then?\n/rewind\n/rewind 1\nCall me Ishmael.\n")
    assert then.code == 0
    one, other = answers("Call me Ishmael.", "And then?")
    assert then.err.splitlines()[1:] == ["> Call me Ishmael.", " ".join(one.split())]
    assert (first.out, then.out) == (f"{one}\n", f"{other}\n{one}\n")


def test_prompts_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tq_onnx.runtime.generate.PROMPT_PIECE", 16)
    expected = talk(monkeypatch, "Call me Ishmael.\n")
    outcomes = [
        talk(monkeypatch, "Call me Ishmael.\n", "--prompt-cache", tmp_path) for _ in range(2)
    ]
    assert outcomes == [expected] * 2
    assert len(list(tmp_path.glob("*.safetensors"))) == 2


def test_sampling_is_what_the_model_recommends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(folder("int4"), tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": "high", "seed": 3}
    drawn = []

    def recorded(**fields: object) -> Sampling:
        drawn.append(fields)
        return Sampling()

    monkeypatch.setattr("tq_onnx.runtime.sampling.Sampling", recorded)
    for settings in (recommended, recommended | {"do_sample": False}, []):
        path.write_text(json.dumps(settings))
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert run("chat", tmp_path / "model", "--top-k", 7).code == 0
    usual = asdict(Sampling())
    assert drawn == [usual | {"temperature": 0.6, "top_k": 7}, *([usual | {"top_k": 7}] * 2)]


@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        ("/dance", 2, "there is no command /dance; /help shows all"),
        ("/save", 2, "/save needs the name of a file"),
        ("/rewind two", 2, "/rewind takes a number, not 'two'"),
        ("/rewind", 2, "0 turns cannot go back by 1"),
        ("/load nowhere", 4, "nowhere: there is no such file; check the path"),
        ("/save here", 2, "an empty cache cannot be saved"),
    ],
)
def test_what_a_pipe_cannot_do_ends_it(
    monkeypatch: pytest.MonkeyPatch, line: str, code: int, sentence: str
) -> None:
    assert sentence in talk(monkeypatch, f"{line}\nquestion\n").sentence(code)


def test_help_and_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(monkeypatch, "").out == ""
    outcome = talk(monkeypatch, "/help\n")
    assert (outcome.code, outcome.out) == (0, "")
    assert "/rewind [N]" in outcome.err


def test_a_cache_of_no_conversation_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lm = tq_onnx.load(folder("int4"), threads=1)
    cache = lm.new_cache()
    lm.generate([5, 6], cache=cache, max_new_tokens=2)
    cache.save(tmp_path / "cache")
    found = talk(monkeypatch, f"/load {tmp_path / 'cache'}\n").sentence(4)
    assert "the file holds no conversation; save it again with Chat.save" in found


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals here")
def test_ctrl_c_stops_an_answer_and_then_leaves() -> None:
    """A second answer begins after the first was stopped; Ctrl-C at the prompt leaves."""
    master, slave = os.openpty()
    process = start("chat", folder("original"), *LONG, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    seen = ""

    def until(text: str, *, signals: bool = False) -> str:
        """Read up to a text; Python loses a signal just before its prompt waits for input."""
        nonlocal seen
        end = time.monotonic() + 60
        quiet = signals
        while text not in seen:
            assert time.monotonic() < end, seen
            if quiet and signals:
                process.send_signal(signal.SIGINT)
            # Another one while it leaves would end it without a word: first comes "^C" alone.
            quiet = not select.select([master], [], [], 5 if signals else 1)[0]
            if not quiet:
                seen += os.read(master, 4096).decode()
        before, _, seen = seen.partition(text)
        return before

    try:
        until("\n> ")
        os.write(master, b"A whale\n")
        until("A whale\r\n")
        until("e")
        process.send_signal(signal.SIGINT)
        assert len(until("\n> ")) < 1800
        os.write(master, b"/rewind 2\n")
        until("error: 1 turn cannot go back by 2")
        until("> ")
        until("interrupted", signals=True)
        assert process.wait(60) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
        os.close(master)
