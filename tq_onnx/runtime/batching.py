"""Hold which requests of a folder onnxruntime-genai's Engine computes together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tq_onnx.errors import ModelFileError

CONFIGURATION: Final = "genai_config.json"


@dataclass(frozen=True)
class Batching:
    """What the Engine makes of a folder."""

    together: bool  #: whether requests are computed together
    reason: str  #: why requests are computed one at a time; empty where they are not
    tokens: int  #: most tokens of a prompt and its answer
    exact_rows: int  #: rows of a cache for exact tokens, besides those of all tokens
    most_rows: int  #: most rows of a cache
    block_size: int = 0  #: tokens in a page; 0 where caches are not in pages
    num_blocks: int = 0  #: pages of each cache
    #: number of token ids that the model knows; None if nothing tells it
    vocabulary: int | None = None
    places: int = 1  #: requests that are computed at a time; 1 where caches are not in pages
    #: whether pages of a prompt are kept for later ones that begin with them
    shares_prefixes: bool = False

    @property
    def joins(self) -> bool:
        """True if a request joins at any step, because the caches are in pages.

        If not, a batch of up to four begins when the one before has ended.
        """
        return self.block_size > 0

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer, for which there are pages."""
        return min(self.tokens, self.block_size * self.num_blocks) if self.joins else self.tokens

    def rows(self, tokens: int) -> int:
        """Return the rows of a request of so many tokens."""
        return min(tokens + self.exact_rows, self.most_rows)

    def pages(self, tokens: int) -> int:
        """Return the pages that so many tokens take."""
        return -(-tokens // self.block_size) if self.joins else 0


def read_configuration(folder: Path) -> dict[str, Any]:
    """Read the configuration of a folder of onnxruntime-genai."""
    path = folder / CONFIGURATION
    if not path.is_file():
        raise ModelFileError(
            f"there is no {CONFIGURATION}",
            where=str(folder),
            fix="give a folder of onnxruntime-genai, as tq-onnx convert FOLDER writes it",
        )
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"it cannot be read: {error}", where=str(path)) from error
    return document


def most_tokens(configuration: dict[str, Any]) -> int:
    """Return the tokens of a prompt and its answer that a configuration allows."""
    search, model = configuration.get("search", {}), configuration.get("model", {})
    return int(search.get("max_length", model.get("context_length", 0)))
