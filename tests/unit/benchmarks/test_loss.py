"""The windows and the arithmetic by which every system's loss is measured."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.peers.protocol import nats_of
from benchmarks.scenarios.loss import windows_of
from model.spec.tokenizer import BOS_ID
from model.tokenizer_training import one_word_per_id


def test_windows_score_every_token_once_and_keep_below_their_length() -> None:
    tokenizer = one_word_per_id(32, "decoder-only")
    texts = [" ".join(f"w{number % 20 + 4}" for number in range(count)) for count in (1, 7, 40)]
    windows = windows_of(tokenizer, texts, 8)
    expected = [token for text in texts for token in tokenizer.encode_plain(text)]
    assert [token for ids, scored in windows for token in ids[-scored:]] == expected
    assert all(1 <= scored < len(ids) <= 9 for ids, scored in windows)
    assert windows[0][0][0] == BOS_ID


def test_nats_are_those_of_the_tokens_after_the_last_logits_whatever_is_added_to_all() -> None:
    probabilities = np.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8], [0.2, 0.3, 0.5]])
    logits = np.log(probabilities).astype(np.float32) + np.array([[1e4], [7.0], [0.0]], np.float32)
    assert math.isclose(nats_of(logits, [0, 1, 2, 1], 2), -math.log(0.8) - math.log(0.3), rel_tol=1e-5)
