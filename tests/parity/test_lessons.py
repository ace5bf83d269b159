"""The lessons: numbers follow inputs, the notes' results come out, prose holds, generated pages are not stale."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lessons import command, notes, paper, served, small
from lessons.frame import Lesson, Page
from lessons.notes import BANK, MONEY_POSITION, NOTES, Notes
from lessons.render import index, markdown
from model.__main__ import main
from onward.v1 import generation_pb2 as pb
from tests.environment import ROOT
from tests.parity import worked_examples as formulas

LESSONS = {lesson.name: lesson for lesson in command.LESSONS}
DOCS = ROOT / "docs" / "learn" / "lessons"
PAGE_CALLS = {"say", "look", "show", "compare", "table", "heat"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of three steps: numbers are worth nothing, but there are as many."""
    train = small.train

    @wraps(train)
    def briefly(model, batch, *, steps, **options):
        losses = train(model, batch, steps=3, **options)
        return (losses * steps)[:steps]

    monkeypatch.setattr(small, "train", briefly)


def changed(value: object) -> Any:
    """Another input of the same kind: distributions stay distributions, widths stay even."""
    if isinstance(value, int):
        return 2 * value
    if isinstance(value, float):
        return 1.5 * value + 1.0
    array = np.asarray(value)
    if array.ndim == 2 and np.allclose(array.sum(-1), 1.0):
        powers = array**1.4
        return powers / powers.sum(-1, keepdims=True)
    return array * 1.3 + np.linspace(0.01, 0.9, array.size).reshape(array.shape)


# Which numbers an input moves, by the beginning of their names.
FOLLOWERS: dict[str, dict[str, tuple[str, ...]]] = {
    "six-steps": {
        "model_width": ("width", "rows", "1.", "2.", "3.", "4.", "5.", "6.", "matrix"),
        "head_width": ("columns", "head", "2.", "3.", "4.", "5.", "6.", "matrix", "root", "variance"),
        "help_me_scores": ("help me",),
        "help_me_width": ("help me",),
    },
    "without-parameters": {
        "money_weights": ("new “bank” in “money bank grows”, the notes' shares", "three shares multiplied"),
        "river_weights": ("new “bank” in “river bank flows”, the notes' shares", "three shares multiplied"),
        "money_bank_grows": ("new “bank” in “money bank grows”", "softmax(e·eᵀ) of “money", "cosine"),
        "river_bank_flows": ("new “bank” in “river bank flows”", "softmax(e·eᵀ) of “river", "cosine"),
    },
    "query-key-value": {
        "show_me_weights": ("attention filter", "each word's output"),
        "show_me_embeddings": ("each word's output",),
    },
    "heads": {"head_width": ("head", "width", "joined", "Concat(heads)", "the sum of each head's share")},
    "positions": {
        "show_me_embeddings": ("money with",),
        "frequency_base": ("positions in", "money with position", "money with its", "position 5 turned"),
    },
    "mask": {
        "on_your_life_scores": ("masked scores", "weights before", "weights after"),
        "head_width": ("masked scores", "weights before", "weights after"),
    },
    "encoder-decoder": {
        "english_german_bleu": ("german",),
        "english_french_bleu": ("french",),
        "bleu_above_earlier": ("above",),
        "english_german_pairs": ("german_pairs",),
        "english_french_pairs": ("french_pairs",),
        "days_of_training": ("days",),
        "num_cards": ("cards",),
        "num_layers": ("layers",),
        "base_english_german_bleu": ("base_german",),
        "base_english_french_bleu": ("base_french",),
    },
}
WHOLE_NAMES = {"width", "head", "rows", "columns", "cosine", "german", "french", "days"}
"""Of these, others are beginnings."""


def numbers(page: Page, beginning: str) -> dict[str, np.ndarray]:
    return {
        name: value
        for name, value in page.values.items()
        if (name == beginning if beginning in WHOLE_NAMES else name.startswith(beginning))
    }


