"""What the server takes, and what it says of the rest."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tq_onnx.errors import UsageError

NEEDED = ("fastapi", "httpx", "onnxruntime_genai")
MISSING = ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)
if not MISSING:
    from fastapi.testclient import TestClient
    from pydantic import ValidationError

    from tests.serving.listening import served
    from tq_onnx.serving.model import ServedModel
    from tq_onnx.serving.protocol import BODY, ChatRequest, CompletionRequest
    from tq_onnx.serving.server import make_app

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: tests/serving/requirements.txt"),
]

ROUTE = "/v1/chat/completions"
NEW = 24
TOOLS = [{"type": "function", "function": {"name": "look"}}]
HELLO = {"role": "user", "content": "hello"}
ASKED = {"model": "int4", "messages": [HELLO], "max_tokens": 2, "temperature": 0}
PYDANTIC = ("Input should", "Extra inputs", "Value error", "Field required", "should have")


@pytest.fixture(scope="module")
def client(int4: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    model = served(int4, tmp_path_factory.mktemp("client"))
    with TestClient(make_app(model)) as made:
        yield made


def refused(answer: Any, status: int = 400) -> dict[str, Any]:
    """The error of a response: one sentence of ours."""
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].isprintable()
    assert error["message"].isascii()
    assert len(error["message"]) < 300
    assert not any(words in error["message"] for words in PYDANTIC)
    return error


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"seed": -1}, "seed takes 0 to 2^63 - 1; change it or leave it out"),
        ({"seed": 2**64}, "seed takes 0 to 2^63 - 1"),
        ({"seed": 10**400}, "seed takes"),
        ({"seed": 1.5}, "seed takes"),
        ({"seed": True}, "seed takes"),
        ({"top_k": 2**31}, "top_k takes 0 (for all) to 2147483647"),
        ({"top_k": -1}, "top_k takes"),
        ({"max_tokens": 0}, "max_tokens takes 1 to 2147483647"),
        ({"max_tokens": 2**31}, "max_tokens takes"),
        ({"max_tokens": "5"}, "max_tokens takes"),
        ({"max_completion_tokens": -1}, "max_completion_tokens takes"),
        ({"temperature": -1}, "temperature takes a number from 0 to 2"),
        ({"temperature": float("nan")}, "temperature takes"),
        ({"temperature": float("inf")}, "temperature takes"),
        ({"temperature": "0.5"}, "temperature takes"),
        ({"temperature": 1e-40}, "a number that float32 holds"),
        ({"top_p": 1.5}, "top_p takes a number from 1e-6 to 1"),
        # By which the Engine would mean no bound.
        ({"top_p": 0}, "top_p takes"),
        ({"top_p": 5e-324}, "top_p takes"),
        ({"stream": "true"}, "stream takes true or false"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage takes true or"),
        ({"stream_options": {"more": 1}}, "stream_options.more is not known here; leave it out"),
        ({"stop": ["a", ""]}, "stop takes a text, or a list of up to 4 texts, none of them empty"),
        ({"stop": ["a"] * 5}, "stop takes"),
        ({"stop": ""}, "stop takes"),
        ({"stop": "\ud800"}, "stop takes"),
        ({"model": 3}, "model takes the name of the model"),
        ({"messages": []}, "messages takes a list of one message or more"),
        ({"messages": None}, "messages is missing; it takes a list"),
        ({"messages": "hello"}, "messages takes"),
        ({"messages": ["hello"]}, "messages.0 takes a list of one message or more"),
        ({"messages": [HELLO, {"content": "a"}]}, "messages.1.role is missing; it takes a text"),
        ({"messages": [{"role": "user"}]}, "messages.0.content takes a text, or a list of"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content takes"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content takes"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "the text is not valid Unicode"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content takes",
        ),
        ({"messages": [{"role": "user", "content": ""}]}, "the prompt is empty"),
        (
            {"messages": [{"role": "user", "content": "a" * 3000}]},
            "3000 tokens, and this model takes 2048",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 40000}]},
            "40,000 characters, and this server takes",
        ),
        ({"n": 0}, "n takes 1 to 64; change it or leave it out"),
        ({"n": 65}, "n takes 1 to 64"),
        ({"repetition_penalty": 0}, "repetition_penalty takes a number above 0, to 100"),
        ({"tools": [{"type": "function"}]}, "tools.0 takes a list of"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0 takes a list of"),
        ({"tools": {}}, "tools takes a list of"),
        ({"tool_choice": "always"}, 'tool_choice takes "none", "auto", "required" or'),
        ({"tool_choice": "required"}, "tool_choice asks for a tool that tools does not have"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS},
            "tool_choice asks for a tool that tools does not have",
        ),
        ({"regex": ""}, "regex takes an expression that the whole answer matches"),
        ({"regex": "("}, "regex cannot be used ("),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "exclude each other"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "response_format cannot be used (Invalid type: x)",
        ),
        ({"response_format": {"type": "json_schema"}}, 'response_format takes {"type": "text"}'),
        ({"frequency_penalty": 0.5}, "frequency_penalty takes 0, as no penalties are computed"),
        ({"logprobs": True}, "logprobs takes false, as onnxruntime-genai's Engine gives no prob"),
        ({"logit_bias": {"5": 1}}, "logit_bias takes an empty object"),
        ({"response_format": {"type": "xml"}}, 'response_format takes {"type": "text"}'),
        ({"modalities": ["audio"]}, 'modalities.0 takes ["text"]'),
        ({"audio": {}}, "audio is not known here; leave it out"),
        ({"\x1b\n\u00e9": 1}, "\\x1b\\n\\xe9 is not known here"),
        ({"x" * 5000: 1}, "... is not known here"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_field_is_refused_in_a_sentence_with_its_name(
    client: TestClient, fields: dict[str, Any], told: str, stream: bool
) -> None:
    body = json.dumps({**ASKED, "stream": stream, **fields})
    error = refused(client.post(ROUTE, content=body, headers={"Content-Type": "application/json"}))
    assert told in error["message"]
    first = next(iter(fields))
    if ", and this" in told:
        assert error["code"] == "context_length_exceeded"
    assert error["param"].split(".")[0] == first or not first.isidentifier() or len(first) > 60
    assert client.post(ROUTE, json=ASKED).status_code == 200


def test_models_and_seeds_that_are_not_there(client: TestClient) -> None:
    error = refused(client.post(ROUTE, json=ASKED | {"model": "gpt"}), 404)
    assert error["message"] == "there is no model 'gpt'; ask for 'int4'"
    refused(client.post(ROUTE, json=ASKED | {"model": "gpt\n" * 5000}), 404)
    error = refused(client.post(ROUTE, json=ASKED | {"seed": 4, "temperature": 1}))
    assert (error["param"], error["message"].partition(" ")[0]) == ("seed", "seed")


NEUTRAL: dict[str, list[Any]] = {
    "n": [1, None],
    "frequency_penalty": [0, 0.0, None],
    "presence_penalty": [0, None],
    "min_p": [0, None],
    "logprobs": [False, None],
    "top_logprobs": [0, None],
    "logit_bias": [{}, None],
    "tools": [[], None],
    "tool_choice": ["none", "auto", None],
    "parallel_tool_calls": [True, False, None],
    "response_format": [{"type": "text"}, None],
    "modalities": [["text"], None],
    "service_tier": ["auto", "default", None],
    "stream_options": [None, {"include_usage": True}],
    "stop": [[], None],
    "seed": [7, None],
    "user": ["me", None],
    "store": [False, None],
    "metadata": [{"a": "b"}, None],
    "functions": [None],
    "reasoning_effort": [None],
}
"""What front ends send where their users chose nothing."""


@pytest.mark.parametrize("name", NEUTRAL)
def test_values_that_ask_for_nothing_are_taken(client: TestClient, name: str) -> None:
    plain = client.post(ROUTE, json=ASKED).json()["choices"]
    for value in NEUTRAL[name]:
        answer = client.post(ROUTE, json=ASKED | {name: value})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain


def test_messages_as_clients_send_them_back(client: TestClient) -> None:
    """As openai-python and LangChain have them after a turn, and with text in parts."""
    said = {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None}
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    turns = [{"role": "developer", "content": ""}, said, {"role": "user", "content": parts}]
    plain = client.post(ROUTE, json=ASKED).json()
    answer = client.post(ROUTE, json=ASKED | {"messages": turns}).json()
    assert answer["choices"] == plain["choices"]


def test_fields_of_messages_reach_the_template(int4: Path, tmp_path: Path) -> None:
    model = served(int4, tmp_path)
    (tmp_path / "chat.jinja").write_text("{{ messages[0].name }}{{ messages[0].other is defined }}")
    named = ServedModel(int4, chat_template=tmp_path / "chat.jinja")
    message = {**HELLO, "name": "me", "other": None}
    asked = ChatRequest(model="int4", messages=[message])
    assert bytes(*named.prompts(asked)) == b"meFalse"
    (tmp_path / "chat.jinja").write_text("{{ raise_exception('no roles alternate') }}")
    strict = ServedModel(int4, chat_template=tmp_path / "chat.jinja")
    with TestClient(make_app(strict)) as client:
        error = refused(client.post(ROUTE, json=ASKED))
        assert error["message"].startswith("the chat template refuses the messages (no roles alt")
        assert str(tmp_path) not in error["message"]
    # The end of the text is not where a character of value 0 is.
    asked.messages[0].content = "a\0b"
    assert bytes(*model.prompts(asked)) == b"a\0b"
    named.engine.close()
    model.engine.close()


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", JSON),
        (b"{", JSON),
        (b"[]", JSON),
        (b"null", JSON),
        (b'"text"', JSON),
        (b'{"model": NaN', JSON),
        (b"\xff\xfe{}", JSON),
        (b'{"model": "\xff"}', JSON),
        (b"[" * 100_000, JSON),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, JSON),
        (b'{"seed":' + b"9" * 5000 + b"}", JSON),
        (json.dumps(ASKED).encode(), {"Content-Type": "text/plain"}),
        (json.dumps(ASKED).encode(), {"Content-Type": "application/x-www-form-urlencoded"}),
        (json.dumps(ASKED).encode(), {"Content-Type": "multipart/form-data; boundary=a"}),
        (json.dumps(ASKED).encode(), {"Content-Type": "\x7f"}),
    ],
)
def test_a_body_that_is_no_json_is_refused(
    client: TestClient, content: bytes, headers: dict[str, str]
) -> None:
    error = refused(client.post(ROUTE, content=content, headers=headers))
    assert error["message"] == BODY


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [1.5] * 1000},
        {"prompt": ["a"] * 1000},
        {"prompt": [[]] * 1000},
        {"prompt": [["a"] * 1000]},
        {"prompt": "a", "stop": [1] * 1000},
        {"prompt": "a", **{f"x{number}": 1 for number in range(1000)}},
    ],
)
def test_many_mistakes_are_not_all_explained(fields: dict[str, Any]) -> None:
    """It would take time, in which nobody is answered."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "int4", **fields})
    assert caught.value.error_count() < 8


