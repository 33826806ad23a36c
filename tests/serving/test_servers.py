"""OpenAI's client talks to servers in processes of their own, and one of two replicas is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("fastapi", "httpx", "onnxruntime_genai", "openai")
MISSING = ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)
if not MISSING:
    import openai

    from tests.serving.processes import processes_of, serving
    from tests.serving.running import Alone, uneven_prompts

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: tests/serving/requirements.txt"),
]

NEW = 24
CLIENTS, REQUESTS = 8, 48
LONG = 120
"""Tokens of answers among which a replica is killed."""
RETRIES = 8
KILLS = 3


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short name: Ray has sockets in it."""
    with tempfile.TemporaryDirectory(prefix="tq-") as made:
        yield Path(made) / "home"


def texts(count: int, least: int = 4, most: int = 90) -> list[str]:
    return [
        bytes(prompt).decode("utf-8", "ignore") for prompt in uneven_prompts(count, least, most)
    ]


def ask(client: openai.OpenAI, text: str, *, stream: bool = False, **options: Any) -> Any:
    return client.chat.completions.create(
        model=client.models.list().data[0].id if "model" not in options else options.pop("model"),
        messages=[{"role": "user", "content": text}],
        temperature=0,
        max_tokens=NEW,
        stream=stream,
        **options,
    )


@pytest.mark.parametrize("name", ["raw", "paged"])
def test_answers_are_those_of_the_generator(
    name: str, raw: Path, home: Path, request: pytest.FixtureRequest
) -> None:
    """Whole and streamed, many at a time and so in batches."""
    alone = Alone(raw)
    asked = texts(24)
    prompts = [text.encode() for text in asked]
    expected = [bytes(alone.answer(list(prompt), NEW)).decode() for prompt in prompts]
    with serving("serve", request.getfixturevalue(name), home) as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def answer(number: int) -> str:
            if number % 2:
                whole = ask(client, asked[number], model=name)
                assert whole.usage.prompt_tokens == len(prompts[number])
                assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (
                    NEW,
                    "length",
                )
                return str(whole.choices[0].message.content)
            more = {"include_usage": True}
            stream = ask(client, asked[number], model=name, stream=True, stream_options=more)
            *chunks, last = list(stream)
            assert len(chunks) > 3
            assert chunks[-1].choices[0].finish_reason == "length"
            assert last.usage.completion_tokens == NEW
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        with ThreadPoolExecutor(CLIENTS) as pool:
            assert list(pool.map(answer, range(24))) == expected
        assert client.models.list().data[0].id == name
        # What is being answered is answered, and nothing else.
        stream = client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": asked[0]}],
            max_tokens=200,
            stream=True,
        )
        begun = next(stream)
        process.send_signal(signal.SIGTERM)
        *_, last = stream
        assert begun.choices[0].delta.role == "assistant"
        assert last.choices[0].finish_reason in ("length", "stop")
        assert process.wait(60) == 0
    log = (home / "log.txt").read_text()
    assert log.count("/v1/chat/completions 200, ") == 25
    assert "Traceback" not in log


def _answers_after_a_kill(
    client: openai.OpenAI, url: str, asked: list[str], expected: list[str]
) -> int:
    """Kills a replica among many requests; returns how many of them were sent again."""
    replicas = processes_of(url, 2)
    answered = threading.Semaphore(0)

    def answer(text: str) -> tuple[str | None, int]:
        got = client.chat.completions.with_raw_response.create(
            model="paged",
            messages=[{"role": "user", "content": text}],
            temperature=0,
            max_tokens=LONG,
        )
        answered.release()
        return got.parse().choices[0].message.content, got.retries_taken

    with ThreadPoolExecutor(CLIENTS) as pool:
        found = pool.map(answer, asked)
        for _ in range(REQUESTS // 3):
            answered.acquire()
        os.kill(replicas[0], signal.SIGKILL)
        answers = list(found)
    assert [text for text, _ in answers] == expected
    survivors = processes_of(url, 2)
    assert replicas[0] not in survivors
    assert replicas[1] in survivors
    return sum(1 for _, retries in answers if retries)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray")
@pytest.mark.skipif(sys.platform != "linux", reason="ends what Ray leaves by /proc")
def test_nothing_is_lost_with_a_replica(raw: Path, paged: Path, home: Path) -> None:
    asked = texts(REQUESTS, 8, 60)
    alone = Alone(raw)
    expected = [bytes(alone.answer(list(text.encode()), LONG)).decode() for text in asked]
    assert len(set(expected)) > REQUESTS // 3

    with serving("ray", paged, home, "--replicas", "2") as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=RETRIES)
        # A replica that answers nobody at the moment loses nothing: then another one is killed.
        for _ in range(KILLS):
            retried = _answers_after_a_kill(client, url, asked, expected)
            if retried:
                break
        print(f"{retried} of {REQUESTS} were sent again")
        assert retried > 0
        stream = ask(client, asked[0], model="paged", stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == expected[0][:NEW]
        # Turns of a conversation find what their replica has.
        messages = [{"role": "user", "content": asked[0]}, {"role": "assistant", "content": text}]
        for number in range(4):
            messages.append({"role": "user", "content": asked[number]})
            more = client.chat.completions.create(
                model="paged", messages=messages, temperature=0, max_tokens=NEW
            )
            assert more.usage.prompt_tokens_details.cached_tokens > NEW
            messages.append({"role": "assistant", "content": more.choices[0].message.content})
