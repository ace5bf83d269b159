"""CTranslate2's `Translator` on the very weights of one of our encoder-decoders, under requests that come one by one.

The checkpoint is written as CTranslate2's own `TransformerSpec`: post-norm, LayerNorm, ReLU, biases, sinusoids as a
table, untied embeddings and head.

CTranslate2 has no continuous batching: a call of `translate_batch` runs until its last sentence ends. So a server
around it must decide what goes into a call, as `Batching` says. The callback ends each sentence at its own length.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.gguf_file import read_safetensors
from benchmarks.peers.protocol import Options, System, main

Array = npt.NDArray[Any]
_PARTS = {
    "positions": "sinusoidal",
    "norm": "layernorm",
    "norm_placement": "post",
    "activation": "relu",
    "attention_score": "dot",
    "attention_bias": True,
    "mlp_bias": True,
    "tie_embeddings": False,
    "scale_embeddings": True,
}


@dataclass(frozen=True)
class Batching:
    """How waiting requests become calls.

    `num_workers` calls run side by side on `threads / num_workers` threads each; a free worker takes up to `max_batch`
    of the waiting requests, the first or, `is_sorted`, those with the longest sources. `is_padded` decodes every
    sentence of a call to the longest output, as without a callback.
    """

    num_workers: int
    max_batch: int
    is_sorted: bool = False
    is_padded: bool = False


@dataclass
class _Stream:
    """Requests, at most `in_flight` of which are unanswered; a new one arrives when one is answered."""

    sources: Sequence[Sequence[str]]
    in_flight: int
    waiting: list[int] = field(default_factory=list)
    num_come: int = 0

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        for _ in range(min(self.in_flight, len(self.sources))):
            self._come()

    def take(self, batching: Batching) -> list[int]:
        """The next call's requests; waits for some, empty when no more will arrive."""
        with self.changed:
            while not self.waiting and self.num_come < len(self.sources):
                self.changed.wait()
            if batching.is_sorted:
                self.waiting.sort(key=lambda index: -len(self.sources[index]))
            taken = self.waiting[: batching.max_batch]
            del self.waiting[: batching.max_batch]
            return taken

    def answer(self) -> None:
        """A request is answered; the next one arrives."""
        with self.changed:
            if self.num_come < len(self.sources):
                self._come()
            self.changed.notify_all()

    def stop(self) -> None:
        """Ends the stream after a failure."""
        with self.changed:
            self.waiting.clear()
            self.num_come = len(self.sources)
            self.changed.notify_all()

    def _come(self) -> None:
        self.waiting.append(self.num_come)
        self.num_come += 1


