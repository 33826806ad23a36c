"""Answer the lines of a file with Foundry Local, which runs folders of onnxruntime-genai.

    python examples/serving/foundry.py qwen3-genai-int4 prompts.txt --max-tokens 32

The folder stays where it is: it is registered as a local model, and unregistered at the end. It
needs a chat template, chat_template.jinja or an entry of tokenizer_config.json.

Needs foundry-local-sdk 2.2 in an environment of its own: it pins ONNX Runtime.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from foundry_local_sdk import (
    CatalogType,
    ChatSession,
    Configuration,
    FoundryLocalManager,
    IModel,
    MessageItem,
    ModelInfoBuilder,
    Request,
    RequestOptions,
    SearchOptions,
)


def answer(model: IModel, text: str, max_tokens: int) -> str:
    """Return the most likely answer to a message."""
    search = SearchOptions(temperature=0.0, max_output_tokens=max_tokens)
    with ChatSession(model) as session, Request().add_item(MessageItem.user(text)) as request:
        session.set_options(RequestOptions(search=search))
        with session.process_request(request) as response:
            return "".join(part.text for message in response for part in message.parts)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of onnxruntime-genai, converted")
    parser.add_argument("prompts", type=Path, help="text file, a message in every line")
    parser.add_argument("--max-tokens", type=int, default=64, help="of each answer (default: 64)")
    given = parser.parse_args()
    settings = Configuration(app_name="tq-onnx", disable_nonessential_telemetry=True)
    FoundryLocalManager.initialize(settings)
    catalog = FoundryLocalManager.instance.get_catalog(CatalogType.LOCAL)
    folder = given.folder.resolve()
    with ModelInfoBuilder() as facts:
        facts.set_string_property("task", "chat-completion")
        model = catalog.register_model(
            model_path=str(folder), model_id=f"{folder.name}:1", metadata=facts
        )
    try:
        model.load()
        for line in given.prompts.read_text(encoding="utf-8").splitlines():
            print(answer(model, line, given.max_tokens))
        model.unload()
    finally:
        catalog.unregister_model(model.id)


if __name__ == "__main__":
    main()
