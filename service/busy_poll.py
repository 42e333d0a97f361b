"""Keeps the event loop awake for a moment after a brief call, where the next one will soon come."""

import asyncio
import time


class BusyPoll:
    """Lets an event loop look for events without sleeping, for a limited time.

    A thread that has slept takes longer to wake up than a brief call takes, and finds its code and data gone from its
    core's caches. A caller that computes for a millisecond between two calls would pay for that at each.

    Args:
        loop: The event loop.
        period_ns: Nanoseconds after a call; 0 for never.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, period_ns: int) -> None:
        self._loop = loop
        self._period_ns = period_ns
        self._until_ns = 0
        self._turning = False

    def extend(self) -> None:
        """Begins the period anew."""
        if not self._period_ns:
            return
        self._until_ns = time.monotonic_ns() + self._period_ns
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def end(self) -> None:
        """Lets the loop sleep: others need the cores."""
        self._until_ns = 0

    def _turn(self) -> None:
        # A loop with a callback that is ready looks at its sockets and does not wait for them.
        self._turning = time.monotonic_ns() < self._until_ns
        if self._turning:
            self._loop.call_soon(self._turn)
