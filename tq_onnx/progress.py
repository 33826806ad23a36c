"""Report the progress of long work: one type and one callback for the whole product.

Whatever takes long has a parameter ``on_progress`` and calls it with a ``Progress`` as each step
begins and while one goes on. Calls come from the thread that does the work; what the callback
raises stops the work, and nothing half-written is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """The state of a running operation.

    Attributes:
        doing: what is being done, in words for people: "Copying files".
        done: units that are done. The unit belongs to ``doing``: bytes when files are copied or
            compared, windows or tokens of a text that is read, else steps of the work; only the
            quotient of ``done`` and ``total`` means the same everywhere.
        total: units in all; None if unknown.
        seconds: expected time of all of it on this machine; None if unknown.
    """

    doing: str
    done: int = 0
    total: int | None = None
    seconds: float | None = None


OnProgress = Callable[[Progress], None]
"""Takes a ``Progress``; what it returns is ignored."""


def silent(_progress: Progress) -> None:
    """Do nothing: the callback where nobody listens."""
