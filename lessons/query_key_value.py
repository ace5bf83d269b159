"""Lesson: query, key and value: a dictionary, looked up exactly, then softly."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from lessons import small
from lessons.frame import Lesson, Page
from lessons.notes import SHOW_ME
from model.nn.attention import attend, attend_and_weigh, attention_weights, dot_scores

_TEMPERATURES = (4.0, 2.0, 1.0, 0.5, 0.25, 0.125)
_NAMES = ("pears", "plums", "figs", "dates")
_WIDTH = 4


def look_up_softly(
    page: Page, query: Tensor, keys: Tensor, values: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Σ α(q, kᵢ) vᵢ: `[D]`, `[S, D]`, `[S, W]` → `[W]` and the weights α `[S]`."""
    q, k, v = (part[None, None] for part in (query[None], keys, values))
    y, weights = page.call(attend_and_weigh, q, k, v, score=partial(dot_scores, scale=1.0 / temperature))
    return y[0, 0, 0], weights[0, 0, 0]


def fill(page: Page) -> None:
    """Fills the page."""
    keys = torch.eye(_WIDTH) + small.normal(page.seed, _WIDTH, _WIDTH, deviation=0.1)
    prices = 10.0 + 10.0 * small.normal(page.seed + 1, _WIDTH, 1).abs()
    wanted = _NAMES.index("figs")
    database = {tuple(key.tolist()): price for key, price in zip(keys, prices.flatten().tolist(), strict=True)}
    nearby = keys[wanted] + small.normal(page.seed + 2, _WIDTH, deviation=0.1)
    page.say(
        "A dictionary D = {{(k, v)}} maps keys to values. Here keys are vectors and values are prices. A database "
        "needs an equal key. A search ranks the keys by their score with the query. Attention turns the scores into "
        "weights and returns the weighted sum of all values, which can be differentiated and therefore learned."
    )
    page.table("the dictionary", ("key", "value"), list(zip(_NAMES, prices.flatten(), strict=True)))
    scores = page.call(dot_scores, nearby[None, None, None], keys[None, None], scale=1.0)[0, 0, 0]
    soft, weights = look_up_softly(page, nearby, keys, prices, 1.0)
    rows = [
        ("database, the key itself", database[tuple(keys[wanted].tolist())]),
        ("database, a query nearby", str(database.get(tuple(nearby.tolist()), "nothing"))),
        ("search, the best score", prices[scores.argmax()]),
        ("attention, all weighed", soft),
    ]
    page.table("one query, three systems", ("system", "answer"), rows)
    page.table("scores and weights", ("key", "score", "weight"), list(zip(_NAMES, scores, weights, strict=True)))
    page.code(look_up_softly)
    page.say("As the temperature falls, the soft look-up becomes the exact one:")
    found = [(f"{each:g}", *look_up_softly(page, nearby, keys, prices, each)) for each in _TEMPERATURES]
    page.table(
        "temperature",
        ("temperature", "weight of the nearest", "answer"),
        [(name, weights[wanted], answer) for name, answer, weights in found],
        3,
    )
    _show_me(page)
    page.heat("falling temperature", [name for name, *_ in found], _NAMES, torch.stack([each for *_, each in found]))
    page.look(
        "On the left, rows are queries and columns are keys: “the” looks at itself first and then at “money”. On the "
        "right, each row has a lower temperature than the one above it, until one key has all the weight: the "
        "database's look-up."
    )


def _show_me(page: Page) -> None:
    """The notes' attention filter, its weights applied to the words' embeddings."""
    page.say(
        "The notes print such weights for “Show me the money”, their attention filter: a row for each query, a column "
        "for each key. Below it are the words' embeddings, which are the values here. They print no scores: ours are "
        "the logarithms of their weights, whose softmax gives the weights back."
    )
    given, x = (torch.from_numpy(page.given(name)) for name in ("show_me_weights", "show_me_embeddings"))
    q, k = given.log()[None, None], torch.eye(len(SHOW_ME), dtype=torch.float64)[None, None]
    weights = page.call(attention_weights, page.call(dot_scores, q, k, scale=1.0))[0, 0]
    output = page.call(attend, q, k, x[None, None], score=partial(dot_scores, scale=1.0))[0, 0]
    page.show("attention filter, from its logarithms", weights, rows=SHOW_ME)
    page.show("each word's output, with the embeddings as values", output, rows=SHOW_ME)
    away = weights - weights.diag().diag()
    after = [(word, SHOW_ME[int(row.argmax())], row.max()) for word, row in zip(SHOW_ME, away, strict=True)]
    page.table("after itself each word looks at", ("word", "at", "weight"), after)
    page.heat("“Show me the money”", SHOW_ME, SHOW_ME, weights)
    page.say(
        "A word asks with its query, is found by its key, and hands over its value. With one vector for all three "
        "roles a word could only ask for words like itself. The lesson before shows weights that this cannot give."
    )


LESSON = Lesson("query-key-value", "Query, key and value", fill, is_exact=True)
