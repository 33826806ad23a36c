"""Tools, answers of a form, and completions of texts, by the server."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NEEDED = ("fastapi", "httpx", "onnxruntime_genai", "openai", "jsonschema")
MISSING = ", ".join(name for name in NEEDED if importlib.util.find_spec(name) is None)
if not MISSING:
    import jsonschema
    import openai
    from fastapi.testclient import TestClient

    from tests.serving.listening import served
    from tests.serving.running import Alone
    from tq_onnx.serving.calls import CallReader
    from tq_onnx.serving.model import ServedModel
    from tq_onnx.serving.protocol import ChatRequest
    from tq_onnx.serving.server import make_app

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: tests/serving/requirements.txt"),
]

SCHEMAS = 200
PLACE = {"$defs": {"place": {"enum": ["deck", "mast"]}}, "type": "object"}
LOOK = {
    **PLACE,
    "properties": {"at": {"$ref": "#/$defs/place"}, "times": {"enum": [1, 2]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "parameters": LOOK}},
    {"type": "function", "function": {"name": "wait", "description": "Does nothing."}},
]
NAMED = {"type": "function", "function": {"name": "look"}}
CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"at": "(deck|mast)"\}\}\n</tool_call>'
"""A regular expression, which has a model write what another one would by itself."""


@pytest.fixture(scope="module")
def client(paged: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    model = served(paged, tmp_path_factory.mktemp("client"))
    with TestClient(make_app(model)) as http:
        yield openai.OpenAI(
            base_url="http://testserver/v1", api_key="none", http_client=http, max_retries=0
        )


def ask(client: openai.OpenAI, **options: Any) -> Any:
    messages = options.pop("messages", [{"role": "user", "content": "Call me Ishmael."}])
    options = {"max_tokens": 120, "temperature": 0, **options}
    return client.chat.completions.create(model="paged", messages=messages, **options)


def calls_of(chunks: list[Any]) -> tuple[str, list[tuple[str, str]], str | None]:
    """The text, the calls and the finish of a stream, as clients put them together."""
    text = ""
    calls: dict[int, tuple[str, str]] = {}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for part in delta.tool_calls or ():
            name, arguments = calls.get(part.index, ("", ""))
            calls[part.index] = (
                name + (part.function.name or ""),
                arguments + part.function.arguments,
            )
    return text, [calls[number] for number in sorted(calls)], chunks[-1].choices[0].finish_reason


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_has_to_be_one(client: openai.OpenAI, choice: Any) -> None:
    whole = ask(client, tools=TOOLS, tool_choice=choice).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
    (call,) = whole.message.tool_calls
    assert call.id.startswith("call_")
    assert call.type == "function"
    if choice is NAMED:
        assert call.function.name == "look"
    if call.function.name == "look":
        jsonschema.validate(json.loads(call.function.arguments), LOOK)
    chunks = list(ask(client, tools=TOOLS, tool_choice=choice, stream=True))
    assert calls_of(chunks) == (
        "",
        [(call.function.name, call.function.arguments)],
        "tool_calls",
    )
    # The tool's answer goes back, with the call.
    messages = [
        {"role": "user", "content": "Call me Ishmael."},
        whole.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "A whale."},
    ]
    assert ask(client, tools=TOOLS, messages=messages, max_tokens=4).choices[0].message.content


def test_calls_are_found_in_what_a_model_writes(client: openai.OpenAI) -> None:
    regex = {"extra_body": {"regex": r"Aye\. " + CALL + r"\n" + CALL}, "max_tokens": 200}
    whole = ask(client, tools=TOOLS, **regex).choices[0]
    assert (whole.finish_reason, whole.message.content) == ("tool_calls", "Aye. ")
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert len(calls) == 2
    assert all(json.loads(arguments)["at"] in ("deck", "mast") for _, arguments in calls)
    chunks = list(ask(client, tools=TOOLS, stream=True, **regex))
    assert calls_of(chunks) == ("Aye. ", calls, "tool_calls")
    # Nothing is called where nothing may be, nor what there is not.
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS[1:]}):
        choice = ask(client, **options, **regex).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content.count("<tool_call>") == 2
    cut = ask(client, tools=TOOLS, **{**regex, "max_tokens": 30}).choices[0]
    assert (cut.finish_reason, cut.message.tool_calls) == ("length", None)
    assert cut.message.content.startswith("Aye. <tool_call>")


@pytest.mark.parametrize(
    ("pieces", "text", "calls"),
    [
        (["no ", "call <tool", " <tool_call"], "no call <tool <tool_call", []),
        (['<tool_call>{"name": "f"}', "</tool_call>"], "", ["f"]),
        (['{"name": "f", "parameters": {"a": 1}}'], "", ["f"]),
        (['<|python_tag|>{"name": "f"}\n'], "", ["f"]),
        (['{"name": "g"}'], '{"name": "g"}', []),
        (["{", "not JSON"], "{not JSON", []),
        (['<tool_call>{"name": "f"}'], "", ["f"]),
        (["<tool_call>[1]</tool_call>!"], "<tool_call>[1]</tool_call>!", []),
        (["  ", "\n"], "  \n", []),
        (["[" * 100_000], "[" * 100_000, []),
        (['{"name":' + "[" * 100_000], '{"name":' + "[" * 100_000, []),
    ],
)
def test_forms_of_calls(pieces: list[str], text: str, calls: list[str]) -> None:
    for parts in (pieces, list("".join(pieces)[:500]), ["".join(pieces)]):
        if "".join(parts) != "".join(pieces):
            continue
        reader = CallReader(["f"])
        said = "".join(reader.take(part) for part in parts) + reader.rest()
        assert said == text
        assert [call["function"]["name"] for call in reader.calls] == calls


def test_tools_reach_the_template_or_a_system_prompt(paged: Path, tmp_path: Path) -> None:
    model = served(paged, tmp_path)
    asked = ChatRequest(model="paged", tools=TOOLS, messages=[{"role": "user", "content": "hello"}])
    text = bytes(*model.prompts(asked)).decode()
    assert text.startswith("You may call functions.")
    assert '"name": "look", "parameters"' in text
    assert text.endswith("hello")
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{{ tools | tojson }}{% for message in messages %}{{ message.tool_calls | tojson }}"
        "{% endfor %}"
    )
    knowing = ServedModel(paged, chat_template=template)
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked = ChatRequest(model="paged", tools=TOOLS, messages=[said])
    text = bytes(*knowing.prompts(asked)).decode()
    assert "You may" not in text
    assert '"description": "Does nothing."' in text
    assert '"arguments": {"at": 1}' in text
    model.engine.close()
    knowing.engine.close()


def test_answers_of_a_form(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "look", "schema": LOOK}}
    for options in ({}, {"temperature": 1.5}):
        text = ask(client, response_format=form, **options).choices[0].message.content
        jsonschema.validate(json.loads(text), LOOK)
    chunks = ask(client, response_format=form, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), LOOK)
    text = ask(client, response_format={"type": "json_object"}).choices[0].message.content
    assert text.startswith("{")
    with pytest.raises(openai.BadRequestError, match="response_format cannot be used"):
        form["json_schema"]["schema"] = {"type": "x"}
        ask(client, response_format=form, stream=True)


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of a few tokens, whose values end."""

    def part() -> dict[str, Any]:
        return random_schema(draw, depth + 1)

    least = draw.randrange(-50, 50)
    kinds: list[dict[str, Any]] = [
        {"enum": draw.sample(["deck", "mast", 5, None, True, "a b"], 3)},
        {"const": draw.choice([{"a": [1, None]}, "sail", 2])},
        {"type": "integer", "minimum": least, "maximum": least + draw.randrange(60)},
        {"type": "string", "minLength": draw.randrange(3), "maxLength": 3 + draw.randrange(5)},
        {"type": draw.choice(["boolean", "null"])},
    ]
    if depth < 2 and draw.random() < 0.7:
        names = draw.sample(["who", "at", "times", "alive"], draw.randrange(1, 4))
        kinds = [
            {"type": "array", "items": part(), "minItems": draw.randrange(2), "maxItems": 3},
            {"anyOf": [part(), part()]},
            {
                "type": "object",
                "properties": {name: part() for name in names},
                "required": [name for name in names if draw.random() < 0.7],
                "additionalProperties": False,
            },
        ]
    return draw.choice(kinds)


