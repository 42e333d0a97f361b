"""The command: `python -m examples.smollm2 --prompt "What is gravity?"`."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from attnd.client import AttndError, Client, keep_freed_memory

from .attention import ServedAttention, num_pages_needed
from .chat import ChatTokenizer
from .generate import Conversation, generate
from .llama import Llama
from .model_file import ModelFile, ModelFileError, installed_model_path
from .report import Figures
from .server import LOOPBACK, OwnServer, ServerError, share_cores
from .terminal import ManyAnswers, OneAnswer

if TYPE_CHECKING:
    from .in_process import InProcessAttention

DEFAULT_PROMPT = "What is gravity?"
TIMEOUT_S = 60.0  # of one call


def main(arguments: Sequence[str] | None = None) -> int:
    """Answers the questions of the command line. Returns the exit status."""
    keep_freed_memory()
    options = _parser().parse_args(arguments)
    questions = ([options.prompt] if options.prompt is not None else []) + options.chat or [DEFAULT_PROMPT]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as an exception, so that our own server is stopped, too
    try:
        _answer(questions, tokens_max=options.tokens, address=options.address, in_process=options.in_process)
    except (ModelFileError, ServerError, AttndError) as error:
        _say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has gone; the interpreter must not try to flush it again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _answer(questions: Sequence[str], *, tokens_max: int, address: str | None, in_process: bool) -> None:
    with ExitStack() as stack:
        if address is None and not in_process:
            _say("starting an attnd server (--address HOST:PORT takes a running one)")
            own_server = stack.enter_context(OwnServer())
        _say("reading the model")
        file = ModelFile(installed_model_path())
        tokenizer, model = ChatTokenizer(file.vocabulary()), Llama(file)
        conversations = [_conversation(question, tokenizer, model, tokens_max) for question in questions]

        figures = Figures()
        num_pages = num_pages_needed([len(each.prompt_ids) + tokens_max for each in conversations])
        attention: ServedAttention | InProcessAttention
        if in_process:
            attention = _in_process(stack, model, num_pages)
        else:
            if address is None:
                _say("waiting for the server")
                address = own_server.address()
            stack.enter_context(share_cores(address))
            client = stack.enter_context(Client(address, timeout_s=TIMEOUT_S, on_call=figures.add_call))
            _say(f"creating a cache on {address}: the server compiles its kernels")
            attention = stack.enter_context(closing(ServedAttention(client, model.config, num_pages=num_pages)))

        _say("generating")
        with closing(ManyAnswers(questions) if len(questions) > 1 else OneAnswer()) as display:
            streams = [tokenizer.text_stream() for _ in conversations]
            for step in generate(model, attention, conversations):
                figures.add_step(step)
                for index, token_id in step.tokens:
                    display.add(index, streams[index](token_id))
                    if conversations[index].ended:
                        display.finish(index)
        for line in figures.lines(num_pages=attention.num_pages_peak, cache=attention.cache):
            _say(line)


def _in_process(stack: ExitStack, model: Llama, num_pages: int) -> "InProcessAttention":
    from .in_process import InProcessAttention  # noqa: PLC0415 - imports jax, which a client does without

    stack.enter_context(share_cores(LOOPBACK))  # as beside a server: what is compared is the way to attention
    _say("compiling the kernels")
    return InProcessAttention(model.config, num_pages=num_pages)


def _conversation(question: str, tokenizer: ChatTokenizer, model: Llama, tokens_max: int) -> Conversation:
    prompt_ids = tokenizer.encode_chat([{"role": "user", "content": question}])
    length_max = model.config.context_length
    if len(prompt_ids) + tokens_max > length_max:
        raise ModelFileError(f"{len(prompt_ids)} tokens of prompt and {tokens_max} to come exceed {length_max=}")
    return Conversation(prompt_ids=prompt_ids, tokens_max=tokens_max, end_id=tokenizer.end_id)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2",
        description="Answers questions with SmolLM2-135M-Instruct: its dense layers run here, in NumPy, its attention "
        "and its memory of the text in an attnd server. Answers go to stdout, all else to stderr.",
    )
    parser.add_argument("--prompt", metavar="TEXT", help=f"a question (default: {DEFAULT_PROMPT!r})")
    parser.add_argument(
        "--chat", metavar="TEXT", action="append", default=[], help="a question; several are answered in one batch"
    )
    parser.add_argument("--tokens", metavar="N", type=_positive, default=64, help="longest answer (default: 64)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--address", metavar="HOST:PORT", help="a running server (default: one of our own)")
    where.add_argument("--in-process", action="store_true", help="no server: its kernels run here, to compare with")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _say(text: str) -> None:
    print(f"smollm2: {text}", file=sys.stderr, flush=True)
