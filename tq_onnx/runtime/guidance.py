"""What a text has to look like, for an engine that chooses only tokens which go on like that."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tq_onnx.errors import UsageError
from tq_onnx.runtime import arguments

_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Weak models otherwise write blanks until the end of their tokens."""


@dataclass(frozen=True)
class Guidance:
    """A description of all texts that may be written; one of the functions below makes it.

    Attributes:
        kind: as onnxruntime-genai calls it.
        text: the description.
    """

    kind: Literal["json_schema", "regex", "lark_grammar"]
    text: str

    @classmethod
    def of(cls, *, schema: object = None, regex: object = None, grammar: object = None) -> Guidance:
        """Return the guidance that one of the arguments describes.

        Args:
            schema: JSON schema of the text.
            regex: expression that the whole text matches.
            grammar: in the form of Lark, with llguidance's extensions.

        Raises:
            UsageError: it is not one of them, or none that can be read.
        """
        values = {"schema": schema, "regex": regex, "grammar": grammar}
        names = [name for name, value in values.items() if value is not None]
        if len(names) != 1:
            raise UsageError(f"{' and '.join(names) or 'nothing'} was given, and one is taken")
        if schema is not None:
            return cls("json_schema", _written(schema))
        text = arguments.text(regex if grammar is None else grammar, names[0])
        if not text:
            raise UsageError(f"{names[0]} is empty")
        return cls("regex" if grammar is None else "lark_grammar", text)


def _written(schema: object) -> str:
    if not isinstance(schema, Mapping):
        raise UsageError(f"schema must be a mapping, got {type(schema).__name__}")
    document: dict[str, Any] = {"x-guidance": _COMPACT, **schema}
    try:
        return json.dumps(document, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"schema is no JSON: {error}") from error
