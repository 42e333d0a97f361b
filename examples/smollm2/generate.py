"""The generation loop: a scheduler that drives attnd with all conversations in one ragged batch."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .attention import Attention
from .llama import Llama


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A prompt and the answer so far."""

    prompt_ids: list[int]
    tokens_max: int
    end_id: int
    answer_ids: list[int] = field(default_factory=list)  # the end token included, once it came

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids)

    @property
    def ended(self) -> bool:
        """Whether the model has said that it is done, or has used up its tokens."""
        return len(self.answer_ids) >= self.tokens_max or self.answer_ids[-1:] == [self.end_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one step brought: one new token for each conversation that was in the batch."""

    tokens: list[tuple[int, int]]  # (index of the conversation, token id)
    num_tokens_read: int
    duration_s: float


@dataclass(slots=True, kw_only=True)
class _Row:
    """A row of the batch: a conversation and the sequence that holds its keys and values."""

    index: int
    conversation: Conversation
    sequence: Any
    num_held: int = 0  # tokens whose keys and values the sequence holds

    def unread_ids(self) -> list[int]:
        """Returns the tokens that the model has not read yet: first the whole prompt, then the newest token."""
        conversation = self.conversation
        return (conversation.prompt_ids + conversation.answer_ids)[self.num_held :]


def generate(model: Llama, attention: Attention, conversations: Sequence[Conversation]) -> Generator[Generated]:
    """Answers all conversations together, always with the most probable token, and yields after each step.

    In the first step each row reads its whole prompt, in the others its newest token. To attention both are the same
    ragged step, and so would be a mix. A conversation that ends leaves the batch at once and gives its pages back.
    """
    sequences = attention.create_sequences(len(conversations))
    pairs = enumerate(zip(conversations, sequences, strict=True))
    rows = [_Row(index=i, conversation=conversation, sequence=sequence) for i, (conversation, sequence) in pairs]
    try:
        while rows:
            yield _advance(model, attention, rows)
            ended = [row.sequence for row in rows if row.conversation.ended]
            rows = [row for row in rows if not row.conversation.ended]
            if ended:
                attention.release(ended)
    finally:
        if rows:  # the caller stopped early, or the step failed
            attention.release([row.sequence for row in rows])


def _advance(model: Llama, attention: Attention, rows: Sequence[_Row]) -> Generated:
    """Has each row read what it has not read, and appends the most probable next token to its conversation."""
    start_s = time.perf_counter()
    unread = [row.unread_ids() for row in rows]
    q_lens = [len(ids) for ids in unread]
    kv_lens = [row.num_held + q_len for row, q_len in zip(rows, q_lens, strict=True)]

    token_ids = np.concatenate(unread)
    positions = np.concatenate([np.arange(row.num_held, kv_len) for row, kv_len in zip(rows, kv_lens, strict=True)])
    last_rows = np.cumsum(q_lens) - 1
    step = attention.step([row.sequence for row in rows], q_lens, kv_lens)
    next_ids = model.forward(token_ids, positions, last_rows, step).argmax(axis=1).tolist()

    for row, kv_len, next_id in zip(rows, kv_lens, next_ids, strict=True):
        row.num_held = kv_len
        row.conversation.answer_ids.append(next_id)
    tokens = [(row.index, next_id) for row, next_id in zip(rows, next_ids, strict=True)]
    return Generated(tokens=tokens, num_tokens_read=sum(q_lens), duration_s=time.perf_counter() - start_s)