def test_deep_fields_go_as_far_as_the_template(client: TestClient) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    answer = client.post(ROUTE, json=ASKED | {"messages": [{**HELLO, "name": deep}]})
    assert answer.status_code == 200
    refused(client.post(ROUTE, json=ASKED | {"messages": [{**HELLO, "content": deep}]}))


@pytest.mark.parametrize(
    ("method", "path", "status", "told"),
    [
        ("GET", "/v1/nothing", 404, "there is no such route; ask for /v1/chat/completions"),
        ("GET", "/health/", 404, "no such route"),
        ("GET", "/docs", 404, "no such route"),
        ("GET", ROUTE, 405, "this route takes POST"),
        ("OPTIONS", ROUTE, 405, "this route takes POST"),
        ("POST", "/health", 405, "this route takes GET"),
        ("PUT", "/v1/models", 405, "this route takes GET"),
    ],
)
def test_routes_that_are_not_there(
    client: TestClient, method: str, path: str, status: int, told: str
) -> None:
    answer = client.request(method, path)
    assert told in refused(answer, status)["message"]
    assert (answer.headers.get("Allow") in ("GET", "POST")) == (status == 405)
    assert client.head(path).status_code in (404, 405)


def test_options_reach_the_engine(client: TestClient) -> None:
    def text(**fields: Any) -> Any:
        asked = {"model": "int4", "messages": [{"role": "user", "content": "Call me"}]}
        answer = client.post(ROUTE, json=asked | {"max_tokens": NEW} | fields)
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


