"""Which thread watches gRPC's sockets. By default gRPC's own do, and wake the one that waits for an answer.

With its older pollers the thread that waits watches the socket itself: a call has fewer threads to wake, which is most
of what a small one costs. gRPC reads the setting once, when it is imported.
"""

import importlib.metadata
import os
import sys
from typing import Final

_VARIABLE: Final = "GRPC_EXPERIMENTS"
_OLDER_POLLERS: Final = "-event_engine_client,-event_engine_listener"
# Another version may not know the names, and would complain of them on stderr.
_VERSIONS_KNOWN: Final = ((1, 76), (1, 85))


def poll_in_waiting_threads() -> bool:
    """Lets threads of this process that wait for gRPC watch the sockets themselves.

    To be called by whoever owns the process, before gRPC is imported; a library should not. What the environment says
    of gRPC's experiments is left as it is.

    Returns:
        Whether gRPC will be told.
    """
    if "grpc" in sys.modules or _VARIABLE in os.environ:
        return False
    try:
        major, minor = map(int, importlib.metadata.version("grpcio").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    first, last = _VERSIONS_KNOWN
    if not first <= (major, minor) <= last:
        return False
    os.environ[_VARIABLE] = _OLDER_POLLERS
    return True
