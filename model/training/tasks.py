"""Tasks: the tokenizers, batches and scores of each data source.

    dates                   written-out dates → ISO 8601       exact match
    tsv, gettext, jsonl     pairs, for an encoder-decoder      loss, perplexity, BLEU, chrF
    stdlib, text, jsonl     text, for a decoder-only model     bits per byte, perplexity, compressors as baselines

A new task is a class with `Task`'s members and a row in `_MAKERS`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from model import evaluate
from model.data import dates, documents, pairs, stdlib, vocabulary
from model.data.batches import Batch, LengthBuckets, Pair, Windows, pack
from model.data.config import DataConfig, DataSource
from model.data.corpus import Corpus, Document, Side, TextPair, in_hash_order, sample, side_facts
from model.data.files import DataError
from model.data.vocabulary import Tokenizers
from model.nn.networks import Network, Translator
from model.nn.transformer import DecoderOnly
from model.spec.artifact import TARGET_TOKENIZER, TOKENIZER
from model.spec.config import Architecture
from model.spec.recurrent import NetworkConfig
from model.spec.tokenizer import Tokenizer
from model.tokenizer_training import CODE_PATTERN
from model.training.config import TrainConfig
from model.training.presets import Recipe
from model.training.task import Criterion, Scores, Task, TaskError

MAX_VALIDATION_PAIRS = 500
"""Pairs in a validation score during a run, the same ones each time."""

MAX_VALIDATION_BYTES = 64 * 1024
"""Bytes of text in a validation score during a run, the same ones each time."""

MAX_TRANSLATED_PAIRS = 2000
"""Test pairs that BLEU and chrF are computed on: generation is slower than scoring."""

NUM_SCORED_DATES = 500
"""Dates in the validation and in the test score."""

_DATES_SEED = 0
_TEXTS_AT_A_TIME = 10_000
# How many tokens a translation may be longer than its source: Vaswani et al. (2017), section 6.1.
_EXTRA_TARGET_TOKENS = 50
# The window of xz's largest preset; older text would only cost time.
_XZ_WINDOW_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Side:
    """Pairs that fit the model, as text and as ids, in the same order."""

    texts: Sequence[TextPair]
    ids: Sequence[Pair]

    def first(self, n: int) -> _Side:
        """At most `n` pairs, chosen by hash."""
        if len(self.texts) <= n:
            return self
        by_text = dict(zip(self.texts, self.ids, strict=True))
        chosen = in_hash_order(list(by_text))[:n]
        return _Side(chosen, [by_text[text] for text in chosen])


class PairTask:
    """Sources and targets for an encoder-decoder.

    Pairs longer than the model's contexts are left out of every side, and counted.

    Raises:
        TaskError: when no pair of a side fits.
    """

    criterion = Criterion("loss", higher_is_better=False)

    def __init__(
        self, corpus: Corpus[TextPair], tokenizers: Tokenizers, model: NetworkConfig, train: TrainConfig
    ) -> None:
        self.tokenizers: Mapping[str, Tokenizer] = tokenizers.by_file
        self._both = tokenizers
        limits = model.source_context, model.context
        left_out: dict[str, int] = {}
        training, validation, self._test = (
            _fitting(side, texts, tokenizers, limits, left_out)
            for side, texts in zip(Side, (corpus.training, corpus.validation, corpus.test), strict=True)
        )
        self._validation = validation.first(MAX_VALIDATION_PAIRS)
        self._buckets = LengthBuckets(training.ids, train.batch_tokens, train.seed, limits)
        notes = list(corpus.notes)
        if num_long := left_out.get(Side.TRAINING, 0):
            notes.append(
                f"{num_long} of {len(corpus.training)} training pairs are longer than source_context {limits[0]} or "
                f"context {limits[1]} tokens and left out"
            )
        notes.append(_passes(self._buckets.batches_per_pass, train, f"{len(training.ids)} pairs"))
        self.facts: Mapping[str, Any] = {
            **corpus.facts,
            "num_examples": len(training.ids),
            "num_too_long": left_out,
            "num_validated": len(self._validation.ids),
            "batches_per_pass": self._buckets.batches_per_pass,
            "notes": notes,
        }

    def batch(self, index: int) -> Batch:
        """Pairs of similar length."""
        return self._buckets.batch(index)

    def validate(self, model: Network) -> Scores:
        """Loss in nats per target token on validation pairs, and perplexity."""
        return _loss(model, self._validation.ids)

    def test(self, model: Network) -> Scores:
        """Loss and perplexity of all test pairs; BLEU and chrF of greedy translations of `MAX_TRANSLATED_PAIRS`."""
        chosen = self._test.first(MAX_TRANSLATED_PAIRS)
        sources = [pair.source for pair in chosen.ids]
        bounds = [len(source) + _EXTRA_TARGET_TOKENS for source in sources]
        answers = evaluate.greedy(_reads_pairs(model), sources, bounds)
        return {
            **_loss(model, self._test.ids),
            **evaluate.translation_scores(
                [self._both.target.decode(answer) for answer in answers], [text.target for text in chosen.texts]
            ),
        }

    def baselines(self) -> Scores:
        """None."""
        return {}


class DatesTask(PairTask):
    """Written-out dates to ISO 8601, scored by exact match."""

    criterion = Criterion("exact_match", higher_is_better=True)

    def validate(self, model: Network) -> Scores:
        """Share of validation dates written exactly, and loss in nats per target token."""
        reader = _reads_pairs(model)
        return {
            "exact_match": evaluate.exact_match(reader, self._validation.ids),
            "loss": evaluate.pair_loss(reader, self._validation.ids).loss,
        }

    def test(self, model: Network) -> Scores:
        """Share of held-out dates written exactly."""
        return {"exact_match": evaluate.exact_match(_reads_pairs(model), self._test.ids)}


class TextTask:
    """Text for a decoder-only model: documents between control tokens, concatenated and cut into rows.

    Raises:
        TaskError: when the training text is shorter than one row.
    """

    criterion = Criterion("bits_per_byte", higher_is_better=False)

    def __init__(
        self, corpus: Corpus[Document], tokenizers: Tokenizers, model: NetworkConfig, train: TrainConfig
    ) -> None:
        self.tokenizers: Mapping[str, Tokenizer] = tokenizers.by_file
        self._tokenizer = tokenizers.source
        self._accumulation = train.gradient_accumulation
        self._short_steps = train.steps - train.long_steps
        self._training = [document.text for document in corpus.training]
        self._validation = _at_most(MAX_VALIDATION_BYTES, corpus.validation)
        self._test = [document.text for document in corpus.test]
        stream = pack(vocabulary.encode_documents(self._tokenizer, self._training))
        try:
            self._short, self._long = (
                Windows(stream, row_tokens, train.batch_tokens, train.seed)
                for row_tokens in (train.row_tokens or model.context, model.context)
            )
        except ValueError as error:
            raise TaskError(f"the training text is too short: {error}") from error
        notes = [*corpus.notes, _passes(self._short.batches_per_pass, train, f"{len(stream)} tokens")]
        unknown = vocabulary.unknown_share(self._tokenizer, [*self._validation, *self._test])
        if unknown:
            notes.append(f"{unknown:.2%} of what is scored is unknown to the tokenizer: bits per byte come out too low")
        self.facts: Mapping[str, Any] = {
            **corpus.facts,
            "num_training_tokens": len(stream),
            "num_validated_bytes": sum(len(text.encode()) for text in self._validation),
            "unknown_share": unknown,
            "batches_per_pass": self._short.batches_per_pass,
            "notes": notes,
        }

    def batch(self, index: int) -> Batch:
        """Short rows first, because they train faster; at the end rows that fill the context."""
        if index // self._accumulation < self._short_steps:
            return self._short.batch(index)
        return self._long.batch(index - self._short_steps * self._accumulation)

    def validate(self, model: Network) -> Scores:
        """Bits per byte and perplexity of validation text."""
        return self._score(model, self._validation)

    def test(self, model: Network) -> Scores:
        """Bits per byte and perplexity of all test text."""
        return self._score(model, self._test)

    def baselines(self) -> Scores:
        """Compressors' bits per byte on the test text, primed with as much training text as their window holds."""
        training, test = ("".join(texts).encode() for texts in (self._training, self._test))
        return asdict(evaluate.compressors(training[-_XZ_WINDOW_BYTES:], test))

    def _score(self, model: Network, texts: Sequence[str]) -> Scores:
        if not isinstance(model, DecoderOnly):
            raise TypeError("text is continued by a decoder-only model")
        likelihood = evaluate.text_likelihood(model, self._tokenizer, texts)
        return {"bits_per_byte": likelihood.bits_per_byte, "perplexity": likelihood.perplexity}


