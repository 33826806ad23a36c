"""OpenAI's client talks to the servers of examples/serving, and one of two replicas is killed."""

from __future__ import annotations

import asyncio
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

from tq_onnx.integrations.folderconversion import convert_folder
from tq_onnx.targets.registry import target_of

NEEDED = ("fastapi", "httpx", "onnxruntime_genai", "openai", "ray")
MISSING = ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)
if not MISSING:
    import openai
    from fastapi.testclient import TestClient

    from tests.serving.processes import TEMPLATE, processes_of, serving
    from tests.serving.running import Alone, example, uneven_prompts

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: tests/serving/requirements.txt"),
]

NEW = 24
CLIENTS, REQUESTS = 8, 96
RETRIES = 8
KILLS = 3


@pytest.fixture(scope="module")
def int4(folder: Path) -> Path:
    return convert_folder(folder, folder.with_name("int4")).output


@pytest.fixture(scope="module")
def raw(folder: Path) -> Path:
    return convert_folder(folder, folder.with_name("raw"), preset="raw").output


@pytest.fixture(scope="module")
def paged(folder: Path) -> Path:
    """Caches in pages, as exact as those of ``raw``."""
    target = target_of("paged", num_blocks=120)
    return convert_folder(folder, folder.with_name("paged"), preset="raw", target=target).output


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short name: Ray has sockets in it."""
    with tempfile.TemporaryDirectory(prefix="tq-") as made:
        yield Path(made) / "home"


def chat_of(folder: Path, tmp_path: Path, **options: Any) -> Any:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    return example("server").Chat(folder, chat_template=template, **options)


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
    with serving("server.py", request.getfixturevalue(name), home) as url:
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


@pytest.mark.parametrize(
    ("fields", "status", "told"),
    [
        ({"model": "gpt"}, 404, "there is no model 'gpt', but 'int4'"),
        ({"seed": 4, "temperature": 1}, 400, "no seed for a request in static batches"),
        ({"temperature": -1}, 400, "temperature: Input should be greater"),
        ({"top_p": 1.5}, 400, "top_p: Input should be less"),
        # By which the Engine would mean no bound.
        ({"top_p": 0}, 400, "top_p: Input should be greater"),
        ({"max_tokens": 0}, 400, "max_tokens: Input should be greater"),
        ({"n": 2}, 400, "n: Input should be 1"),
        ({"tools": []}, 400, "tools: Extra inputs are not permitted"),
        ({"messages": []}, 400, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "user", "content": "a" * 3000}]}, 400, "this model takes 2048"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0"),
        ({"stop": ["a", ""]}, 400, "4 texts at most, none empty"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused(
    client: TestClient, fields: dict[str, Any], status: int, told: str, stream: bool
) -> None:
    asked = {"model": "int4", "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    answer = client.post("/v1/chat/completions", json=asked | fields)
    assert answer.status_code == status
    assert told in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def client(int4: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    chat = chat_of(int4, tmp_path_factory.mktemp("client"))
    with TestClient(example("server").make_app(chat)) as made:
        yield made


def test_nonsense_is_refused(client: TestClient) -> None:
    for answer in (
        client.post("/v1/chat/completions", content=b"{"),
        client.post("/v1/chat/completions", json=[]),
        client.get("/v1/nothing"),
    ):
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_options_reach_the_engine(client: TestClient) -> None:
    def text(**fields: Any) -> Any:
        asked = {"model": "int4", "messages": [{"role": "user", "content": "Call me"}]}
        answer = client.post("/v1/chat/completions", json=asked | {"max_tokens": NEW} | fields)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    best, reason = text(temperature=0, seed=7)
    assert (text(temperature=2, top_k=1), reason) == ((best, "length"), "length")
    assert text(temperature=0, top_p=0.5)[0] == best
    assert text(top_p=0.01)[0] == best
    drawn = {text(temperature=2, top_k=0)[0] for _ in range(3)}
    assert len(drawn) == 3
    stop = best[8:12]
    assert text(temperature=0, stop=stop) == (best[: best.index(stop)], "stop")
    assert text(temperature=0, max_completion_tokens=5) == (best[:5], "length")


class Letters:
    """A tokenizer whose tokens are letters."""

    def create_stream(self) -> Letters:
        return self

    def decode(self, token: int) -> str:
        return chr(token)


@pytest.mark.parametrize(
    ("text", "stops", "pieces", "stopped"),
    [
        ("abc", [], ["a", "b", "c", ""], False),
        ("aab!", ["ab"], ["", "a", "", "", ""], True),
        ("ab.aba", ["abc"], ["", "", "ab.", "", "", "ab", "a"], False),
        ("xENDy", ["END", "ND"], ["x", "", "", "", "", ""], True),
        ("abcd", ["cd", "bcde"], ["a", "", "", "b", ""], True),
    ],
)
def test_text_ends_before_a_stop_string(
    text: str, stops: list[str], pieces: list[str], stopped: bool
) -> None:
    until = example("server").TextUntil(Letters(), stops)
    shown = [until.add(ord(letter)) for letter in text]
    assert ([*shown, until.rest()], until.stopped) == (pieces, stopped)


def test_a_client_that_leaves_cancels_its_answer(int4: Path, tmp_path: Path) -> None:
    chat = chat_of(int4, tmp_path, alone=True)
    server = example("server")
    hello = {"role": "user", "content": "hello"}

    async def leave_and_ask_again() -> tuple[int, int]:
        long = server.ChatRequest(model="int4", messages=[hello], temperature=0)
        left = chat.begin(long)
        pieces = aiter(left)
        await anext(pieces)
        await pieces.aclose()
        short = chat.begin(long.model_copy(update={"max_tokens": 3}))
        async for _ in short:
            pass
        return left._job.is_cancelled, short.tokens

    try:
        assert asyncio.run(leave_and_ask_again()) == (True, 3)
        assert not chat.engine._thread._running
    finally:
        chat.engine.close()


def test_a_lost_engine_is_told(int4: Path, tmp_path: Path) -> None:
    chat = chat_of(int4, tmp_path)
    with TestClient(example("server").make_app(chat)) as client:
        assert client.get("/health").json()["batches"] == "yes"
        chat.engine.close()
        asked = {"model": "int4", "messages": [{"role": "user", "content": "hello"}]}
        for answer in (client.get("/health"), client.post("/v1/chat/completions", json=asked)):
            assert answer.status_code == 503
            assert answer.json()["error"]["message"] == "the Engine was closed"


def test_a_folder_without_a_chat_template(int4: Path) -> None:
    with pytest.raises(SystemExit, match="--chat-template"):
        example("server").Chat(int4)


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
            max_tokens=NEW,
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


@pytest.mark.skipif(sys.platform != "linux", reason="ends what Ray leaves by /proc")
def test_nothing_is_lost_with_a_replica(raw: Path, paged: Path, home: Path) -> None:
    asked = texts(REQUESTS, 8, 60)
    alone = Alone(raw)
    expected = [bytes(alone.answer(list(text.encode()), NEW)).decode() for text in asked]
    assert len(set(expected)) > REQUESTS // 3

    with serving("ray_serve.py", paged, home, "--replicas", "2") as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=RETRIES)
        # A replica that answers nobody at the moment loses nothing: then another one is killed.
        for _ in range(KILLS):
            retried = _answers_after_a_kill(client, url, asked, expected)
            if retried:
                break
        print(f"{retried} of {REQUESTS} were sent again")
        assert retried > 0
        stream = ask(client, asked[0], model="paged", stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected[0]
