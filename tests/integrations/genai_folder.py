"""Folders of onnxruntime-genai for tests: a model and a true configuration beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.files.models import GENAI, external
from tq_onnx.integrations.bundled import build_bundled


def genai_config(
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    vocabulary: int,
    context: int = 2048,
    eos: int = 256,
    pad: int = 257,
) -> dict[str, Any]:
    """What the model builder of onnxruntime-genai 0.18 writes for a Qwen3 on the CPU."""
    return {
        "model": {
            "bos_token_id": eos,
            "context_length": context,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": "model.onnx",
                "head_size": head_size,
                "hidden_size": 192,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": heads,
                "num_hidden_layers": layers,
                "num_key_value_heads": kv_heads,
            },
            "eos_token_id": eos,
            "pad_token_id": pad,
            "type": "qwen3",
            "vocab_size": vocabulary,
        },
        "search": {
            "do_sample": False,
            "early_stopping": True,
            "length_penalty": 1.0,
            "max_length": context,
            "num_beams": 1,
            "num_return_sequences": 1,
            "past_present_share_buffer": True,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 1.0,
        },
    }


def write_config(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "genai_config.json"
    path.write_text(json.dumps(document, indent=4), encoding="utf-8")
    return path


def genai_folder(folder: Path, fixture: str = GENAI) -> Path:
    """A committed export with external data, a configuration and a tokenizer."""
    external(folder, fixture)
    sizes = {"layers": 2, "heads": 4, "kv_heads": 2, "head_size": 64, "vocabulary": 97}
    write_config(folder, genai_config(**sizes))  # type: ignore[arg-type]
    (folder / "tokenizer.json").write_text('{"a tokenizer": 1}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def bundled_genai(folder: Path, route: str) -> Path:
    """The bundled model as a folder of onnxruntime-genai."""
    build_bundled(route, folder)
    config = genai_config(layers=4, heads=4, kv_heads=2, head_size=128, vocabulary=260)
    config["search"]["past_present_share_buffer"] = route == "genai"
    write_config(folder, config)
    return folder
