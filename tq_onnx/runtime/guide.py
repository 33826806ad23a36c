"""Follow a text by its guidance, and rule out the tokens that do not go on like that.

llguidance is an optional dependency (``pip install tq-onnx[guidance]``) and imported here only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np

from tq_onnx.errors import ModelFileError, UsageError
from tq_onnx.runtime.guidance import Guidance
from tq_onnx.runtime.sampling import Logits

_SHOWN: Final = 200


class GuideTokens:
    """The tokens of a tokenizer, as bytes; made once for many guides.

    Args:
        text: content of a ``tokenizer.json``.
        eos_ids: tokens that end a text.
        path: of the tokenizer, for errors.

    Raises:
        UsageError: llguidance is not installed.
        ModelFileError: it cannot read the tokenizer.
    """

    def __init__(self, text: str, eos_ids: tuple[int, ...], path: Path) -> None:
        """Read the tokenizer; see the class for arguments and errors."""
        try:
            import llguidance
        except ImportError as missing:
            raise UsageError(
                "llguidance, which follows a guidance, is not installed",
                fix="pip install 'tq-onnx[guidance]', or leave `guidance` out",
            ) from missing
        self.matcher: Any = llguidance.LLMatcher
        try:
            self.tokenizer: Any = llguidance.LLTokenizer(text, eos_token=list(eos_ids) or None)
        except ValueError as error:
            raise ModelFileError(
                f"llguidance cannot read the tokenizer ({_line(error)})",
                where=str(path),
                fix="leave `guidance` out",
            ) from error


class Guide:
    """The place of one text in its guidance.

    Args:
        guidance: what the text has to look like.
        tokens: of its tokenizer.

    Raises:
        UsageError: llguidance cannot read the guidance.
    """

    def __init__(self, guidance: Guidance, tokens: GuideTokens) -> None:
        """Begin with no text; see the class for arguments and errors."""
        reader: Any = {
            "json_schema": tokens.matcher.grammar_from_json_schema,
            "regex": tokens.matcher.grammar_from_regex,
            "lark_grammar": tokens.matcher.grammar_from_lark,
        }[guidance.kind]
        self._matcher: Any = tokens.matcher(tokens.tokenizer, reader(guidance.text), log_level=0)
        self._refuse_error("guidance cannot be read")

    @property
    def is_complete(self) -> bool:
        """True if no token may follow but the end of the text."""
        return bool(self._matcher.is_stopped())

    def masked(self, logits: Logits) -> Logits:
        """Return logits ``[vocabulary]`` with minus infinity for the tokens that may not follow.

        Raises:
            UsageError: no token may follow, or llguidance gives up.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._refuse_error("llguidance gives up")
        allowed = np.zeros(len(logits), np.bool_)
        bits = np.unpackbits(mask, bitorder="little")[: len(logits)]
        allowed[: len(bits)] = bits
        if not allowed.any():
            raise UsageError("the guidance leaves no token of this model")
        return np.where(allowed, logits, np.array(-np.inf, logits.dtype))

    def take(self, token: int) -> None:
        """Go on by a token that may follow.

        Raises:
            UsageError: llguidance gives up.
        """
        self._matcher.consume_token(token)
        self._refuse_error("llguidance gives up")

    def _refuse_error(self, what: str) -> None:
        if self._matcher.is_error():
            raise UsageError(f"{what}: {_line(self._matcher.get_error())}")


def _line(reason: object) -> str:
    return " ".join(str(reason).split())[:_SHOWN]
