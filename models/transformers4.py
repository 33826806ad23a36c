"""Checkpoints of transformers 5, made readable for the exporters that still need transformers 4.

The weights are the same. Of the JSON files, transformers 4 would silently take other values for:

* the rotary base: transformers 5 nests it in ``rope_parameters``, per kind of layer in Gemma 3;
* ``num_experts`` of Qwen3-MoE, now called ``num_local_experts``;
* the tokenizer's class, which has a new name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def readable(model_dir: Path) -> Iterator[Path]:
    """Yield a temporary copy of the checkpoint in ``model_dir`` that transformers 4 reads right."""
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / model_dir.name
        shutil.copytree(model_dir, copy, copy_function=shutil.copyfile)
        _edit(copy / "config.json", _older_config)
        if (copy / "tokenizer_config.json").exists():
            _edit(copy / "tokenizer_config.json", _older_tokenizer)
        yield copy


def _edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | change(content), indent=2), encoding="utf-8")


def _older_config(config: dict[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    rope = config.get("rope_parameters", {})
    if "full_attention" in rope:
        changes["rope_theta"] = rope["full_attention"]["rope_theta"]
        changes["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    elif "rope_theta" in rope:
        changes["rope_theta"] = rope["rope_theta"]
    if "num_local_experts" in config:
        changes["num_experts"] = config["num_local_experts"]
    return changes


def _older_tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    return {"tokenizer_class": "PreTrainedTokenizerFast"}
