"""Ragged and paged attention in process: the kernels' contract, validation and implementations."""