def differs(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape != other.shape or bool((one != other).any())


@pytest.mark.parametrize("name", FOLLOWERS)
@pytest.mark.usefixtures("brief")
def test_every_printed_number_follows_its_input(name: str) -> None:
    # The paper's figures are a part of their lesson, and alone in using these inputs.
    lesson = Lesson("paper", "", paper.figures) if name == "encoder-decoder" else LESSONS[name]
    before = lesson.run()
    inputs = FOLLOWERS[name]
    assert set(inputs) == {each for each in before.used if each not in notes.results()}
    for given, beginnings in inputs.items():
        after = lesson.run(dataclasses.replace(NOTES, **{given: changed(getattr(NOTES, given))}))
        for beginning in beginnings:
            found = numbers(before, beginning)
            assert found, f"{given}: no number is called {beginning}"
            stayed = [key for key, value in found.items() if not differs(value, after.values[key])]
            # Only one of the two sentences' products follows.
            assert len(stayed) == (2 if beginning == "three shares multiplied" else 0), (given, stayed)


# What neither an input nor the seed moves, in trainings of three steps: sizes, a fixed vocabulary's words, and limits.
UNMOVED = re.compile(
    r"steps|symbols|length|heads|floor|layers|width|paper|crossover|memory|own|parameters|total|tokens|updates|day"
    r"|processor|written|.*, (numbers in memory|parameters|steps|tokens left|scores, MiB|share n²|(tokens )?right"
    r"|tokens right, (forced|free)|whole dates right|reversed right|exponent|exponent, cached|reads|predicts)"
    r"|after itself each word looks at, .*, at|one query, three systems, database, a query nearby, answer"
    r"|cosine of .*, the word and its position, .*|free running, .*|padding mask of two sources"
    r"|.*with the mask, difference|share of the next token, (greedy|top-k 3), \d|most probable next tokens, 1, token"
    r"|the model's own table.*"
    r"|dot product with a later position, relative to its own, 0, .*"
)


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("brief")
def test_a_number_that_nothing_moves_is_a_size_or_a_limit(name: str) -> None:
    page, moved = LESSONS[name].run(), set()
    runs = [LESSONS[name].run(seed=1)]
    inputs = [each for each in page.used if each not in notes.results()]
    if name == "encoder-decoder":  # the paper's figures, which alone use inputs
        page.values |= (paper_page := Lesson("paper", "", paper.figures).run()).values
        assert set(inputs) == set(paper_page.used)
    lesson = Lesson("paper", "", paper.figures) if name == "encoder-decoder" else LESSONS[name]
    runs += [lesson.run(dataclasses.replace(NOTES, **{each: changed(getattr(NOTES, each))})) for each in inputs]
    for run in runs:
        moved |= {key for key, value in run.values.items() if key in page.values and differs(page.values[key], value)}
    # A table whose rows are drawn has others with another seed.
    moved |= set(page.values) - set(runs[0].values)
    assert [key for key in set(page.values) - moved if not UNMOVED.fullmatch(key)] == []


@pytest.mark.parametrize("name", LESSONS)
@pytest.mark.sampled(3)
@pytest.mark.usefixtures("brief")
def test_what_is_drawn_and_trained_follows_the_seed(name: str) -> None:
    one, again, other = (LESSONS[name].run(seed=seed) for seed in (0, 0, 1))
    moved = {key for key, value in one.values.items() if differs(value, other.values[key])}
    assert len(moved) >= 3
    if name not in {"scores", "length"}:  # these two measure times
        assert one.numbers == again.numbers
        assert one.picture == again.picture


@pytest.mark.usefixtures("brief")
def test_every_number_of_the_notes_is_on_a_page() -> None:
    used = {each for lesson in LESSONS.values() for each in lesson.run().used}
    assert used == {each.name for each in dataclasses.fields(Notes)}


def test_no_number_is_typed_into_a_page() -> None:
    """Text has digits as years in parentheses only, and no call of a page takes a number as its value."""
    wrong = []
    for path in sorted((ROOT / "lessons").glob("*.py")):
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            if not (isinstance(call.func, ast.Attribute) and call.func.attr in PAGE_CALLS):
                continue
            texts = [each.value for arg in call.args[:1] for each in ast.walk(arg) if isinstance(each, ast.Constant)]
            if call.func.attr in {"say", "look"}:
                typed = [*call.args[1:], *(each.value for each in call.keywords)]
            else:
                typed = call.args[1:2]
            numbers = [ast.unparse(each) for each in typed if isinstance(each, ast.Constant)]
            bare = [re.sub(r"\{[^{}]*\}|\(\d{4}\)|^\d\. ", "", text) for text in texts if isinstance(text, str)]
            wrong += [f"{path.name}: {text}" for text in bare if re.search(r"\d", text)] + numbers
    assert wrong == []


@pytest.mark.usefixtures("brief")
def test_results_are_those_that_the_notes_print() -> None:
    pages = {each: page for name in ("six-steps", "positions") for page in [LESSONS[name].run()] for each in page.used}
    for name in notes.results():
        found, printed = pages[name].values[name.replace("_", " ")], getattr(NOTES, name)
        wrong = np.argwhere(np.abs(found - printed) > 0.00501).tolist()
        # The notes have 0.04 for the sine of two degrees, which is 0.0349.
        assert wrong == ([[2, 0]] if name == "positions_in_degrees" else []), name


def test_numbers_are_the_formulas() -> None:
    """With other inputs than the notes', so that nothing can be theirs by heart."""
    scores, embeddings, e = (
        np.asarray(changed(getattr(NOTES, name)))
        for name in ("on_your_life_scores", "show_me_embeddings", "money_bank_grows")
    )
    other = dataclasses.replace(NOTES, on_your_life_scores=scores, show_me_embeddings=embeddings, money_bank_grows=e)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "train", lambda model, batch, *, steps, **options: [1.0] * steps)
        mask, positions, bank = (LESSONS[name].run(other) for name in ("mask", "positions", "without-parameters"))
    masked = (scores + formulas.mask_above_diagonal(len(scores))) / np.sqrt(NOTES.head_width)
    np.testing.assert_allclose(mask.values["weights after the mask"], formulas.softmax(masked), atol=1e-6)
    expected = embeddings[MONEY_POSITION] + formulas.position_vector(MONEY_POSITION, 4)
    np.testing.assert_allclose(positions.values["money with its position in radians"], expected, atol=1e-6)
    contextual = formulas.softmax(e @ e.T) @ e
    name = "new “bank” in “money bank grows”, softmax(e·eᵀ)"
    np.testing.assert_allclose(bank.values[name], contextual[BANK], atol=1e-6)


