"""Lesson: self-attention without parameters; one word, two senses."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from lessons import small
from lessons.frame import Lesson, Page
from lessons.notes import BANK, MONEY_SENTENCE, RIVER_SENTENCE
from model.data.batches import Batch
from model.nn.attention import attend_and_weigh, attention_weights, dot_scores
from model.nn.transformer import DecoderOnly, build

_PLACES = {
    "money": (("money", "cash", "loan", "savings"), ("grows", "lends", "pays", "invests")),
    "river": (("river", "stream", "water", "mud"), ("flows", "floods", "erodes", "winds")),
}
_WORDS = ["<pad>", "<bos>", "<eos>", "bank", *(word for sides in _PLACES.values() for side in sides for word in side)]
_STEPS = 300


def without_parameters(page: Page, e: Tensor) -> tuple[Tensor, Tensor]:
    """Σ softmax(xᵢ · xⱼ) xⱼ: the words are their own queries, keys and values; `[S, d]` → `[S, d]`, `[S, S]`."""
    x = e[None, None]
    y, weights = page.call(attend_and_weigh, x, x, x, score=partial(dot_scores, scale=1.0))
    return y[0, 0], weights[0, 0]


def round_trips(weights: Tensor) -> tuple[float, float]:
    """The product of three words' weights around a circle, one way and the other."""
    (_, ab, ac), (ba, _, bc), (ca, cb, _) = weights.tolist()
    return ab * bc * ca, ac * cb * ba


def fill(page: Page) -> None:
    """Fills the page."""
    senses: list[Tensor] = []
    page.say(
        "“Bank” has one word vector, but two senses. A contextual vector mixes the words of its sentence. The notes "
        "give the shares of each mixture. Our word vectors have numbers for money, growth, river, water. Mixed by the "
        "notes' shares, and by softmax(e·eᵀ) of the vectors themselves, “bank” becomes two vectors:"
    )
    names = ("money_weights", "money_bank_grows"), ("river_weights", "river_bank_flows")
    for (weights_name, vectors_name), words in zip(names, (MONEY_SENTENCE, RIVER_SENTENCE), strict=True):
        given, e = (torch.from_numpy(page.given(name)) for name in (weights_name, vectors_name))
        weights = page.call(attention_weights, given.log())
        page.show(f"new “bank” in “{' '.join(words)}”, the notes' shares", (weights @ e)[BANK])
        page.heat(f"{words[0]}: notes", words, words, weights)
        y, own = without_parameters(page, e)
        senses.append(y[BANK])
        page.show(f"softmax(e·eᵀ) of “{' '.join(words)}”", own, rows=words)
        page.show(f"new “bank” in “{' '.join(words)}”, softmax(e·eᵀ)", y[BANK])
        page.heat(f"{words[0]}: softmax(e·eᵀ)", words, words, own)
        page.table(
            f"three shares multiplied around the circle, “{' '.join(words)}”",
            ("way", "product"),
            list(zip(("one way", "other way"), round_trips(given), strict=True)),
            4,
        )
    page.code(without_parameters)
    page.say("Cosine of the two “banks”, which is one for the word alone: {cosine:.3f}.", cosine=small.cosine(*senses))
    page.say(
        "The notes' shares cannot come from e·eᵀ, whatever the vectors are. e·eᵀ is symmetric, so three words' shares, "
        "multiplied around the circle, would be the same both ways: w₁₂w₂₃w₃₁ = w₁₃w₃₂w₂₁. The notes' are not. Such "
        "shares need queries and keys of their own, which are learned."
    )
    _trained(page)
    page.look(
        "Beside the notes' shares stand those of plain dot products. Both mix “bank” with its neighbors; the dot "
        "products of these short vectors spread it more evenly."
    )


def _batch(seed: int, index: int) -> Batch:
    """Sentences “<word> bank <word>” of both senses."""
    generator = np.random.default_rng((seed, index))
    rows = []
    for _ in range(32):
        before, after = _PLACES[str(generator.choice(list(_PLACES)))]
        rows.append(["<bos>", str(generator.choice(before)), "bank", str(generator.choice(after)), "<eos>"])
    ids = np.array([small.words_to_ids(_WORDS, row) for row in rows])
    return Batch(ids[:, :-1], ids[:, 1:])


def _trained(page: Page) -> None:
    """“Bank” in a model trained here, after each of its layers."""
    model = build(small.config(vocab_size=len(_WORDS)), page.seed)
    if not isinstance(model, DecoderOnly):
        raise TypeError("a model of one family is expected")
    sentences = [torch.tensor([small.words_to_ids(_WORDS, ["<bos>", side, "bank"])]) for side in _PLACES]

    def cosines() -> list[float]:
        runs = [small.hidden_states(model, partial(model, ids)) for ids in sentences]
        return [small.cosine(a[0, -1], b[0, -1]) for a, b in zip(*runs, strict=True)]

    before = cosines()
    losses = page.call(small.train, model, partial(_batch, page.seed), steps=_STEPS, seed=page.seed)
    after = cosines()
    page.say(
        "A model learns the senses: trained here for {steps} steps on sentences of both, from a loss of {first:.2f} to "
        "{last:.2f} nats a word. “Bank” enters both sentences as the same vector; each layer moves the two apart:",
        steps=len(losses),
        first=losses[0],
        last=losses[-1],
    )
    places = ["the word and its position", *(f"layer {number}" for number in range(1, len(after)))]
    rows = list(zip(places, before, after, strict=True))
    page.table("cosine of “bank” in both sentences", ("after", "untrained", "trained"), rows, 3)
    with torch.no_grad():
        shares = [model(ids)[0, -1].softmax(-1) for ids in sentences]
    following = [torch.tensor(small.words_to_ids(_WORDS, after)) for _, after in _PLACES.values()]
    rows = [(f"{side} bank", *(row[ids].sum() for ids in following)) for side, row in zip(_PLACES, shares, strict=True)]
    page.table("what follows", ("begins with", *(f"a word of {side}" for side in _PLACES)), rows, 3)


LESSON = Lesson("without-parameters", "Attention without parameters", fill)
