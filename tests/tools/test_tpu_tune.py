"""How block sizes are chosen."""

from tools.tpu.tune import ALIKE, Candidate, choose


def test_chooses_the_best_score():
    slow, fast = Candidate(2.0, 1.0, {"block_tokens": 1024}), Candidate(1.0, 2.0, {"block_tokens": 512})
    assert choose([slow, fast]) is fast


def test_chooses_the_fastest_full_blocks_of_those_that_score_alike():
    best, alike = Candidate(1.0, 2.0, {"block_tokens": 512}), Candidate(ALIKE, 1.9, {"block_tokens": 1024})
    assert choose([best, alike]) is alike
