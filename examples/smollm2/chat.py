"""Turns a conversation into token ids and token ids into text, with the tokenizer and template of the model file."""

from collections.abc import Callable, Mapping, Sequence

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from .model_file import ModelFileError, Vocabulary

Message = Mapping[str, str]


class ChatTokenizer:
    """Byte-level BPE with the chat template of an instruction-tuned model."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.end_id = vocabulary.end_id
        self._tokenizer = _tokenizer(vocabulary)
        self._template = _environment().from_string(vocabulary.chat_template)

    def render(self, messages: Sequence[Message]) -> str:
        """Writes the messages out as the model was trained to read them, up to where its answer begins.

        Args:
            messages: Each with a "role" ("system", "user" or "assistant") and its "content". Without a system message
                the template puts its own.
        """
        return self._template.render(messages=messages, add_generation_prompt=True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Returns the token ids of the rendered messages: the prompt of the model's answer."""
        return self.encode(self.render(messages))

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text; names of control tokens in it become those tokens."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the tokens, without control tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def text_stream(self) -> Callable[[int], str]:
        """Returns a function that takes one token after the other and returns the text that each completes.

        A character may take several tokens, so the text of one may be empty: text is never printed in half a character.
        """
        stream = DecodeStream(skip_special_tokens=True)
        return lambda token_id: stream.step(self._tokenizer, token_id) or ""


def _tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """Builds the byte-level BPE: digits one by one, then GPT-2's split into words, then merges of bytes.

    Transformers, where it reads GGUF, leaves the digits out, which shows only where several spaces precede a digit.
    """
    if vocabulary.pre_tokenizer != "smollm":
        raise ModelFileError(f"the pre-tokenizer is {vocabulary.pre_tokenizer!r}; this example knows 'smollm'")
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=list(vocabulary.merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], special=True, normalized=False) for i in vocabulary.control_ids]
    )
    return tokenizer


def _environment() -> jinja2.Environment:
    """Returns an environment in which a template, which is code from a downloaded file, can only produce text."""
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
