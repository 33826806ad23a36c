"""Train qwen3-tiny, a byte-level Qwen3 of 2.4 million parameters, on a CPU.

The schedule follows the clock and not a number of steps: ``--minutes`` is how long training
takes on any machine, and the learning rate and the sequence length depend on the part of
that time which has passed. An interrupted run goes on from its last checkpoint.

Example::

    python models/corpus.py --cache /tmp/corpus
    python models/train.py train --corpus /tmp/corpus --work /tmp/run --minutes 75
    python models/train.py report --model models/qwen3-tiny
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from corpus import DOCUMENT_BREAK
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LOG = logging.getLogger("train")

DEFAULT_OUTPUT = Path(__file__).parent / "qwen3-tiny"

END_OF_TEXT = 256
PADDING = 257
#: Two ids more than there are tokens, so that no projection is as wide as the vocabulary.
VOCABULARY_SIZE = 260

PEAK_LEARNING_RATE = 3e-3
FINAL_LEARNING_RATE = 3e-5
WARM_UP = 0.02
TOKENS_PER_STEP = 4096
#: (part of the time from which it holds, sequence length). Short sequences give twice the
#: bytes a second; the long ones at the end teach the positions that only they have.
SEQUENCE_LENGTHS = ((0.0, 256), (0.6, 512), (0.84, 1024))

CHECKPOINT_SECONDS = 180.0
EVALUATION_SECONDS = 120.0


def make_config() -> Qwen3Config:
    """Return the architecture."""
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=PADDING,
        attn_implementation="sdpa",
    )


def byte_alphabet() -> list[str]:
    """Return the printable character by which byte-level BPE writes each byte, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    substitutes = {byte: chr(256 + i) for i, byte in enumerate(unprintable)}
    return [substitutes.get(byte, chr(byte)) for byte in range(256)]


def make_tokenizer() -> Tokenizer:
    """Return the tokenizer: the id of a byte is its value, and there are no merges."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|endoftext|>", "<|pad|>")]
    )
    return tokenizer


def read_bytes(path: Path) -> torch.Tensor:
    """Return a text file as a vector of ids, one a byte."""
    return torch.from_numpy(np.fromfile(path, dtype=np.uint8).astype(np.int64))


def read_documents(path: Path) -> torch.Tensor:
    """Return the training text as ids, with an end-of-text id between two documents."""
    ids: list[np.ndarray] = []
    for document in path.read_bytes().split(DOCUMENT_BREAK.encode()):
        ids += [np.frombuffer(document, dtype=np.uint8).astype(np.int16), np.int16([END_OF_TEXT])]
    return torch.from_numpy(np.concatenate(ids[:-1]))


def draw_batch(ids: torch.Tensor, length: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of one step, drawn by ``step`` so that a resumed run goes on."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(ids) - length, (TOKENS_PER_STEP // length, 1), generator=generator)
    windows = ids[starts + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def learning_rate(progress: float) -> float:
    """Return the rate at ``progress`` (0 to 1): a linear warm-up, then a cosine."""
    if progress < WARM_UP:
        return PEAK_LEARNING_RATE * max(progress / WARM_UP, 0.01)
    angle = math.pi * min((progress - WARM_UP) / (1 - WARM_UP), 1.0)
    span = PEAK_LEARNING_RATE - FINAL_LEARNING_RATE
    return FINAL_LEARNING_RATE + span * (1 + math.cos(angle)) / 2


def sequence_length(progress: float) -> int:
    """Return the sequence length at ``progress`` (0 to 1)."""
    return next(length for start, length in reversed(SEQUENCE_LENGTHS) if progress >= start)


@torch.no_grad()
def nats_per_byte(
    model: Qwen3ForCausalLM, ids: torch.Tensor, context: int, stride: int = 1
) -> float:
    """Return the mean loss over windows of ``context`` bytes, every ``stride``-th of them.

    Windows do not overlap and each starts with an empty cache, so a byte is predicted from
    half a context of text on average. Nothing of the last, shorter window is left out.
    """
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, context * stride):
        window = ids[start : start + context + 1]
        logits = model(input_ids=window[None, :-1]).logits[0].float()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        count += len(window) - 1
    return total / count


def unigram_nats(ids: torch.Tensor) -> float:
    """Return the entropy of the text's own byte frequencies, what a model must beat."""
    counts = Counter(ids.tolist()).values()
    return -sum(n / len(ids) * math.log(n / len(ids)) for n in counts)


def save_model(model: Qwen3ForCausalLM, output: Path) -> None:
    """Write the float16 model and its tokenizer; whoever reads sees whole files only."""
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        half = copy.deepcopy(model).half()
        half.generation_config = GenerationConfig(
            bos_token_id=END_OF_TEXT, eos_token_id=END_OF_TEXT, pad_token_id=PADDING
        )
        half.save_pretrained(folder)
        PreTrainedTokenizerFast(
            tokenizer_object=make_tokenizer(),
            bos_token="<|endoftext|>",
            eos_token="<|endoftext|>",
            pad_token="<|pad|>",
            model_max_length=model.config.max_position_embeddings,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)
        for file in Path(folder).iterdir():
            file.chmod(0o644)
            file.replace(output / file.name)