def test_a_lost_engine_is_told(int4: Path, tmp_path: Path) -> None:
    model = served(int4, tmp_path)
    with TestClient(make_app(model)) as client:
        assert client.get("/health").json()["batches"] == "yes"
        model.engine.close()
        for answer in (client.get("/health"), client.post(ROUTE, json=ASKED)):
            assert refused(answer, 503)["message"] == "the Engine was closed"


def test_a_defect_is_told(int4: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served(int4, tmp_path)
    monkeypatch.setattr(model, "prompts", lambda _: {}["defect"])
    with TestClient(make_app(model), raise_server_exceptions=False) as client:
        error = refused(client.post(ROUTE, json=ASKED), 500)
        assert (error["message"], error["type"]) == (
            "this is a defect of the server, whose log has more",
            "server_error",
        )
        assert client.get("/health").status_code == 200


def test_a_folder_without_a_chat_template_completes_texts(int4: Path) -> None:
    with TestClient(make_app(ServedModel(int4))) as client:
        error = refused(client.post(ROUTE, json=ASKED))
        assert error["message"] == "this model has no chat template; ask for /v1/completions"
        text = {"model": "int4", "prompt": "hello", "max_tokens": 2}
        assert client.post("/v1/completions", json=text).status_code == 200


def test_a_chat_computes_what_is_new(paged: Path, tmp_path: Path) -> None:
    """Messages that are sent back as they came are the beginning of the next prompt."""
    model = served(paged, tmp_path)
    messages = [HELLO]
    with TestClient(make_app(model)) as client:
        for known in (0, 12, 27):
            body = {"model": "paged", "messages": messages, "max_tokens": 8, "temperature": 0}
            answer = client.post(ROUTE, json=body).json()
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": known}
            said = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})
            messages.append({"role": "user", "content": "tell me"})


def test_cached_tokens_are_told_and_system_prompts_are_warmed(paged: Path, tmp_path: Path) -> None:
    said = "You answer in the words of an old sailor. " * 12
    (tmp_path / "system.txt").write_text(f"{said}\n")
    model = served(paged, tmp_path, warm=[tmp_path / "system.txt"])
    messages = [{"role": "system", "content": said.strip()}, HELLO]
    asked = ASKED | {"model": "paged", "messages": messages}
    with TestClient(make_app(model)) as client:
        for more in ({}, {"stop": ["e", "t", " ", "a"], "max_tokens": 64}):
            usage = client.post(ROUTE, json=asked | more).json()["usage"]
            assert usage["prompt_tokens"] == len(said.strip()) + len("hello")
            assert usage["prompt_tokens_details"] == {"cached_tokens": 256}
    with pytest.raises(UsageError, match="is no text file"):
        served(paged, tmp_path, warm=[tmp_path / "none"])
