"""Signals that ask a command to end: it undoes what is half done first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TerminatedError(BaseException):
    """A signal asks the process to end; not an ``Exception``, like ``KeyboardInterrupt``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Turn the first signal that asks the process to end into ``TerminatedError``.

    So whatever is half done is undone on the way out. Signals that the process was told to ignore,
    as by nohup, stay ignored. Only the main thread can do this; elsewhere nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = [getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")]
    numbers = [
        number
        for number in signals
        if number is not None and signal.getsignal(number) == signal.SIG_DFL
    ]

    def end(number: int, _frame: object) -> None:
        for signal_number in numbers:  # nothing interrupts the undoing
            signal.signal(signal_number, signal.SIG_IGN)
        raise TerminatedError(number)

    for watched in numbers:
        signal.signal(watched, end)
    try:
        yield
    finally:
        for watched in numbers:
            signal.signal(watched, signal.SIG_DFL)