class CTranslate2Translator(System):
    """Precisions are its compute types; `folder` is our checkpoint."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._converted: Path = options.work / "converted"
        self._translator: Any = None
        self._num_workers = 0

    def prepare(self) -> None:
        """Writes the weights in CTranslate2's format."""
        if self._converted.exists():
            return
        staged = self._options.work / "converted.part"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        spec = make_spec(self._options.folder)
        spec.validate()
        spec.optimize()
        spec.save(str(staged))
        staged.rename(self._converted)

    def load(self) -> str:
        """Returns the version."""
        import ctranslate2

        self._use_workers(1)
        return str(ctranslate2.__version__)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """One call for all, every output of the same length."""
        return self.translate(
            prompts, [new] * len(prompts), {"num_workers": 1, "max_batch": len(prompts)}, len(prompts)
        )

    def translate(
        self, sources: Sequence[Sequence[int]], lengths: Sequence[int], batching: Mapping[str, Any], in_flight: int
    ) -> list[list[int]]:
        """Greedy outputs of the given lengths, with so many requests in flight."""
        how = Batching(**batching)
        self._use_workers(how.num_workers)
        stream = _Stream([[_word(token) for token in source] for source in sources], in_flight)
        answers: list[list[int]] = [[] for _ in sources]
        failures: list[Exception] = []
        arguments = (how, stream, lengths, answers, failures)
        workers = [threading.Thread(target=self._work, args=arguments) for _ in range(how.num_workers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        return answers

    def _work(
        self,
        batching: Batching,
        stream: _Stream,
        lengths: Sequence[int],
        answers: list[list[int]],
        failures: list[Exception],
    ) -> None:
        """Calls until no more requests arrive."""
        try:
            while taken := stream.take(batching):
                self._call(taken, batching, stream, lengths, answers)
        except Exception as error:  # the other workers would wait forever
            failures.append(error)
            stream.stop()

    def _call(
        self,
        taken: Sequence[int],
        batching: Batching,
        stream: _Stream,
        lengths: Sequence[int],
        answers: list[list[int]],
    ) -> None:
        wanted = [lengths[index] for index in taken]

        def is_over(result: Any) -> bool:
            if result.step + 1 < wanted[result.batch_id]:
                return False
            stream.answer()
            return True

        longest = max(wanted)
        results = self._translator.translate_batch(
            [stream.sources[index] for index in taken],
            beam_size=1,
            max_decoding_length=longest,
            min_decoding_length=longest,
            max_input_length=0,
            end_token=[],
            callback=None if batching.is_padded else is_over,
        )
        for index, length, result in zip(taken, wanted, results, strict=True):
            answers[index] = [_token(word) for word in result.hypotheses[0]]
            if batching.is_padded:
                del answers[index][length:]
                stream.answer()

    def _use_workers(self, num_workers: int) -> None:
        """Loads the weights for so many calls side by side; the threads are shared out."""
        import ctranslate2

        if self._num_workers == num_workers:
            return
        self._translator = None
        self._translator = ctranslate2.Translator(
            str(self._converted),
            device="cpu",
            compute_type=self._options.precision,
            inter_threads=num_workers,
            intra_threads=max(1, self._options.threads // num_workers),
        )
        self._num_workers = num_workers


def make_spec(checkpoint: Path) -> Any:
    """CTranslate2's description of a checkpoint, with its weights.

    Raises:
        ValueError: if it has other parts.
    """
    from ctranslate2.specs.transformer_spec import TransformerSpec

    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    others = [f"{name} is {config[name]}" for name, wanted in _PARTS.items() if config[name] != wanted]
    if others or config["num_kv_heads"] != config["num_heads"]:
        raise ValueError(f"not written for CTranslate2: {', '.join(others) or 'grouped queries'}")
    weights = read_safetensors(checkpoint / "model.safetensors")
    layers = config["num_encoder_layers"], config["num_layers"]
    spec = TransformerSpec.from_config(layers, config["num_heads"], pre_norm=False)
    for half, length in ((spec.encoder, config["source_context"]), (spec.decoder, config["context"])):
        half.scale_embeddings = True
        half.position_encodings.encodings = sinusoids(length, config["d_model"])
    spec.encoder.embeddings[0].weight = weights["encoder.embedding.tokens.weight"]
    spec.decoder.embeddings.weight = weights["embedding.tokens.weight"]
    spec.decoder.projection.weight = weights["head.weight"]
    for name, layer in [(f"encoder.layers.{number}", each) for number, each in enumerate(spec.encoder.layer)]:
        _set_layer(layer, weights, name)
    for name, layer in [(f"layers.{number}", each) for number, each in enumerate(spec.decoder.layer)]:
        _set_layer(layer, weights, name)
        cross = f"{name}.cross_attention"
        for linear, part in zip(layer.attention.linear, ("query", "key_value", "output"), strict=True):
            _set_linear(linear, weights, f"{cross}.{part}")
        _set_norm(layer.attention.layer_norm, weights, f"{cross}_residual.norm")
    words = [_word(token) for token in range(config["vocab_size"])]
    spec.register_source_vocabulary(words)
    spec.register_target_vocabulary(words)
    spec.config.bos_token = spec.config.decoder_start_token = _word(config["bos_id"])
    spec.config.eos_token = _word(config["eos_id"])
    spec.config.unk_token = _word(config["pad_id"])  # there must be one; nothing is unknown here
    spec.config.layer_norm_epsilon = config["norm_epsilon"]
    return spec


def sinusoids(length: int, width: int) -> Array:
    """The paper's positions `[length, width] float32`: sines in even columns, cosines in odd ones."""
    angles = np.outer(np.arange(length), 10000.0 ** (-np.arange(0, width, 2) / width))
    return np.stack((np.sin(angles), np.cos(angles)), axis=-1).reshape(length, width).astype(np.float32)


def _set_layer(layer: Any, weights: Mapping[str, Array], name: str) -> None:
    """What layers of encoder and decoder have in common."""
    attention = layer.self_attention
    for linear, part in zip(attention.linear, ("qkv", "output"), strict=True):
        _set_linear(linear, weights, f"{name}.self_attention.{part}")
    _set_norm(attention.layer_norm, weights, f"{name}.self_attention_residual.norm")
    _set_linear(layer.ffn.linear_0, weights, f"{name}.feed_forward.up")
    _set_linear(layer.ffn.linear_1, weights, f"{name}.feed_forward.down")
    _set_norm(layer.ffn.layer_norm, weights, f"{name}.feed_forward_residual.norm")


def _set_linear(linear: Any, weights: Mapping[str, Array], name: str) -> None:
    linear.weight, linear.bias = weights[f"{name}.weight"], weights[f"{name}.bias"]


def _set_norm(norm: Any, weights: Mapping[str, Array], name: str) -> None:
    norm.gamma, norm.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]


def _word(token: int) -> str:
    return f"w{token}"


def _token(word: str) -> int:
    return int(word[1:])


if __name__ == "__main__":
    main(CTranslate2Translator)
