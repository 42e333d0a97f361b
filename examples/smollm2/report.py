"""Where the time went: the figures that the demonstration prints at the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from attnd.client import CallRecord

from .generate import Generated


class CacheShape(Protocol):
    """What the figures need to know of a cache."""

    @property
    def num_layers(self) -> int:
        """Layers."""

    @property
    def num_pages(self) -> int:
        """Pages of each layer."""

    @property
    def page_size(self) -> int:
        """Tokens of a page."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages."""


@dataclass(slots=True, kw_only=True)
class Figures:
    """Sums over all steps and all attention calls of a run.

    What is not attention is the model's dense layers. A call's time is the kernel's, the rest of the server's (queue,
    checks, append, encoding), and the wire's: messages, gRPC, the socket, the hand-overs on both sides.
    """

    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    num_decode_tokens: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    num_calls: int = 0
    kernel_s: float = 0.0
    server_s: float = 0.0
    wire_s: float = 0.0

    def add_step(self, step: Generated) -> None:
        """Counts a step of the generation loop; the first one reads the prompts."""
        self.num_new_tokens += len(step.tokens)
        if self.num_prompt_tokens == 0:
            self.num_prompt_tokens = step.num_tokens_read
            self.prompt_s = step.duration_s
        else:
            self.num_decode_tokens += len(step.tokens)
            self.decode_s += step.duration_s

    def add_call(self, record: CallRecord) -> None:
        """Counts a call of the client; only attention matters here."""
        if record.timings is None:
            return
        self.num_calls += 1
        self.kernel_s += record.timings.kernel_ns / 1e9
        self.server_s += (record.timings.total_ns - record.timings.kernel_ns) / 1e9
        self.wire_s += record.wire_ns / 1e9

    def lines(self, *, num_pages: int, cache: CacheShape) -> Iterator[str]:
        """Returns the figures as text.

        Args:
            num_pages: Most pages in use at a time, in each layer.
            cache: The cache that they lie in.
        """
        total_s = self.prompt_s + self.decode_s
        yield f"prompt: {self.num_prompt_tokens} tokens read in {self.prompt_s * 1e3:.0f} ms"
        if self.num_decode_tokens:
            rate = self.num_decode_tokens / self.decode_s
            yield f"answer: {self.num_new_tokens} tokens, {rate:.1f} tokens/s once the prompt was read"
        if self.num_calls:
            shares = {
                "dense layers here": total_s - self.kernel_s - self.server_s - self.wire_s,
                "attention kernel": self.kernel_s,
                "rest of the server": self.server_s,
                "wire": self.wire_s,
            }
            yield "time: " + ", ".join(f"{name} {share / total_s:.0%}" for name, share in shares.items())
            call_ms = (self.kernel_s + self.server_s + self.wire_s) / self.num_calls * 1e3
            yield f"calls: {self.num_calls}, {call_ms:.2f} ms each"
        size_mib = cache.size_bytes / cache.num_pages * num_pages / 2**20
        yield (
            f"pages: {num_pages} of {cache.num_pages} in each of {cache.num_layers} layers, "
            f"{cache.page_size} tokens a page, {size_mib:.1f} MiB in use"
        )
