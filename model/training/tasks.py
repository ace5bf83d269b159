"""A data set made ready for one run: its tokenizer, its batches, its score.

A new task is a class with `Task`'s members and a row in `_TASKS`. Knows nothing of optimisers, files or progress bars.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from model import evaluate
from model.config import Architecture, ModelConfig
from model.data import dates, stdlib
from model.data.batches import Batch, Pair, length_buckets, pack, windows
from model.presets import DataName, Recipe
from model.tokenizer import Tokenizer
from model.tokenizer_training import byte_level_bpe, characters
from model.training.config import TrainConfig
from model.transformer import DecoderOnly, EncoderDecoder, Transformer

_NUM_HELD_OUT_DATES = 500
_HELD_OUT_SEED = 0


class TaskError(ValueError):
    """The data are not there, or do not fit the model."""


class Task(Protocol):
    """What the trainer asks of a data set."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Reads prompts and writes answers; its vocabulary is the model's."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """JSON-ready: where the data come from, how much there is, and `sha256` over all that is trained on."""

    def batches(self) -> Iterator[Batch]:
        """Endless, and the same for the same configuration."""

    def score(self, model: Transformer) -> Mapping[str, float]:
        """Figures on held-out data; the model is in evaluation mode."""

    def baselines(self) -> Mapping[str, float]:
        """The same figures of what needs no model."""


class DatesTask:
    """Written-out dates to ISO 8601."""

    def __init__(self, model: ModelConfig, train: TrainConfig) -> None:
        self._config = train
        self.tokenizer = characters(dates.alphabet(), Architecture.ENCODER_DECODER)
        if self.tokenizer.vocab_size > model.vocab_size:
            raise TaskError(f"vocab_size is {model.vocab_size}, dates need {self.tokenizer.vocab_size}")
        examples = dates.training(train.num_examples, train.seed)
        self._pairs = [
            Pair(self.tokenizer.encode(example.text), self.tokenizer.encode_plain(example.iso)) for example in examples
        ]
        longest = max(len(pair.source) for pair in self._pairs)
        if longest > model.source_context or len(dates.ISO_FORMAT) >= model.context:
            raise TaskError(
                f"source_context is {model.source_context} and context {model.context}, dates need {longest} and "
                f"{len(dates.ISO_FORMAT) + 1}"
            )
        self.facts: Mapping[str, Any] = {
            "name": DataName.DATES,
            "source": dates.SOURCE,
            "num_examples": len(examples),
            "sha256": hashlib.sha256("\n".join("\t".join(example) for example in examples).encode()).hexdigest(),
        }

    def batches(self) -> Iterator[Batch]:
        """Pairs of like lengths."""
        return length_buckets(self._pairs, self._config.batch_tokens, self._config.seed)

    def score(self, model: Transformer) -> Mapping[str, float]:
        """Exact match on days that were never trained on."""
        if not isinstance(model, EncoderDecoder):
            raise TypeError("dates are read by an encoder-decoder")
        examples = dates.held_out(_NUM_HELD_OUT_DATES, _HELD_OUT_SEED)
        return {"exact_match": evaluate.exact_match(model, self.tokenizer, examples)}

    def baselines(self) -> Mapping[str, float]:
        """None: nothing simple reads twelve languages."""
        return {}


class StdlibTask:
    """Python source, continued."""

    def __init__(self, model: ModelConfig, train: TrainConfig) -> None:
        self._config = train
        self._row_tokens = train.row_tokens or model.context
        self._context = model.context
        try:
            self._split = stdlib.split()
            texts = [file.text for file in self._split.training]
            self.tokenizer = byte_level_bpe(texts, model.vocab_size, Architecture.DECODER_ONLY)
        except (FileNotFoundError, ValueError) as error:
            raise TaskError(str(error)) from error
        self._stream = pack(self.tokenizer.encode_plain_batch(texts))
        self.facts: Mapping[str, Any] = {
            "name": DataName.STDLIB,
            "source": stdlib.SOURCE,
            "num_training_bytes": sum(len(text.encode()) for text in texts),
            "num_training_tokens": len(self._stream),
            "held_out": [file.path for file in self._split.held_out],
            "sha256": self._split.sha256,
        }

    def batches(self) -> Iterator[Batch]:
        """Short rows first, because they train faster; at the end rows that fill the context, so that it is known."""
        train = self._config
        short = windows(self._stream, self._row_tokens, train.batch_tokens, train.seed)
        long = windows(self._stream, self._context, train.batch_tokens, train.seed)
        return itertools.chain(itertools.islice(short, train.steps - train.long_steps), long)

    def score(self, model: Transformer) -> Mapping[str, float]:
        """Bits per byte of modules that were never trained on."""
        if not isinstance(model, DecoderOnly):
            raise TypeError("source is continued by a decoder-only model")
        texts = [file.text for file in self._split.held_out]
        return {"bits_per_byte": evaluate.bits_per_byte(model, self.tokenizer, texts)}

    def baselines(self) -> Mapping[str, float]:
        """The compressors' bits per byte on the same files."""
        training, held_out = (
            "".join(file.text for file in files).encode() for files in (self._split.training, self._split.held_out)
        )
        return asdict(evaluate.compressors(training, held_out))


_TASKS: Mapping[DataName, Callable[[ModelConfig, TrainConfig], Task]] = {
    DataName.DATES: DatesTask,
    DataName.STDLIB: StdlibTask,
}


def make_task(recipe: Recipe) -> Task:
    """Reads the data of a recipe that has some.

    Raises:
        TaskError: when the data are not there, or do not fit the model.
    """
    if recipe.data is None or recipe.train is None:
        raise TaskError(f"{recipe.name} has no data to train on")
    return _TASKS[recipe.data](recipe.model, recipe.train)


def fit_vocabulary(model: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The configuration with the vocabulary that the tokenizer came to, for source and target alike."""
    size = tokenizer.vocab_size
    return replace(model, vocab_size=size, source_vocab_size=size if model.is_encoder_decoder else 0)
