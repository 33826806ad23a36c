"""Make texts fit to be sent to others: without folders, host and user names."""

from __future__ import annotations

import getpass
import platform
import re
from typing import Final

_SEPARATED: Final = r"[^\s'\"`<>|:;,()\[\]{}]"
_PATH: Final = re.compile(rf"(?<![\w./\\-])(?:~|\.\.?|[A-Za-z]:)?[\\/](?:{_SEPARATED}+[\\/])*")
_HOST: Final = re.compile(r"(hostname\s*=\s*)\S+", re.IGNORECASE)
_LONGEST: Final = 600
_SHORTEST_NAME: Final = 3
"""Letters of a host or user name that is replaced; shorter ones are parts of words."""


def anonymise(text: str) -> str:
    """Return a text with file names for paths, and without names of the host and its user."""
    text = _HOST.sub(r"\1...", " ".join(text.split()))
    text = _PATH.sub("", text)
    for name in _names():
        text = re.sub(rf"\b{re.escape(name)}\b", "...", text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _names() -> list[str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # nobody that the system knows
        user = ""
    return [name for name in (platform.node(), user) if len(name) >= _SHORTEST_NAME]
