"""The same model in transformers, which is the oracle of the example: `python -m tests.peers.transformers_peer`
records what it answers in tests/examples/smollm2_expected.json."""

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2.model_file import installed_model_path

EXPECTED = Path(__file__).parents[1] / "examples" / "smollm2_expected.json"
NUM_NEW_TOKENS = 64
QUESTIONS = [
    "What is gravity?",
    "Why is the sky blue?",
    "What is 17 + 25? Answer with the number only.",
    "Écris « bonjour » en 日本語 🙂",
]


class TransformersPeer:
    """SmolLM2 as transformers reads it from the GGUF file, in float32 on the CPU."""

    def __init__(self) -> None:
        path = installed_model_path()
        self._tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        self._model = model.eval()
        self._answers: dict[str, list[int]] = {}

    def render(self, question: str) -> str:
        return str(self._tokenizer.apply_chat_template(_messages(question), tokenize=False, add_generation_prompt=True))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def answer(self, question: str) -> list[int]:
        """Returns the greedy answer, the end token included."""
        if question not in self._answers:
            self._answers[question] = self._generate(question)
        return self._answers[question]

    def _generate(self, question: str) -> list[int]:
        prompt_ids = self.encode(self.render(question))
        ids = torch.tensor([prompt_ids])
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
        )
        return list(out[0, len(prompt_ids) :].tolist())

    def logits(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Returns float32 [tokens, vocabulary]."""
        with torch.no_grad():
            logits: NDArray[np.float32] = self._model(torch.tensor([token_ids])).logits[0].numpy()
        return logits


def record() -> None:
    peer = TransformersPeer()
    cases = [
        {
            "question": question,
            "rendered": peer.render(question),
            "prompt_ids": peer.encode(peer.render(question)),
            "answer_ids": peer.answer(question),
        }
        for question in QUESTIONS
    ]
    made_with = f"transformers {transformers.__version__}, torch {torch.__version__}, float32, greedy"
    content = {"made_with": made_with, "num_new_tokens": NUM_NEW_TOKENS, "cases": cases}
    EXPECTED.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


if __name__ == "__main__":
    record()
