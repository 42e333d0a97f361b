"""How rules are written and judged: one line of a table each, with the words that a caller reads."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np

from attnd.kernels.errors import VIOLATIONS_MAX, InvalidArgumentError, Violation

Facts = dict[str, Any]
"""What is known of a call, by name. A fact is missing when an argument is not given or too broken to have it."""

_NAME_AND_VALUE: Final = re.compile(r"\{([^{}]+)=\}")


@runtime_checkable
class ArrayLike(Protocol):
    """What an array shows without its values."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        ...


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Shape and dtype of an array that is not here."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Violations:
    """The violations found so far: the first few spelt out, all of them counted. True when there is any."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[Violation] = []

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def first(self) -> tuple[Violation, ...]:
        """The first violations, at most `VIOLATIONS_MAX`."""
        return tuple(self._first)

    def add(self, name: str, description: str) -> None:
        """Adds one violation of the field called `name`."""
        self.count += 1
        if len(self._first) < VIOLATIONS_MAX:
            self._first.append(Violation(name, description))

    def where(self, broken: np.ndarray) -> Iterator[tuple[int, ...]]:
        """Yields the indices of the elements that are `broken`, as many as there is room to `add`; counts the rest.

        A million bad elements cost no more text than sixteen.
        """
        count = int(np.count_nonzero(broken))
        if count == 0:
            return
        room = VIOLATIONS_MAX - len(self._first)
        for index in np.argwhere(broken)[:room].tolist():
            yield tuple(index)
        self.count += max(0, count - room)

    def extend(self, others: "Violations") -> None:
        """Adds what was found elsewhere."""
        room = VIOLATIONS_MAX - len(self._first)
        self._first += others.first[:room]
        self.count += others.count

    def raise_if_any(self) -> None:
        """Raises InvalidArgumentError if anything was found."""
        if self.count:
            raise InvalidArgumentError(self._first, self.count)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a table of rules.

    Attributes:
        name: The offending field. May name facts in braces: `kv_lens[{longest}]`.
        text: What must hold, in the words of `validation.md`. `{x}` is the fact x, and `{x=}` is `x=` and the fact, as
            in an f-string, but rendered plainly: `x=9`, never `x=np.int32(9)`.
        holds: Whether it does, judged on the facts that its parameters name. A rule of which a fact is missing is
            passed over: an earlier rule has said why, or there is nothing to judge.
    """

    name: str
    text: str
    holds: Callable[..., bool]
    needs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        code = self.holds.__code__
        object.__setattr__(self, "needs", code.co_varnames[: code.co_argcount])
        object.__setattr__(self, "text", _NAME_AND_VALUE.sub(r"\1={\1}", self.text))


def judge(rules: Iterable[Rule], facts: Mapping[str, Any], found: Violations) -> None:
    """Adds to `found` the rules that the facts break, in the rules' order."""
    for rule in rules:
        arguments = []
        for name in rule.needs:
            if name not in facts:
                break
            arguments.append(facts[name])
        else:
            if not rule.holds(*arguments):
                found.add(rule.name.format_map(facts), rule.text.format_map(facts))
