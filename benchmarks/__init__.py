"""Benchmarks: every figure beside its baselines, measured in one interleaved run."""
