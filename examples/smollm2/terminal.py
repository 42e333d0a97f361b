"""What the person sees: the answers on stdout; while several grow at once, a live view of them on stderr."""

from collections.abc import Sequence
from typing import Protocol

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

PANEL_WIDTH = 56


class Display(Protocol):
    """Shows answers as they grow."""

    def add(self, index: int, text: str) -> None:
        """Shows more of the answer to question `index`."""

    def finish(self, index: int) -> None:
        """Takes the answer to question `index` as complete."""

    def close(self) -> None:
        """Leaves the terminal in order."""


class OneAnswer:
    """A single answer: its text streams to stdout."""

    def add(self, index: int, text: str) -> None:  # noqa: ARG002 - there is one answer
        """Prints the text."""
        print(text, end="", flush=True)

    def finish(self, index: int) -> None:
        """Has nothing left to show."""

    def close(self) -> None:
        """Ends the line."""
        print(flush=True)


class ManyAnswers:
    """Several answers: on a terminal they grow side by side on stderr; each goes to stdout in one piece, when done."""

    def __init__(self, questions: Sequence[str]) -> None:
        self._questions = questions
        self._growing = dict.fromkeys(range(len(questions)), "")
        self._console = Console(stderr=True)
        self._live: Live | None = None
        self._show()

    def add(self, index: int, text: str) -> None:
        """Lets the answer grow in its panel."""
        self._growing[index] += text

    def finish(self, index: int) -> None:
        """Prints the question and its answer, above the live view of those that still grow."""
        self.close()
        print(f"[{index + 1}] {self._questions[index]}\n{self._growing.pop(index).strip()}\n", flush=True)
        self._show()

    def close(self) -> None:
        """Takes the live view away."""
        if self._live:
            self._live.stop()
            self._live = None

    def _show(self) -> None:
        if self._growing and self._console.is_terminal:
            # A new view each time: an old one would wipe the lines that were printed since.
            self._live = Live(console=self._console, transient=True, redirect_stdout=False, get_renderable=self._panels)
            self._live.start()

    def _panels(self) -> Columns:
        return Columns(
            [
                Panel(Text(text), title=Text(self._questions[index]), width=PANEL_WIDTH)
                for index, text in sorted(self._growing.items())
            ]
        )