@dataclass
class Run:
    """A training run: what a checkpoint keeps, and how to make a step."""

    model: Qwen3ForCausalLM
    optimizer: torch.optim.Optimizer
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    step: int = 0
    elapsed: float = 0.0

    @classmethod
    def create(cls, compile_model: bool) -> Run:
        """Return a run at its start."""
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(make_config())
        matrices = [p for p in model.parameters() if p.ndim > 1]
        gains = [p for p in model.parameters() if p.ndim == 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}],
            betas=(0.9, 0.98),
        )

        def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(input_ids=inputs, use_cache=False).logits
            return torch.nn.functional.cross_entropy(
                logits.float().flatten(0, 1), targets.flatten()
            )

        # dynamic=False: three lengths only, and code for fixed shapes is faster.
        return cls(model, optimizer, torch.compile(loss, dynamic=False) if compile_model else loss)

    def advance(self, ids: torch.Tensor, progress: float) -> float:
        """Make one step and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        loss = self.loss(*draw_batch(ids, sequence_length(progress), self.step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def save(self, path: Path) -> None:
        """Write a checkpoint, replacing the one before it in one go."""
        path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed": self.elapsed,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint."""
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed = state["step"], state["elapsed"]


def train(arguments: argparse.Namespace) -> None:
    """Train for ``--minutes``, then write the rounded model and its held-out perplexity."""
    ids = read_documents(arguments.corpus / "train.txt")
    held_out = read_bytes(arguments.corpus / "heldout.txt")
    run = Run.create(arguments.compile)
    checkpoint = arguments.work / "ckpt" / "last.pt"
    if checkpoint.exists():
        run.restore(checkpoint)
        LOG.info("resumed at step %d, %.0f s", run.step, run.elapsed)
    LOG.info("%d ids, %d parameters", len(ids), run.model.num_parameters())

    limit = 60 * arguments.minutes
    clock = time.monotonic() - run.elapsed
    saved = evaluated = run.elapsed
    losses: list[float] = []
    while run.elapsed < limit:
        losses.append(run.advance(ids, run.elapsed / limit))
        run.elapsed = time.monotonic() - clock
        if run.elapsed - evaluated > EVALUATION_SECONDS:
            evaluated = run.elapsed
            loss = nats_per_byte(run.model, held_out, context=512, stride=8)
            LOG.info(
                "%5.1f min, step %d, length %d: train %.4f, held-out %.4f, perplexity %.3f",
                *(run.elapsed / 60, run.step, sequence_length(run.elapsed / limit)),
                *(np.mean(losses), loss, math.exp(loss)),
            )
            losses.clear()
        if run.elapsed - saved > CHECKPOINT_SECONDS:
            saved = run.elapsed
            run.save(checkpoint)
            save_model(run.model, arguments.output)
    run.save(checkpoint)
    LOG.info("done after %d steps, %.1f min", run.step, run.elapsed / 60)
    save_model(run.model, arguments.output)
    shutil.copyfile(arguments.corpus / "heldout.txt", arguments.output / "heldout.txt")
    write_report(arguments.output)


def write_report(folder: Path) -> None:
    """Print what README.md says of a model in ``folder``, as JSON, then two continuations.

    The weights are the float16 ones of the file; the arithmetic is float32.
    """
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    held_out = read_bytes(folder / "heldout.txt")
    losses = {f"context {n}": nats_per_byte(model, held_out, n) for n in (512, 1024)}
    losses["unigram"] = unigram_nats(held_out)
    figures = {
        name: {
            "nats": round(loss, 4),
            "bits": round(loss / math.log(2), 4),
            "perplexity": round(math.exp(loss), 4),
        }
        for name, loss in losses.items()
    }
    print(json.dumps({"parameters": model.num_parameters(), "bytes": len(held_out), **figures}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("The ", return_tensors="pt")
    torch.manual_seed(0)
    for options in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}):
        ids = model.generate(**prompt, max_new_tokens=200, **options)
        print(f"--- {options}\n{tokenizer.decode(ids[0])}")


def make_parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("train", help="train a model and write it")
    command.add_argument("--corpus", type=Path, required=True, help="what corpus.py wrote")
    command.add_argument("--work", type=Path, required=True, help="folder of the checkpoint")
    command.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="model folder")
    command.add_argument("--minutes", type=float, default=75, help="wall-clock time to train for")
    command.add_argument("--threads", type=int, default=2, help="threads of PyTorch")
    command.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use torch.compile, which needs a C++ compiler",
    )
    command.set_defaults(run=train)

    command = commands.add_parser(
        "report", help="print the perplexity and two samples of a written model"
    )
    command.add_argument("--model", type=Path, default=DEFAULT_OUTPUT, help="model folder")
    command.set_defaults(run=lambda arguments: write_report(arguments.model))
    return parser


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    arguments = make_parser().parse_args()
    torch.set_num_threads(getattr(arguments, "threads", torch.get_num_threads()))
    arguments.run(arguments)


if __name__ == "__main__":
    main()
