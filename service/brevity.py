"""Which calls are so short that handing them over to the engine's thread and back costs more than their work."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

BRIEF_NS: Final = 2_000_000
"""Nanoseconds of work that the event loop may be held up by."""

COMPANY_NS: Final = 10_000_000
"""How long a caller counts as company for others."""

_KINDS_MAX: Final = 1024
_OUTLIER: Final = 4
_INERTIA: Final = 4


class Brevity:
    """What is known of kinds of calls, and whether somebody else calls, too.

    A kind is brief once a call of it has been: so what compiles, or waits for a device, is not. Where several callers
    call at the same time, nothing is: calls that wait together run together.
    """

    def __init__(self) -> None:
        self._expected_ns: OrderedDict[Hashable, float] = OrderedDict()
        self._caller: Hashable = None
        self._called_at_ns = -COMPANY_NS
        self._company_until_ns = 0

    def is_brief(self, kind: Hashable, caller: Hashable, now_ns: int) -> bool:
        """Returns whether a call is short, and nobody else calls at this time."""
        if caller != self._caller:
            if now_ns - self._called_at_ns < COMPANY_NS:
                self._company_until_ns = now_ns + COMPANY_NS
            self._caller = caller
        self._called_at_ns = now_ns
        return now_ns >= self._company_until_ns and self._expected_ns.get(kind, BRIEF_NS) < BRIEF_NS

    def note(self, kind: Hashable, took_ns: int) -> None:
        """Takes note of how long a call took. One that was held up by something else counts for little."""
        expected = self._expected_ns.pop(kind, None)
        if expected is not None:
            expected += (min(took_ns, _OUTLIER * expected) - expected) / _INERTIA
        self._expected_ns[kind] = float(took_ns) if expected is None else expected
        if len(self._expected_ns) > _KINDS_MAX:
            self._expected_ns.popitem(last=False)