# What the prose says of numbers that a training decided, by lesson.


def check_bank(values: dict[str, np.ndarray]) -> None:
    cosines = [values[f"cosine of “bank” in both sentences, {place}, trained"] for place in ("layer 1", "layer 2")]
    assert 0.95 > cosines[0] > cosines[1]
    assert min(values[f"what follows, {each} bank, a word of {each}"] for each in ("money", "river")) > 0.8


def check_scores(values: dict[str, np.ndarray]) -> None:
    assert min(values[f"trained alike, {each}, reversed right"] for each in ("dot", "additive")) > 0.9
    narrow, wide = (
        [values[f"softmax of scores, d_k {width}, {scale}, norm of its gradient"] for scale in ("q · k", "/ √d_k")]
        for width in (4, 1024)
    )
    assert wide[0] < narrow[0] / 5
    assert abs(wide[1] / narrow[1] - 1) < 0.1
    assert values["softmax of scores, d_k 1024, / d_k, largest weight"] < 0.15


def check_heads(values: dict[str, np.ndarray]) -> None:
    lean = [
        values[f"trained, head {head} of 2, at its place"] - values[f"trained, head {head} of 2, mirrored"]
        for head in (1, 2)
    ]
    assert min(lean) < -0.2 < 0.2 < max(lean)


def check_positions(values: dict[str, np.ndarray]) -> None:
    assert min(values[f"reversal, {each}, right"] for each in ("sinusoidal", "learned")) > 0.9
    assert values["reversal, none, right"] < 0.1
    offsets = "dot product with a later position, relative to its own"
    for offset in (1, 16):
        start, later = (values[f"{offsets}, {offset}, from {place}"] for place in ("the first", "position 5"))
        assert abs(start - later) < 1e-5
    np.testing.assert_allclose(
        values["position 5 turned by 2, first numbers"], values["position 7, the same"], atol=1e-5
    )


def check_mask(values: dict[str, np.ndarray]) -> None:
    floor = math.log(8)
    assert abs(values["nats a symbol, with the mask, loss when it must predict"] - floor) < 0.05
    assert values["nats a symbol, without, loss at the end"] < floor / 2
    assert values["nats a symbol, without, loss when it must predict"] > floor + 0.3


def check_block(values: dict[str, np.ndarray]) -> None:
    floor = math.log(8)
    assert values["loss, post-norm, no warm-up, last"] > floor - 0.1
    assert max(values[f"loss, {each}, last"] for each in ("post-norm, warm-up", "pre-norm, no warm-up")) < floor - 0.2
    stuck, learning = (
        values[f"gradient norm by layer, post-norm, {each}, lowest layer"] for each in ("no warm-up", "warm-up")
    )
    assert stuck < learning / 20


def check_dates(values: dict[str, np.ndarray]) -> None:
    networks = ("RNN, one vector", "LSTM, one vector", "LSTM, attention", "transformer")
    right = [
        [values[f"share of right tokens, by symbols in the source, {each}, {n}"] for n in (4, 16)] for each in networks
    ]
    assert right[0][1] < right[1][1] < 0.6 < 0.9 < min(right[2] + right[3])
    assert all(short > long + 0.3 for short, long in right[:2])
    assert values["held-out dates, trained, whole dates right"] > 0.95
    mistake = "probability of the right month, trained, after"
    assert values[f"{mistake} the year"] > 0.9 > 0.3 > values[f"{mistake} a mistake"]
    padding = "what padding changes in the shorter one's encoding, at most"
    assert values[f"{padding}, with the mask, difference"] < 1e-5 < 0.1 < values[f"{padding}, without, difference"]
    for word in ("1987", "may", "03"):
        assert values[f"alignment: where cross-attention is strongest, before {word}, looks at"] == word
    assert values["share of the next token, greedy, tokens left"] == 1
    assert values["share of the next token, top-k 3, tokens left"] == 3
    assert 3 < values["share of the next token, top-p 0.8, tokens left"] < 64


