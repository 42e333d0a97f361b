"""What client and server agree on beside the schema."""

from typing import Final

MESSAGE_BYTES_MAX: Final = 1 << 30
"""Bytes of one message, either way. Both ends set gRPC's own limit, 4 MiB by default, to this."""

KEEPALIVE_INTERVAL_MS: Final = 30_000
"""How often a client pings a server that owes it an answer. A server that allows fewer pings cuts the connection."""

SEQUENCE_HANDLE_BYTES: Final = 16
"""Bytes of a sequence's handle."""

TENANT_KEY: Final = "attnd-tenant"
"""Metadata key that names the tenant of a call, where clients present no certificate."""
