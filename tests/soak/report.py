"""What a part of the soak found, as rows of one table."""

import sys
from dataclasses import dataclass, field


@dataclass
class Row:
    """One promise, and how often it was put to the test.

    Attributes:
        what: The promise.
        count: How often it was tried.
        failures: A line for each time that it did not hold.
        notes: What else there is to know.
    """

    what: str
    count: int
    failures: list[str] = field(default_factory=list)
    notes: str = ""

    def fail(self, failure: str) -> None:
        """Notes a failure, and says so at once."""
        self.failures.append(failure)
        print(f"\n{failure}", file=sys.stderr, flush=True)

    def progress(self, done: int) -> None:
        """Says how far it is."""
        print(f"\r{done} of {self.count}, {len(self.failures)} broken", end="", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    """Returns the rows as text, failures below them."""
    cells = [("promise", "tried", "broken", "")]
    cells += [(row.what, f"{row.count:,}", f"{len(row.failures):,}", row.notes) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    lines = [
        f"{what:<{widths[0]}}  {count:>{widths[1]}}  {broken:>{widths[2]}}  {notes}".rstrip()
        for what, count, broken, notes in cells
    ]
    lines += [f"{row.what}: {failure}" for row in rows for failure in row.failures[:20]]
    return "\n".join(lines)