CLAIMS = {
    "without-parameters": check_bank,
    "scores": check_scores,
    "heads": check_heads,
    "positions": check_positions,
    "mask": check_mask,
    "block": check_block,
    "encoder-decoder": check_dates,
}


def skeleton(text: str) -> str:
    """A page without what a training or a clock decides: numbers, figures, what was written."""
    text = re.sub(r"```text\n.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"“[^”]*”", "“”", " ".join(text.split()))
    return re.sub(r"\d[\d.,e+]*", "N", re.sub(r"now on .*?, one thread", "now on a processor, one thread", text))


@pytest.mark.parametrize("number", range(1, len(command.LESSONS) + 1))
@pytest.mark.sampled(1)
def test_lesson_shows_what_its_prose_says_and_its_page_is_not_stale(number: int) -> None:
    # One test for both, as each needs the whole training.
    lesson = command.LESSONS[number - 1]
    page, name = lesson.run(), command.stem(lesson, number)
    if lesson.name in CLAIMS:
        CLAIMS[lesson.name](page.values)
    written, drawn = ((DOCS / f"{name}.{kind}").read_text(encoding="utf-8") for kind in ("md", "svg"))
    now = markdown(lesson, page, number, f"{name}.svg")
    if lesson.is_exact:
        assert (written, drawn) == (now, page.picture)
    assert skeleton(written) == skeleton(now), "python -m model lesson --docs docs/learn/lessons"


def test_the_index_is_not_stale() -> None:
    named = [(command.stem(lesson, number), lesson) for number, lesson in enumerate(command.LESSONS, start=1)]
    assert (DOCS / "index.md").read_text(encoding="utf-8") == index(named), "python -m model lesson --docs …"


def test_command_walks_one_lesson_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lesson", "3", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("3. Query, key and value")
    assert "the │    ██░░│" in out
    assert "Called: model.nn.attention.dot_scores" in out
    assert (tmp_path / "03-query-key-value.svg").read_text(encoding="utf-8").startswith("<svg ")
    with pytest.raises(SystemExit) as refused:
        main(["lesson", "gravity"])
    assert refused.value.code == 2


def test_served_lesson_reports_an_absent_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["lesson", "encoder-decoder", "--served", "dates", "--target", "127.0.0.1:1", "--out", str(tmp_path)]
    assert main(asked) == 1
    assert "UNAVAILABLE" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_served_lesson_shows_the_last_layers_mean_over_heads() -> None:
    target, source = ["x", "y"], ["a", "b", "c"]
    response = pb.ExplainResponse(prompt_tokens=source, target_tokens=target, decoder_tokens=["<bos>", "x"])
    sides = {
        pb.ATTENTION_KIND_CROSS: (2, 3),
        pb.ATTENTION_KIND_ENCODER: (3, 3),
        pb.ATTENTION_KIND_DECODER: (2, 2),
    }
    drawn: dict[int, list[np.ndarray]] = {}
    generator = np.random.default_rng(0)
    for kind, (rows, columns) in sides.items():
        for layer in (0, 1):
            drawn[kind] = [generator.dirichlet(np.ones(columns), rows).astype(np.float32) for _ in range(2)]
            for head, weights in enumerate(drawn[kind]):
                values = weights.ravel().tolist()
                response.attentions.add(kind=kind, layer=layer, head=head, rows=rows, columns=columns, weights=values)
    page = Page()
    served.fill(page, response, "abc")
    for heatmap, kind in zip(page.maps, sides, strict=True):
        np.testing.assert_allclose(heatmap.weights, np.mean(drawn[kind], axis=0), rtol=1e-6)
    assert [list(heatmap.rows) for heatmap in page.maps] == [target, source, ["<bos>", "x"]]
    strongest = np.mean(drawn[pb.ATTENTION_KIND_CROSS], axis=0).argmax(-1)
    for place, (token, column) in enumerate(zip(target, strongest, strict=True), start=1):
        name = f"alignment: where cross-attention is strongest, {place}. {token}, looks at"
        assert page.numbers[name] == source[column]