def make_task(recipe: Recipe) -> Task:
    """Reads the data of a recipe.

    Raises:
        TaskError: when the data are missing, damaged, or do not fit the model.
    """
    if recipe.data is None or recipe.train is None:
        raise TaskError(f"{recipe.name} has no data to train on")
    if recipe.data.lacks_files:
        source = recipe.data.source
        raise TaskError(f"paths is empty, {source} needs files to train on: --set paths={_EXAMPLES[source]}")
    make = _MAKERS[recipe.data.source, recipe.model.family]
    try:
        return make(recipe.data, recipe.model, recipe.train)
    except DataError as error:
        raise TaskError(str(error)) from error


def fit_vocabulary(model: NetworkConfig, task: Task) -> NetworkConfig:
    """The configuration with the vocabulary sizes of the tokenizers.

    Two tokenizers mean two token tables, even of equal size.
    """
    source = task.tokenizers[TOKENIZER]
    target = task.tokenizers.get(TARGET_TOKENIZER, source)
    return replace(
        model,
        vocab_size=target.vocab_size,
        source_vocab_size=source.vocab_size if model.is_encoder_decoder else 0,
        share_embeddings=model.share_embeddings and source is target,
    )


def _make_dates(data: DataConfig, model: NetworkConfig, train: TrainConfig) -> Task:
    sides: dict[Side, list[TextPair]] = {
        side: [TextPair(example.text, example.iso) for example in examples]
        for side, examples in (
            (Side.TRAINING, dates.training(data.max_examples, train.seed)),
            (Side.VALIDATION, dates.validation(NUM_SCORED_DATES, _DATES_SEED)),
            (Side.TEST, dates.held_out(NUM_SCORED_DATES, _DATES_SEED)),
        )
    }
    facts = {"name": str(data.source), "source": dates.SOURCE, **side_facts(sides)}
    training, validation, test = (tuple(sides[side]) for side in Side)
    corpus = Corpus(training, validation, test, facts)
    sources, targets = ([pair[side] for pair in corpus.training] for side in (0, 1))
    return DatesTask(corpus, vocabulary.for_pairs(data, model, sources, targets, dates.alphabet()), model, train)


