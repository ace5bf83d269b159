"""What greedy decoding, top-k, top-p and beams choose from the same distribution, by the server's own rules."""

from __future__ import annotations

import numpy as np
import torch

from lessons.frame import Page
from model.data.batches import Pair
from model.nn import reference
from model.nn.transformer import EncoderDecoder
from model.spec.tokenizer import BOS_ID, EOS_ID
from service.engine.sampling.beam import BeamSearch
from service.engine.sampling.filters import rank_highest, truncate
from service.engine.sampling.sampler import Expansion
from service.engine.types import BeamSearchParams, SamplingParams

_SHOWN = 8
_Hypothesis = tuple[tuple[int, ...], float, float]
_TOP_K = SamplingParams(top_k=3)
_TOP_P = SamplingParams(top_p=0.8)
_COLD = SamplingParams(temperature=0.5)
_BEAMS = BeamSearchParams(beam_size=3, num_hypotheses=3)


def choices(page: Page, model: EncoderDecoder, words: tuple[str, ...], pair: Pair) -> None:
    """Fills a page with the first token's distribution, what each rule leaves of it, and the best hypotheses."""
    row = page.call(reference.logits, model, [BOS_ID], pair.source)[-1].numpy()
    order = page.call(rank_highest, row, _SHOWN)
    names = [words[token] for token in order]
    rules = {
        "all": SamplingParams(),
        f"temperature {_COLD.temperature}": _COLD,
        "greedy": SamplingParams(top_k=1),
        f"top-k {_TOP_K.top_k}": _TOP_K,
        f"top-p {_TOP_P.top_p}": _TOP_P,
    }
    shares = {name: _shares(page, row, params) for name, params in rules.items()}
    page.say(
        "The briefly trained model is unsure of the year. Its distribution over the next token, and what each rule "
        "leaves of it: greedy takes the highest; top-k keeps the k highest; top-p the fewest that hold the share p. "
        "One of what is left is drawn by its renormalized share."
    )
    page.table(
        "most probable next tokens", ("place", "token"), [(str(i), name) for i, name in enumerate(names, start=1)]
    )
    rows = [(name, int((share > 0).sum()), *share[order]) for name, share in shares.items()]
    page.table("share of the next token", ("rule", "tokens left", *map(str, range(1, len(names) + 1))), rows, 3)
    hypotheses, first = _beams(page, model, pair)
    kept = np.where(np.isin(np.arange(len(row)), first), shares["all"], 0.0)
    shares[f"beams {_BEAMS.beam_size}"] = kept / kept.sum()
    page.heat("what is left", list(shares), names, np.stack([share[order] for share in shares.values()]))
    rows = [
        (f"{rank}.", " ".join(words[token] for token in tokens), total, score)
        for rank, (tokens, total, score) in enumerate(hypotheses, start=1)
    ]
    written = page.call(reference.greedy, model, [], pair.source, max_tokens=4, eos_ids=(EOS_ID,), start_id=BOS_ID)
    page.say(
        "Beams follow several continuations at once and compare whole outputs by their log-probability over their "
        "length, the score: a longer output may win with a lower log-probability. Greedy decoding, which follows one, "
        "writes “{written}”.",
        written=" ".join(words[token] for token in written),
    )
    page.table("beam search", ("rank", "output", "log-probability", "score"), rows, 3)


def _shares(page: Page, row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The probability of each token under a rule, `[V]`."""
    candidates = page.call(truncate, row, params, row.max())
    shares = np.zeros(len(row))
    weights = candidates.weights / candidates.weights.sum()
    shares[slice(None) if candidates.token_ids is None else candidates.token_ids] = weights
    return shares


def _beams(page: Page, model: EncoderDecoder, pair: Pair) -> tuple[list[_Hypothesis], list[int]]:
    """Runs a beam search: tokens, log-probability and score of its hypotheses, best first; and its first beams."""
    search = page.call(BeamSearch, _BEAMS, len(pair.target) + 1, frozenset({EOS_ID}), frozenset())
    beams: list[tuple[int, ...]] = [()]
    first: list[int] = []
    while not search.is_over:
        expansions = []
        for beam in beams:
            logits = page.call(reference.logits, model, [BOS_ID, *beam], pair.source)[-1]
            logprobs = torch.log_softmax(logits.double(), -1).numpy()
            ids = page.call(rank_highest, logits.numpy(), search.num_candidates)
            expansions.append(Expansion(ids, logprobs[ids]))
        beams = [(*beams[each.parent], each.token_id) for each in search.advance(expansions)]
        first = first or [token for token, *_ in beams]
    return [
        (each.token_ids, sum(part.logprob for part in each.logprobs), each.score) for each in search.hypotheses()
    ], first
