"""The attnd server."""
