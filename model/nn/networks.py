"""Whatever the trainer trains: transformers of both families, and recurrent encoder-decoders."""

from __future__ import annotations

from model.nn import transformer
from model.nn.recurrent import RecurrentEncoderDecoder, build_recurrent
from model.nn.transformer import EncoderDecoder, Transformer
from model.spec import cost, recurrent
from model.spec.recurrent import NetworkConfig, RecurrentConfig

Network = Transformer | RecurrentEncoderDecoder
"""Any of them."""

Translator = EncoderDecoder | RecurrentEncoderDecoder
"""Those that read pairs."""


def build(config: NetworkConfig, seed: int | None = None) -> Network:
    """A network with random weights, as `transformer.build` and `build_recurrent`."""
    return build_recurrent(config, seed) if isinstance(config, RecurrentConfig) else transformer.build(config, seed)


def build_empty(config: NetworkConfig) -> Network:
    """A network whose parameters are to be loaded, as `transformer.build_empty`."""
    return build_recurrent(config, seed=0) if isinstance(config, RecurrentConfig) else transformer.build_empty(config)


def summary(config: NetworkConfig) -> str:
    """The figures for people, one per line."""
    return recurrent.summary(config) if isinstance(config, RecurrentConfig) else cost.summary(config)
