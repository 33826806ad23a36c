"""Run lm-eval (EleutherAI's lm-evaluation-harness) on an original or a converted model.

All arguments are lm-eval's; the model is called ``tq_onnx``::

    python examples/evaluation/evaluate.py run --model tq_onnx --model_args model=int4.onnx \\
        --tasks lambada_openai --limit 100
"""

from __future__ import annotations

from typing import Any

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from scoring import Scorer, arguments_of
from tqdm import tqdm


@register_model("tq_onnx")
class TqOnnxModel(TemplateLM):
    """A model of lm-eval; the arguments are those of ``Scorer``."""

    def __init__(self, model: str, batch_size: Any = 1, device: Any = None, **options: Any) -> None:
        """Open the model; lm-eval's batch size and device are not used."""
        super().__init__()
        self._scorer = Scorer(model, **options)

    @property
    def eot_token_id(self) -> int:
        """The token before the first one of a text."""
        return self._scorer.prefix

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval caches requests under."""
        return str(self._scorer.model.path)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the tokens of a text."""
        return self._scorer.encode(string, add_special_tokens=add_special_tokens is not False)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write turns by the model's chat template."""
        return self._scorer.model.template.render(chat_history, answer=add_generation_prompt)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Score answers; ``TemplateLM.loglikelihood`` makes tokens of them."""
        return [
            self._scorer.score(lead, answer)
            for _, lead, answer in tqdm(requests, disable=disable_tqdm)
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts."""
        texts = (request.args[0] for request in tqdm(requests, disable=disable_tqdm))
        return [self._scorer.score_text(text) for text in texts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts greedily."""
        pairs = (request.args for request in tqdm(requests, disable=disable_tqdm))
        return [self._scorer.write(prompt, *arguments_of(options)) for prompt, options in pairs]


if __name__ == "__main__":
    cli_evaluate()
