"""Time and chance, as the server's parts see them: a simulation puts its own in their place."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class World:
    """Where time and unguessable bytes come from.

    Attributes:
        now: Seconds on a clock that never goes back.
        token: Returns so many unguessable bytes.
    """

    now: Callable[[], float] = time.monotonic
    token: Callable[[int], bytes] = secrets.token_bytes
