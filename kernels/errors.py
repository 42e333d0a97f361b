"""The two kinds of "no": invalid for everybody, and unsupported here."""

from collections.abc import Sequence
from typing import Final, NamedTuple

VIOLATIONS_MAX: Final = 16


class Violation(NamedTuple):
    """One reason why an input is refused.

    Attributes:
        field: The offending argument, with indices: `cu_q_lens[3]`, `page_indices[2,7]`, `q.shape[2]`.
        description: What must hold, with the values that break it. JAX's own text where JAX documents one.
    """

    field: str
    description: str


class InvalidArgumentError(ValueError):
    """An input that no implementation accepts. Its text is the first violation's.

    Attributes:
        violations: The first violations, in the order of the checks; at most `VIOLATIONS_MAX`, at least one.
        num_violations: All violations found.
    """

    def __init__(self, violations: Sequence[Violation], num_violations: int | None = None) -> None:
        super().__init__(violations[0].description)
        self.violations = tuple(violations[:VIOLATIONS_MAX])
        self.num_violations = len(violations) if num_violations is None else num_violations

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidArgumentError":
        """Returns the error of a single violation."""
        return cls([Violation(field, description)])


class UnsupportedError(NotImplementedError):
    """A valid input that this implementation, device or build cannot serve; another one may."""
