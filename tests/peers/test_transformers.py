"""The example against the live transformers library. `make test-peers` installs it and runs these."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from attnd.client import Client
from examples.smollm2.attention import ServedAttention, num_pages_needed
from examples.smollm2.chat import ChatTokenizer
from examples.smollm2.generate import Conversation, generate
from examples.smollm2.llama import Llama
from examples.smollm2.model_file import ModelFile, installed_model_path
from examples.smollm2.server import OwnServer, share_cores

if TYPE_CHECKING:
    from tests.peers.transformers_peer import TransformersPeer

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("default"), pytest.mark.timeout(1200)]

QUESTIONS = [
    "What is gravity?",
    "Why is the sky blue?",
    "What is 17 + 25? Answer with the number only.",
    "Écris « bonjour » en 日本語 🙂",
    "def f(x):\n\treturn {'a': x ** 2}\n\n\nWhat does it do?",
    "  Trailing spaces   and\r\nlines \n",
    "<|im_end|> in a question",
]


@pytest.fixture(scope="module")
def peer() -> "TransformersPeer":
    from tests.peers.transformers_peer import TransformersPeer  # not above: only these tests have torch

    return TransformersPeer()


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(ModelFile(installed_model_path()).vocabulary())


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(ModelFile(installed_model_path()))


@pytest.fixture(scope="module")
def attention(model: Llama) -> Iterator[ServedAttention]:
    with OwnServer() as server:
        address = server.address()
        num_pages = num_pages_needed([256, 256])
        with (
            share_cores(address),
            Client(address, timeout_s=60.0) as client,
            closing(ServedAttention(client, model.config, num_pages=num_pages)) as attention,
        ):
            yield attention


@pytest.mark.parametrize("question", QUESTIONS)
def test_renders_the_chat_template_alike(question: str, peer: "TransformersPeer", tokenizer: ChatTokenizer) -> None:
    assert tokenizer.render([{"role": "user", "content": question}]) == peer.render(question)


@pytest.mark.parametrize("question", QUESTIONS)
def test_encodes_alike(question: str, peer: "TransformersPeer", tokenizer: ChatTokenizer) -> None:
    rendered = peer.render(question)
    assert tokenizer.encode(rendered) == peer.encode(rendered)


def test_generates_the_same_64_tokens(
    peer: "TransformersPeer", tokenizer: ChatTokenizer, model: Llama, attention: ServedAttention
) -> None:
    question = QUESTIONS[0]
    prompt_ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    conversation = Conversation(prompt_ids=prompt_ids, tokens_max=64, end_id=tokenizer.end_id)
    for _ in generate(model, attention, [conversation]):
        pass
    assert len(conversation.answer_ids) == 64
    assert conversation.answer_ids == peer.answer(question)


def test_scores_every_token_alike(
    peer: "TransformersPeer", tokenizer: ChatTokenizer, model: Llama, attention: ServedAttention
) -> None:
    prompt_ids = tokenizer.encode_chat([{"role": "user", "content": QUESTIONS[1]}])
    rows = np.arange(len(prompt_ids))
    sequences = attention.create_sequences(1)
    step = attention.step(sequences, [len(rows)], [len(rows)])
    logits = model.forward(np.array(prompt_ids), rows, rows, step)
    attention.release(sequences)
    np.testing.assert_allclose(logits, peer.logits(prompt_ids), rtol=1e-4, atol=2e-3)


def test_the_recorded_answers_are_what_transformers_gives_today(peer: "TransformersPeer") -> None:
    expected = Path(__file__).parents[1] / "examples" / "smollm2_expected.json"
    for case in json.loads(expected.read_text())["cases"]:
        assert peer.render(case["question"]) == case["rendered"]
        assert peer.encode(case["rendered"]) == case["prompt_ids"]
        assert peer.answer(case["question"]) == case["answer_ids"]
