"""The attnd client SDK."""
