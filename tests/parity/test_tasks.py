"""Tasks: data made ready for a model, batches by index, scores of a real model, and data that do not fit it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model import evaluate
from model.data import dates
from model.data.batches import IGNORED, Batch
from model.data.corpus import Side
from model.data.files import DataError
from model.nn.transformer import DecoderOnly, EncoderDecoder, build
from model.spec.artifact import TARGET_TOKENIZER, TOKENIZER
from model.spec.tokenizer import EOS_ID
from model.training import tasks
from model.training.presets import Recipe, resolve
from model.training.task import Task, TaskError
from model.training.tasks import fit_vocabulary, make_task

TINY = [
    "d_model=16",
    "num_layers=1",
    "num_heads=2",
    "d_ff=32",
    "batch_tokens=256",
    "steps=10",
    "warmup_fraction=0.5",
    "dropout=0",
]
TINY_PAIRS = [*TINY, "num_encoder_layers=1", "context=64", "vocab_size=300", "validation_fraction=0.1"]
TINY_TEXT = [*TINY, "row_tokens=16", "context=32", "vocab_size=300", "validation_fraction=0.1"]
WORDS = ("alpha", "beta", "gamma", "delta", "omega")
LINES = [
    f"{WORDS[index % 5]} {index} {WORDS[index % 3]}\t{index} {WORDS[index % 5].upper()} x y" for index in range(300)
]


def recipe(preset: str, *overrides: str) -> Recipe:
    tiny = TINY_PAIRS if resolve(preset).model.is_encoder_decoder else TINY_TEXT
    return resolve(preset, [*tiny, *overrides])


def paths(*files: Path) -> str:
    return "paths=" + json.dumps([str(file) for file in files])


@pytest.fixture
def tsv(tmp_path: Path) -> Path:
    path = tmp_path / "train.tsv"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return path


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Line {index} of it.\n" for index in range(600)), encoding="utf-8")
    return path


def model_of(task: Task, run: Recipe) -> Any:
    return build(fit_vocabulary(run.model, task), seed=0).eval()


def targets_of(batch: Batch) -> list[list[int]]:
    return [labels[labels != IGNORED].tolist() for labels in batch.labels]


def test_pairs_are_framed_as_the_model_reads_them(tsv: Path) -> None:
    run = recipe("paper", paths(tsv))
    task = make_task(run)
    tokenizer = task.tokenizers[TOKENIZER]
    pairs = dict(line.split("\t") for line in LINES)
    batch = task.batch(0)
    assert batch.source_ids is not None
    assert batch.source_lengths is not None
    for source, length, target in zip(batch.source_ids, batch.source_lengths, targets_of(batch), strict=True):
        assert source[length - 1] == EOS_ID
        assert target[-1] == EOS_ID
        assert pairs[tokenizer.decode(source[:length].tolist())] == tokenizer.decode(target)


def test_scores_of_pairs_are_loss_while_training_and_bleu_at_the_end(tsv: Path) -> None:
    run = recipe("paper", paths(tsv), "test_fraction=0.1")
    task = make_task(run)
    model = model_of(task, run)
    assert isinstance(model, EncoderDecoder)
    validation, test = task.validate(model), task.test(model)
    assert validation.keys() == {"loss", "perplexity"}
    assert test.keys() == {"loss", "perplexity", "bleu", "bleu_signature", "chrf", "chrf_signature"}
    assert task.criterion.name in validation
    assert not task.criterion.higher_is_better
    # Untrained: about as surprised as by any of the vocabulary.
    assert float(validation["loss"]) == pytest.approx(np.log(model.config.vocab_size), abs=1.5)
    assert task.baselines() == {}


def test_a_model_that_writes_the_references_has_full_marks(tsv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recipe("paper", paths(tsv), "shared_tokenizer=false", "test_fraction=0.1")
    task = make_task(run)
    pairs = dict(line.split("\t") for line in LINES)
    reads, writes = task.tokenizers[TOKENIZER], task.tokenizers[TARGET_TOKENIZER]
    monkeypatch.setattr(
        evaluate,
        "greedy",
        lambda _, sources, __: [writes.encode_plain(pairs[reads.decode(list(source))]) for source in sources],
    )
    scores = task.test(model_of(task, run))
    assert scores["bleu"] == pytest.approx(100)
    assert scores["chrf"] == pytest.approx(100)


def test_translating_is_of_a_bounded_number_of_pairs(tsv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MAX_TRANSLATED_PAIRS", 3)
    monkeypatch.setattr(tasks, "MAX_VALIDATION_PAIRS", 4)
    num_sources = []
    monkeypatch.setattr(
        evaluate, "greedy", lambda _, sources, __: num_sources.append(len(sources)) or [[5] for _ in sources]
    )
    run = recipe("paper", paths(tsv), "test_fraction=0.1")
    task = make_task(run)
    task.test(model_of(task, run))
    assert num_sources == [3]
    assert task.facts["num_validated"] == 4
    assert task.facts["validation"]["num_examples"] > 4


def test_the_vocabulary_is_that_of_the_tokenizers_which_two_do_not_share(tsv: Path) -> None:
    run = recipe("paper", paths(tsv))
    task = make_task(run)
    fitted = fit_vocabulary(run.model, task)
    assert list(task.tokenizers) == [TOKENIZER]
    assert fitted.vocab_size == fitted.source_vocab_size == task.tokenizers[TOKENIZER].vocab_size
    assert fitted.share_embeddings
    run = recipe("paper", paths(tsv), "shared_tokenizer=false", "tokenizer=characters")
    task = make_task(run)
    fitted = fit_vocabulary(run.model, task)
    assert fitted.vocab_size == task.tokenizers[TARGET_TOKENIZER].vocab_size
    assert fitted.source_vocab_size == task.tokenizers[TOKENIZER].vocab_size != fitted.vocab_size
    assert not fitted.share_embeddings


def shapes_of(task: Task) -> tuple[int, int]:
    """The longest padded source and target of the first batches."""
    batches = [task.batch(index) for index in range(60)]
    sources = [batch.source_ids.shape[1] for batch in batches if batch.source_ids is not None]
    return max(sources), max(batch.input_ids.shape[1] for batch in batches)


def test_pairs_longer_than_the_context_are_left_out_counted_and_reported(tsv: Path) -> None:
    long = [f"{line} {'much longer ' * 10}{index}" for index, line in enumerate(LINES)]
    tsv.write_text("\n".join([*LINES, *(f"long {line}" for line in long)]), encoding="utf-8")
    task = make_task(recipe("paper", paths(tsv), "tokenizer=bytes", "test_fraction=0.1"))
    facts = task.facts
    assert facts["num_examples"] + facts["num_too_long"]["training"] == facts["training"]["num_examples"]
    assert set(facts["num_too_long"]) == set(Side)
    assert facts["notes"][0] == (
        f"{facts['num_too_long']['training']} of {facts['training']['num_examples']} training pairs are longer than "
        "source_context 64 or context 64 tokens and left out"
    )
    assert max(shapes_of(task)) <= 64
    # Padding stays within contexts that are no multiple of anything.
    run = recipe("paper", paths(tsv), "tokenizer=bytes", "context=13", "source_context=15", "test_fraction=0.1")
    task = make_task(run)
    assert shapes_of(task) == (15, 13)
    task.validate(model_of(task, run))


def test_pairs_are_the_same_however_many_are_encoded_at_a_time(tsv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make_task(recipe("paper", paths(tsv)))
    monkeypatch.setattr(tasks, "_TEXTS_AT_A_TIME", 7)
    parts = make_task(recipe("paper", paths(tsv)))
    for index in range(whole.facts["batches_per_pass"]):
        assert whole.batch(index).input_ids.tolist() == parts.batch(index).input_ids.tolist()


def test_no_pair_that_fits_is_refused_with_the_limits(tsv: Path) -> None:
    with pytest.raises(TaskError, match="no training pair fits: source_context is 4 and context 64 tokens, the shor"):
        make_task(recipe("paper", paths(tsv), "tokenizer=bytes", "source_context=4"))


def test_dates_are_scored_by_exact_match_on_days_never_trained_on() -> None:
    run = recipe("dates", "max_examples=200", "vocab_size=128")
    task = make_task(run)
    model = model_of(task, run)
    assert task.validate(model).keys() == {"exact_match", "loss"}
    assert task.test(model) == {"exact_match": 0.0}
    assert (task.criterion.name, task.criterion.higher_is_better) == ("exact_match", True)
    assert task.facts["num_examples"] == 200
    assert task.facts["test"]["num_examples"] == tasks.NUM_SCORED_DATES
    tokenizer = task.tokenizers[TOKENIZER]
    assert tokenizer.encode("VENDREDI  20 novembre") == tokenizer.encode("vendredi 20 novembre")
    days = {tokenizer.decode(target) for index in range(30) for target in targets_of(task.batch(index))}
    assert days <= {example.iso for example in dates.training(200, run.train.seed if run.train else 0)}


def test_dates_may_have_a_tokenizer_for_each_side() -> None:
    run = recipe("dates", "max_examples=50", "vocab_size=32", "source_vocab_size=128", "shared_tokenizer=false")
    task = make_task(run)
    assert task.tokenizers[TARGET_TOKENIZER].vocab_size == len("0123456789-") + 4
    assert task.validate(model_of(task, run))["exact_match"] == 0.0


def test_dates_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TaskError, match="source_context is 8"):
        make_task(recipe("dates", "max_examples=50", "vocab_size=128", "source_context=8"))
    with pytest.raises(TaskError, match="vocab_size is 20, the characters of these data need"):
        make_task(recipe("dates", "max_examples=50", "vocab_size=20"))


def test_text_is_scored_in_bits_per_byte_beside_the_compressors(book: Path) -> None:
    run = recipe("stdlib", "source=text", paths(book), "test_fraction=0.1")
    task = make_task(run)
    model = model_of(task, run)
    assert isinstance(model, DecoderOnly)
    for scores in (task.validate(model), task.test(model)):
        assert scores.keys() == {"bits_per_byte", "perplexity"}
        assert 0 < float(scores["bits_per_byte"]) < 9
    assert (task.criterion.name, task.criterion.higher_is_better) == ("bits_per_byte", False)
    assert task.baselines().keys() == {"xz_bits_per_byte", "xz_primed_bits_per_byte"}


def test_what_is_trained_on_is_the_training_text_alone(book: Path) -> None:
    run = recipe("stdlib", "source=text", paths(book), "tokenizer=bytes", "long_fraction=0")
    task = make_task(run)
    tokenizer = task.tokenizers[TOKENIZER]
    text = book.read_text(encoding="utf-8")
    training = text[: task.facts["num_training_bytes"]]
    read = set()
    for index in range(2 * task.facts["batches_per_pass"]):
        for row in task.batch(index).input_ids:
            piece = tokenizer.decode(row.tolist())
            assert piece in training
            read.add(piece)
    assert sum(map(len, read)) > len(training)


def test_the_last_updates_have_rows_of_the_whole_context(book: Path) -> None:
    run = recipe("stdlib", "source=text", paths(book), "gradient_accumulation=3", "long_fraction=0.4")
    task = make_task(run)
    widths = [task.batch(index).input_ids.shape[1] for index in range(30)]
    assert widths == [16] * 18 + [32] * 12
    batches = [task.batch(index).input_ids.tolist() for index in (18, 19, 20)]
    unlike = make_task(recipe("stdlib", "source=text", paths(book), "row_tokens=32"))
    assert batches == [unlike.batch(index).input_ids.tolist() for index in (0, 1, 2)]


def test_validation_text_is_bounded(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "MAX_VALIDATION_BYTES", 100)
    task = make_task(recipe("stdlib", "source=text", paths(book)))
    assert task.facts["num_validated_bytes"] == 100
    assert task.facts["num_validation_bytes"] > 900


def test_characters_that_cannot_be_spelled_are_said_to_flatter_the_score(book: Path) -> None:
    with book.open("a", encoding="utf-8") as file:
        file.write("Ω and ψ\n" * 3)
    task = make_task(recipe("stdlib", "source=text", paths(book), "tokenizer=characters"))
    assert 0 < task.facts["unknown_share"] < 0.1
    assert any("unknown to the tokenizer" in note for note in task.facts["notes"])


def test_the_standard_library_is_split_three_ways() -> None:
    run = recipe("stdlib", "max_examples=10")
    task = make_task(run)
    facts = task.facts
    assert facts["training"]["num_examples"] == 10
    assert facts["validation"]["num_examples"] >= 1
    assert facts["test"]["num_examples"] == len(facts["held_out"])
    assert task.validate(model_of(task, run)).keys() == {"bits_per_byte", "perplexity"}


def test_other_formats_serve_the_families_that_they_suit(tmp_path: Path) -> None:
    jsonl, catalog = tmp_path / "a.jsonl", tmp_path / "de.po"
    entries = [{"text": f"{line} more text", **dict(zip("st", line.split("\t"), strict=True))} for line in LINES]
    jsonl.write_text("\n".join(map(json.dumps, entries)), encoding="utf-8")
    messages = ('msgid "{}"\nmsgstr "{}"\n\n'.format(*line.split("\t")) for line in LINES)
    catalog.write_text("".join(messages), encoding="utf-8")
    text = make_task(recipe("stdlib", "source=jsonl", paths(jsonl)))
    assert text.batch(0).source_ids is None
    pairs = make_task(recipe("paper", "source=jsonl", paths(jsonl), "source_field=s", "target_field=t"))
    assert pairs.batch(0).source_ids is not None
    assert make_task(recipe("paper", "source=gettext", paths(catalog))).facts["num_read"] == 300


@pytest.mark.parametrize("preset", ["paper", "stdlib", "dates"])
def test_a_batch_is_a_function_of_configuration_and_index(preset: str, tsv: Path, book: Path) -> None:
    def make(seed: int) -> Task:
        given = {
            "paper": [paths(tsv)],
            "stdlib": ["source=text", paths(book)],
            "dates": ["max_examples=200", "vocab_size=128"],
        }[preset]
        return make_task(recipe(preset, *given, f"seed={seed}"))

    forward, backward, other = make(1), make(1), make(2)
    indices = range(40)
    ahead = [forward.batch(index) for index in indices]
    behind = [backward.batch(index) for index in reversed(indices)][::-1]
    for one, two in zip(ahead, behind, strict=True):
        for field in dataclasses.fields(Batch):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(two, field.name))
    assert forward.facts == backward.facts
    assert any(targets_of(batch) != targets_of(other.batch(index)) for index, batch in zip(indices, ahead, strict=True))


@pytest.mark.parametrize(
    ("preset", "source", "example"),
    [
        ("paper", "tsv", "train.tsv"),
        ("paper", "gettext", "de.po"),
        ("paper", "jsonl", "train.jsonl"),
        ("stdlib", "text", "train.txt"),
    ],
)
def test_data_without_paths_are_refused_with_what_to_set(preset: str, source: str, example: str) -> None:
    with pytest.raises(TaskError) as caught:
        make_task(recipe(preset, f"source={source}"))
    assert str(caught.value) == f"paths is empty, {source} needs files to train on: --set paths={example}"


@pytest.mark.parametrize("preset", ["paper", "stdlib"])
def test_bad_data_become_one_line(preset: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"a\tb\n\xff\n")
    source = "tsv" if preset == "paper" else "text"
    with pytest.raises(TaskError, match=r"bad\.txt:2: byte 0xff at offset 4 is not valid UTF-8") as caught:
        make_task(recipe(preset, f"source={source}", paths(bad)))
    assert isinstance(caught.value.__cause__, DataError)
    assert "\n" not in str(caught.value)


def test_text_too_short_for_a_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a\nb\nc\nd\ne\n", encoding="utf-8")
    overrides = ["tokenizer=bytes", "validation_fraction=0.2", "test_fraction=0.2"]
    with pytest.raises(TaskError, match="the training text is too short: 8 tokens are too few for windows of 16"):
        make_task(recipe("stdlib", "source=text", paths(path), *overrides))


def test_a_recipe_without_data_is_no_task() -> None:
    with pytest.raises(TaskError, match="law has no data to train on"):
        make_task(resolve("law"))