def _make_pairs(data: DataConfig, model: NetworkConfig, train: TrainConfig) -> Task:
    corpus = pairs.load(data)
    sources, targets = ([pair[side] for pair in corpus.training] for side in (0, 1))
    return PairTask(corpus, vocabulary.for_pairs(data, model, sources, targets), model, train)


def _make_stdlib(data: DataConfig, model: NetworkConfig, train: TrainConfig) -> Task:
    try:
        split = stdlib.split()
    except FileNotFoundError as error:
        raise TaskError(str(error)) from error
    _, validation, test = split
    training = sample(split.training, data.max_examples)
    facts = {
        "name": str(data.source),
        "source": stdlib.SOURCE,
        "num_training_bytes": sum(len(document.text.encode()) for document in training),
        "held_out": [document.name for document in test],
        **side_facts({Side.TRAINING: training, Side.VALIDATION: validation, Side.TEST: test}),
    }
    tokenizers = vocabulary.for_text(data, model, [document.text for document in training], CODE_PATTERN)
    return TextTask(Corpus(training, validation, test, facts), tokenizers, model, train)


def _make_text(data: DataConfig, model: NetworkConfig, train: TrainConfig) -> Task:
    corpus = documents.load(data)
    tokenizers = vocabulary.for_text(data, model, [document.text for document in corpus.training])
    return TextTask(corpus, tokenizers, model, train)


