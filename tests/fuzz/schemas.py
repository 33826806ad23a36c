"""Values that a JSON schema describes, and some that it just does not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Final

TEXTS: Final = (
    *("", "a", "user", "assistant", "hello", "Call me Ishmael.", "text", "auto", " " * 40),
    *("\0", "a\0b", "\u00e9\U0001f600", "\ud800", "\x1b[31m\r\n", "<|endoftext|>", "{{ 1 // 0 }}"),
    "a" * 300,
)
INTEGERS: Final = (0, 1, 2, 7, 64, -1, 1 << 31, 1 << 63, 1 << 64, 10**30)
NUMBERS: Final = (0.0, 0.5, 1, 1e-6, 5e-324, 1e-40, 2.0, 1e308, float("nan"), float("inf"))
DEEPEST: Final = 6


class Schemas:
    """Draws values.

    Args:
        definitions: of an OpenAPI document, by the name that references have.
        draw: makes the choices.
    """

    def __init__(self, definitions: Mapping[str, Any], draw: random.Random) -> None:
        self._definitions = definitions
        self._draw = draw

    def value(self, schema: Mapping[str, Any], depth: int = 0) -> Any:
        """A value of a schema; one in forty is of another."""
        draw = self._draw
        if depth > DEEPEST or draw.randrange(40) == 39:
            return draw.choice((None, True, {}, [], *TEXTS, *INTEGERS, *NUMBERS))
        if "$ref" in schema:
            return self.value(self._definitions[schema["$ref"].rpartition("/")[2]], depth)
        if "anyOf" in schema:
            return self.value(draw.choice(schema["anyOf"]), depth + 1)
        if "const" in schema or "enum" in schema:
            return draw.choice(schema.get("enum") or [schema["const"]])
        kinds = {
            "string": lambda: draw.choice(TEXTS),
            "boolean": lambda: draw.random() < 0.5,
            "null": lambda: None,
            "integer": lambda: self._number(schema, INTEGERS),
            "number": lambda: self._number(schema, NUMBERS),
            "array": lambda: self._array(schema, depth),
            "object": lambda: self._object(schema, depth),
        }
        return kinds.get(schema.get("type", ""), lambda: draw.choice(TEXTS))()

    def _number(self, schema: Mapping[str, Any], others: tuple[float, ...]) -> float:
        least, most = schema.get("minimum"), schema.get("maximum")
        inside = [
            number
            for number in (*others, least, most)
            if number is not None
            and (least is None or number >= least)
            and (most is None or number <= most)
        ]
        return self._draw.choice(inside or others)

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least = schema.get("minItems", 0)
        size = min(least + self._draw.randrange(3), schema.get("maxItems", 3))
        return [self.value(schema.get("items", {}), depth + 1) for _ in range(size)]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required, often = schema.get("required", ()), 0.8 if depth else 0.15
        made = {
            name: self.value(each, depth + 1)
            for name, each in schema.get("properties", {}).items()
            if name in required or self._draw.random() < often
        }
        if schema.get("additionalProperties", False) and self._draw.random() < 0.3:
            made[self._draw.choice(TEXTS)] = self._draw.choice(TEXTS)
        return made