def test_answers_are_valid_by_their_schemas(client: openai.OpenAI) -> None:
    draw, finished = random.Random(3), 0
    for number in range(SCHEMAS):
        schema = random_schema(draw)
        form = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
        choice = ask(client, response_format=form, temperature=number % 2, max_tokens=300).choices[
            0
        ]
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), schema)
            finished += 1
    assert finished > 0.9 * SCHEMAS


def test_several_answers(client: openai.OpenAI) -> None:
    """Each is drawn for itself; with a seed, they are the same again, streamed too."""
    options = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 12}
    whole = ask(client, **options)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert [choice.finish_reason for choice in whole.choices] == ["length"] * 3
    streamed = [""] * 3
    for chunk in ask(client, stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts
    assert ask(client, **{**options, "n": 1}).choices[0].message.content == texts[0]


def test_completions_of_texts(client: openai.OpenAI, raw: Path) -> None:
    text = "Call me Ishmael. Some years ago"
    expected = bytes(Alone(raw).answer(list(text.encode()), 24)).decode()
    prompts: list[Any] = [text, [text], list(text.encode())]
    for prompt in prompts:
        whole = client.completions.create(
            model="paged", prompt=prompt, max_tokens=24, temperature=0
        )
        assert (whole.object, whole.choices[0].text) == ("text_completion", expected)
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(text), 24)
    stream = client.completions.create(
        model="paged", prompt=text, max_tokens=24, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == expected
    short = client.completions.create(model="paged", prompt=text, temperature=0)
    assert short.choices[0].text == expected[:16]
    several = client.completions.create(
        model="paged", prompt=[text, text[:20]], n=2, max_tokens=24, temperature=0
    )
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices[:2]] == [expected] * 2
    assert several.choices[2].text == several.choices[3].text != expected
    assert several.usage is not None
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (len(text) + 20, 96)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ["a", 5]}, "prompt takes a text, a list of token ids, or a list of up to 64"),
        ({"prompt": ["a"] * 65}, "prompt takes a text"),
        ({"prompt": ["a"] * 33, "n": 2}, "n times the number of prompts is more than 64"),
        ({"prompt": ["a", ""]}, "the prompt is empty"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo takes false"),
        ({"prompt": "a", "logprobs": 2}, "logprobs takes"),
        ({"prompt": "a", "extra_body": {"messages": []}}, "messages is not known here"),
        ({"prompt": "a" * 40000}, "40,000 characters"),
    ]
    for options, told in wrong:
        with pytest.raises(openai.BadRequestError, match=told) as caught:
            client.completions.create(model="paged", **options)
        assert caught.value.param is not None
