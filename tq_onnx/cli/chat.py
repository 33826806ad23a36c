"""``tq-onnx chat``: turns with a model on a terminal or through a pipe."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from tq_onnx.cli import flags, terminal
from tq_onnx.errors import TqOnnxError, UsageError

if TYPE_CHECKING:
    from tq_onnx.language.chat import Chat
    from tq_onnx.language.model import LanguageModel

_PROMPT: Final = "> "
_SHOWN: Final = 400
"""Characters of a message of a loaded conversation, from its end."""
_HELP: Final = """\
/save FILE    save the conversation and its cache
/load FILE    continue a saved conversation
/rewind [N]   remove the last N questions and answers, 1 by default
/help         show this
/exit         exit, like the end of the input
Ctrl-C stops an answer; pressed again, it exits."""


@click.command()
@click.argument("model", type=flags.FilePath())
@click.option("--system", default="", metavar="TEXT", help="Start with this system message.")
@flags.max_new_tokens(512)
@flags.context("the size in the graph, else caches grow")
@flags.prompt_cache
@flags.sampling
@flags.tokenizer
@flags.threads
@flags.no_library
@click.pass_context
def chat(
    ctx: click.Context,
    /,
    *,
    model: Path,
    system: str,
    max_new_tokens: int,
    context: int | None,
    prompt_cache: Path | None,
    prompt_cache_size: str,
    tokenizer: Path | None,
    threads: int | None,
    library: bool,
    **draws: Any,
) -> None:
    """Chat with an original or a converted MODEL; the KV cache is kept between turns.

    Reads MODEL, a file or a folder with one decoder and a chat template. Reads one question per
    line from stdin and writes the answers to stdout. /help lists the commands, such as /save, /load
    and /rewind. Ctrl-C stops an answer; pressed again, it exits.

    Sampling options override generation_config.json beside the model, which overrides the defaults
    below.

    \b
    Example:
      tq-onnx chat model.int4.onnx
      tq-onnx chat qwen3-int4/ --system "Answer briefly." --temperature 0.7
      echo "What is ONNX?" | tq-onnx chat qwen3-int4/
      tq-onnx chat qwen3-int4/ --system "$(cat manual.txt)" --prompt-cache kept/
    """
    from tq_onnx.api.running import load
    from tq_onnx.files.configuration import recommended_sampling
    from tq_onnx.runtime.sampling import Sampling

    typed = {
        name: value
        for name, value in draws.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    with terminal.progress("Opening the model"):
        lm = load(
            model,
            context=context,
            tokenizer=tokenizer,
            library=library,
            threads=threads,
            prompt_store=flags.prompt_store(prompt_cache, prompt_cache_size),
        )
        sampling = Sampling(**{**draws, **recommended_sampling(lm.path), **typed})
        options = {"max_new_tokens": max_new_tokens, "sampling": sampling}
        talk = Conversation(lm, lm.chat(system), options)
        _ = lm.tokenizer
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if on_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # input() edits lines with it
        click.echo(f"{terminal.printable(str(lm.path))}: /help shows the commands", err=True)
    for line in _lines(on_terminal):
        if line.strip() in ("/exit", "/quit"):
            return
        try:
            talk.take(line.strip())
        except TqOnnxError as error:
            if not on_terminal:
                raise
            terminal.print_error(str(error))


def _lines(on_terminal: bool) -> Iterator[str]:
    """Yield the lines of the input until it ends."""
    while True:
        try:
            line = f"{input(_PROMPT)}\n" if on_terminal else sys.stdin.readline()
        except EOFError:
            terminal.print_line()
            return
        except UnicodeDecodeError as error:
            raise UsageError("the input is no UTF-8 text") from error
        if not line:
            return
        yield line


class Conversation:
    """Takes the lines of a conversation.

    Args:
        model: the model.
        chat: its conversation, which ``/load`` replaces.
        options: of ``Chat.stream``.
    """

    def __init__(self, model: LanguageModel, chat: Chat, options: dict[str, Any]) -> None:
        self._model = model
        self._chat = chat
        self._options = options

    def take(self, line: str) -> None:
        """Answer a question, or carry out a command."""
        if not line:
            return
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, argument = line[1:].partition(" ")
        argument = argument.strip()
        if name == "help":
            click.echo(_HELP, err=True)
        elif name == "rewind":
            if argument and not (argument.isascii() and argument.isdigit()):
                raise UsageError(f"/rewind takes a number, not {argument!r}")
            self._chat.rewind(int(argument or 1))
        elif name in ("save", "load") and argument:
            if name == "save":
                self._chat.save(Path(argument).expanduser())
            else:
                self._chat = self._model.load_chat(Path(argument).expanduser())
            count = sum(message["role"] == "user" for message in self._chat.messages)
            turns = f"{count} turn{'' if count == 1 else 's'}"
            verb = "saved" if name == "save" else "loaded"
            click.echo(f"{verb}: {turns}, {len(self._chat.cache):,} tokens", err=True)
            if name == "load":
                _show_end(self._chat)
        elif name in ("save", "load"):
            raise UsageError(f"/{name} needs the name of a file")
        else:
            raise UsageError(f"there is no command /{name}", fix="/help shows all")

    def _answer(self, question: str) -> None:
        pieces = self._chat.stream(question, **self._options)
        with _stopped_by_ctrl_c() as stop:
            try:
                for piece in pieces:
                    click.echo(terminal.printable(piece.text), nl=False)
                    sys.stdout.flush()
                    if stop.is_set():
                        break
            finally:
                pieces.close()
        terminal.print_line()


def _show_end(chat: Chat) -> None:
    """Print the last question and the end of its answer on stderr."""
    for message in chat.messages[-2:]:
        text = " ".join(message["content"].split())
        end = text if len(text) <= _SHOWN else f"...{text[-_SHOWN:]}"
        mark = _PROMPT if message["role"] == "user" else ""
        click.echo(terminal.printable(f"{mark}{end}"), err=True)


@contextmanager
def _stopped_by_ctrl_c() -> Iterator[threading.Event]:
    """Yield an event that Ctrl-C sets; a second one raises ``KeyboardInterrupt``.

    The first one raises nothing, so that no call of the model is torn apart.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(_number: int, _frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
