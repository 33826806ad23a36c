"""Calls of tools in the text of an answer, and the schema of an answer that has to be one.

Models write a call as JSON with a name and arguments (or parameters): between <tool_call> and
</tool_call>, as Qwen and Hermes do, or as the whole answer, as Llama does.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from tq_onnx.serving.protocol import Tool

BEGIN, END = "<tool_call>", "</tool_call>"
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a function that says none."""
WHOLE = ("{", "<|python_tag|>")
"""What an answer begins with that is a call and nothing else."""
INSTRUCTIONS = (
    "You may call functions. To call one, answer with nothing but a JSON object: "
    '{"name": its name, "arguments": its arguments}. The functions, as JSON schemas:'
)


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return tools as chat templates take them."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


def instructions(tools: Sequence[Tool]) -> str:
    """Return a system prompt, for a chat template that knows no tools."""
    return "\n".join([INSTRUCTIONS, *(json.dumps(tool["function"]) for tool in described(tools))])


def schema_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these tools."""
    calls: list[dict[str, Any]] = []
    for tool in tools:
        parameters = dict(tool.function.parameters or NO_PARAMETERS)
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": parameters},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    # References in parameters mean their own root.
    shared: dict[str, Any] = {}
    for call in calls:
        for key in ("$defs", "definitions"):
            shared.setdefault(key, {}).update(call["properties"]["arguments"].pop(key, {}))
    return {**{key: value for key, value in shared.items() if value}, "anyOf": calls}


class CallReader:
    """Takes an answer piece by piece, and tells text and calls apart.

    Attributes:
        calls: those so far, as OpenAI's clients read them.
    """

    def __init__(self, names: Collection[str]) -> None:
        """Read calls of functions with these names; with none, everything is text."""
        self.calls: list[dict[str, Any]] = []
        self._names = frozenset(names)
        self._held = ""
        self._begun = False

    def take(self, text: str) -> str:
        """Take more text, and return what is certain to be no part of a call."""
        if not self._names:
            return text
        self._held += text
        if not self._begun:
            start = self._held.lstrip()
            if not start or any(mark.startswith(start[: len(mark)]) for mark in WHOLE):
                return ""  # perhaps a whole answer, which only its end tells
            self._begun = True
        said = ""
        while True:
            before, mark, behind = self._held.partition(BEGIN)
            if not mark:
                keep = next(
                    size for size in range(len(BEGIN) - 1, -1, -1) if before.endswith(BEGIN[:size])
                )
                text = before[: len(before) - keep]
                if self._blank(text):
                    return said  # perhaps another call follows
                self._held = before[len(text) :]
                return said + text
            said += "" if self._blank(before) else before
            content, mark, remainder = behind.partition(END)
            if not mark:
                self._held = BEGIN + behind
                return said
            said += "" if self._is_call(content) else BEGIN + content + END
            self._held = remainder

    def rest(self) -> str:
        """Return the text that is left at the end."""
        held, self._held = self._held, ""
        content = held.strip().removeprefix(WHOLE[1]).removeprefix(BEGIN).removesuffix(END)
        return "" if self._names and (self._is_call(content) or self._blank(held)) else held

    def _blank(self, text: str) -> bool:
        """Return True for what stands between calls."""
        return bool(self.calls) and not text.strip()

    def _is_call(self, text: str) -> bool:
        """Keep a call; False if the text is none."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return False
        values = call.get("arguments", call.get("parameters", {}))
        written = values if isinstance(values, str) else json.dumps(values)
        function = {"name": call["name"], "arguments": written}
        ident = f"call_{uuid.uuid4().hex[:24]}"
        self.calls.append({"id": ident, "type": "function", "function": function})
        return True
