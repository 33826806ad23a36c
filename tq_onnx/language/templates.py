"""Chat templates: turns to the text that a model was trained on.

A template is the Jinja of ``chat_template.jinja`` or of ``tokenizer_config.json``, as transformers
writes them, and is rendered as transformers does: blocks leave no lines, ``raise_exception`` and
``strftime_now`` exist. It comes with the model, from a stranger: it runs in jinja2's immutable
sandbox, which reaches no file, no attribute of Python objects and changes nothing that it is given.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tq_onnx.errors import ModelFileError, UnsupportedModelError, UsageError
from tq_onnx.files.regular import read_text

TEMPLATE_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"
_LARGEST: Final = 1 << 20
_LARGEST_CONFIG: Final = 1 << 27

Message = Mapping[str, Any]


def messages_of(value: object) -> list[Message]:
    """Return the turns of a conversation."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise UsageError("the messages are no list", fix="give a list of roles and contents")
    for message in value:
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise UsageError("a message has no role and content", fix="give both of each")
    return list(value)


def texts_of(value: object) -> list[Message]:
    """Return the turns of a conversation that can be saved, whose contents are texts."""
    messages = messages_of(value)
    for message in messages:
        parts = list(message.values())
        if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise UsageError("a message is more than the texts of a role and a content")
    return messages


class ChatTemplate:
    """The chat template of a model."""

    def __init__(self, source: str, names: Mapping[str, str], where: str) -> None:
        """Compile the template; see the class for arguments and errors."""
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self._names = dict(names)
        self._where = where
        self.takes_tools = "tools" in source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            raise ModelFileError(
                f"the chat template cannot be read ({_line(error)})",
                where=where,
                fix="copy it again from the original model",
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        answer: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the text of some turns.

        Args:
            tools: descriptions of functions that the model may call, as JSON schemas; a template
                that does not know them leaves them out, see ``takes_tools``.
        """
        turns = messages_of(messages)
        try:
            return self._template.render(
                messages=[dict(message) for message in turns],
                add_generation_prompt=answer,
                tools=None if tools is None else list(tools),
                documents=None,
                **self._names,
            )
        # A template may do whatever it likes, and so may what it raises.
        except Exception as error:
            raise UsageError(
                f"the chat template refuses the messages ({_line(error)})",
                where=self._where,
                fix="check their roles and their order",
            ) from error


def find_template(folder: Path) -> ChatTemplate | None:
    """Find the chat template in the folder of a tokenizer; None if there is none."""
    file, config = folder / TEMPLATE_FILE, folder / CONFIG_FILE
    if file.is_file():
        return read_template(file, folder)
    fields = _config(config)
    source: Any = fields.get("chat_template")
    if isinstance(source, list):  # several by name
        named = {each.get("name"): each.get("template") for each in source if _is_dict(each)}
        source = named.get("default")
    if not isinstance(source, str) or not source:
        return None
    return ChatTemplate(source, _special_tokens(fields), str(config))


def read_template(path: Path, folder: Path) -> ChatTemplate:
    """Read a chat template from a file."""
    source = _text(path, _LARGEST)
    if not source:
        raise ModelFileError(
            "the chat template is empty",
            where=str(path),
            fix="copy it again from the original model",
        )
    return ChatTemplate(source, _special_tokens(_config(folder / CONFIG_FILE)), str(path))


def require_template(folder: Path, model: Path) -> ChatTemplate:
    """Find the chat template of a model, and refuse to go on without one."""
    template = find_template(folder)
    if template is None:
        raise UnsupportedModelError(
            "the model has no chat template, so it takes texts and no messages",
            where=str(model),
            fix=f"copy {TEMPLATE_FILE} or {CONFIG_FILE} of the original model to its tokenizer",
        )
    return template


def _special_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens in a configuration, by name."""
    return {
        name: text
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (text := _content(fields.get(name))) is not None
    }


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        fields = json.loads(_text(path, _LARGEST_CONFIG))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(
            "the file is no JSON", where=str(path), fix="copy it again from the original model"
        ) from error
    return fields if _is_dict(fields) else {}


def _text(path: Path, largest: int) -> str:
    try:
        if path.stat().st_size > largest:
            raise ModelFileError(
                f"the file has more than {largest:,} bytes", where=str(path), fix="check the file"
            )
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(
            "the file cannot be read as UTF-8 text", where=str(path), fix="check the file"
        ) from error


def _content(token: Any) -> str | None:
    """Return the text of a special token, which may be told with its properties."""
    text = token.get("content") if _is_dict(token) else token
    return text if isinstance(text, str) else None


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _refuse(message: object) -> None:
    import jinja2

    raise jinja2.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