_MAKERS: Mapping[tuple[DataSource, Architecture], Callable[[DataConfig, NetworkConfig, TrainConfig], Task]] = {
    (DataSource.DATES, Architecture.ENCODER_DECODER): _make_dates,
    (DataSource.STDLIB, Architecture.DECODER_ONLY): _make_stdlib,
    (DataSource.TEXT, Architecture.DECODER_ONLY): _make_text,
    (DataSource.JSONL, Architecture.DECODER_ONLY): _make_text,
    (DataSource.TSV, Architecture.ENCODER_DECODER): _make_pairs,
    (DataSource.GETTEXT, Architecture.ENCODER_DECODER): _make_pairs,
    (DataSource.JSONL, Architecture.ENCODER_DECODER): _make_pairs,
}

_EXAMPLES = {
    DataSource.TEXT: "train.txt",
    DataSource.TSV: "train.tsv",
    DataSource.GETTEXT: "de.po",
    DataSource.JSONL: "train.jsonl",
}


def _fitting(
    side: Side,
    texts: Sequence[TextPair],
    tokenizers: Tokenizers,
    limits: tuple[int, int],
    left_out: dict[str, int],
) -> _Side:
    """The pairs that fit, as text and as ids; counts the others in `left_out`."""
    sources = _encode(tokenizers.source.encode_batch, [text.source for text in texts])
    targets = _encode(tokenizers.target.encode_plain_batch, [text.target for text in texts])
    kept_texts, kept = [], []
    for text, source, target in zip(texts, sources, targets, strict=True):
        # The decoder reads the target after a begin token and writes it before an end token.
        if 1 <= len(source) <= limits[0] and len(target) < limits[1]:
            kept_texts.append(text)
            kept.append(Pair(source, target))
    if not kept:
        raise TaskError(
            f"no {side} pair fits: source_context is {limits[0]} and context {limits[1]} tokens, the shortest source "
            f"has {min(map(len, sources))} and the shortest target {min(map(len, targets)) + 1}"
        )
    if len(kept) < len(texts):
        left_out[str(side)] = len(texts) - len(kept)
    return _Side(kept_texts, kept)


def _encode(encode: Callable[[Sequence[str]], list[list[int]]], texts: Sequence[str]) -> list[array[int]]:
    """Ids of each text as compact arrays: Python integers take ten times the memory."""
    starts = range(0, len(texts), _TEXTS_AT_A_TIME)
    return [array("i", ids) for start in starts for ids in encode(texts[start : start + _TEXTS_AT_A_TIME])]


def _loss(model: Network, ids: Sequence[Pair]) -> Scores:
    likelihood = evaluate.pair_loss(_reads_pairs(model), ids)
    return {"loss": likelihood.loss, "perplexity": likelihood.perplexity}


def _reads_pairs(model: Network) -> Translator:
    if isinstance(model, DecoderOnly):
        raise TypeError("pairs are read by an encoder-decoder")
    return model


def _at_most(max_bytes: int, texts: Sequence[Document]) -> list[str]:
    """Documents in hash order, up to `max_bytes`; the last one is cut between characters."""
    chosen: list[str] = []
    for document in in_hash_order(texts):
        if max_bytes <= 0:
            break
        data = document.text.encode()[:max_bytes]
        max_bytes -= len(data)
        chosen.append(data.decode(errors="ignore"))
    return chosen


def _passes(batches_per_pass: int, train: TrainConfig, what: str) -> str:
    passes = train.steps * train.gradient_accumulation / batches_per_pass
    return f"{train.steps} steps are {passes:.1f} passes over {what}"
