"""Chat templates say what transformers' would, and reach nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.language.templates import ChatTemplate, find_template, read_template
from tq_onnx.language.text import StopStrings

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>"}, "folder/tokenizer_config.json")


def test_turns_become_text() -> None:
    whole = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n"
    assert template(CHATML).render(TURNS, answer=False) == whole
    assert template(CHATML).render(TURNS) == whole + "<|im_start|>assistant\n"


def test_functions_are_written_where_the_template_knows_them() -> None:
    source = "{% if tools %}{{ tools | tojson }} {% endif %}" + CHATML
    whole = template(CHATML).render(TURNS)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert template(source).takes_tools and not template(CHATML).takes_tools
    assert template(source).render(TURNS, tools=tools) == f"{json.dumps(tools)} {whole}"
    assert template(source).render(TURNS) == template(CHATML).render(TURNS, tools=tools) == whole


def test_blocks_leave_no_lines_and_names_are_known() -> None:
    source = (
        "{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.content }}\n"
        "{% endfor %}\n{{ bos_token }}{{ messages[0] | tojson }}"
    )
    assert template(source).render(TURNS) == 'Hi\n<s>{"role": "user", "content": "Hi"}'
    assert re.fullmatch(r"20\d\d", template("{{ strftime_now('%Y') }}").render(TURNS))


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].update({'role': 'x'}) }}", "not safely callable|unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{% for a in range(10 ** 9) %}{% endfor %}", "too big"),
    ],
)
def test_what_a_template_may_not_do(source: str, told: str) -> None:
    with pytest.raises(UsageError, match=told) as caught:
        template(source).render(TURNS)
    assert "\n" not in str(caught.value)


def test_messages_are_not_changed_and_have_roles() -> None:
    turns: list[dict[str, Any]] = [dict(turn) for turn in TURNS]
    template(CHATML).render(turns)
    assert turns == TURNS
    with pytest.raises(UsageError, match="no role and content"):
        template(CHATML).render([{"role": "user"}])


def test_where_templates_are_found(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"
    assert find_template(tmp_path) is None
    config.write_text(json.dumps({"bos_token": {"content": "<b>"}}), encoding="utf-8")
    assert find_template(tmp_path) is None

    def rendered() -> str:
        found = find_template(tmp_path)
        assert found is not None
        return found.render(TURNS)

    named = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "{{ bos_token }}1"},
    ]
    fields = {"bos_token": {"content": "<b>"}, "chat_template": named}
    config.write_text(json.dumps(fields), encoding="utf-8")
    assert rendered() == "<b>1"
    config.write_text(json.dumps({**fields, "chat_template": "{{ bos_token }}2"}), encoding="utf-8")
    assert rendered() == "<b>2"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}3", encoding="utf-8")
    assert rendered() == "<b>3"
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}4", encoding="utf-8")
    assert read_template(other, tmp_path).render(TURNS) == "<b>4"
    assert read_template(other, tmp_path / "none").render(TURNS) == "4"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("chat_template.jinja", b"{% if %}", "cannot be read"),
        ("chat_template.jinja", b"\xff\xfe", "UTF-8"),
        ("chat_template.jinja", b"", "is empty"),
        ("tokenizer_config.json", b"{", "no JSON"),
        ("tokenizer_config.json", b"[" * 100_000, "no JSON"),
        ("chat_template.jinja", b"a" * ((1 << 20) + 1), "more than 1,048,576 bytes"),
    ],
)
def test_damaged_templates(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match=told):
        find_template(tmp_path)


# Stop strings, wherever they are cut.


_LETTERS = st.text("ab", max_size=12)


@given(st.lists(_LETTERS, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_text_in_parts_ends_where_the_whole_does(parts: list[str], stops: list[str]) -> None:
    cut, given_out = StopStrings(stops), ""
    whole = ""
    for part in parts:
        if cut.found:
            break
        whole += part
        given_out += cut.take(part)
        ends = [whole.find(stop) for stop in stops if stop in whole]
        assert cut.found == bool(ends)
        assert whole[: min(ends)] == given_out if ends else whole.startswith(given_out)
    if not cut.found:
        assert given_out + cut.rest() == whole
    assert cut.take("more") == "" if cut.found else True
