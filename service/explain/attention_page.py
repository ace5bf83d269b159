"""An `ExplainResponse` as an HTML page: heat maps with tokens on both axes.

The page is a single file without scripts or external resources: its Content-Security-Policy forbids both, and all text
of tokens is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from onward.v1 import generation_pb2 as pb
from service.explain.heatmap import STYLE, Heatmap, draw

Kind: TypeAlias = pb.AttentionKind.ValueType
Weights: TypeAlias = npt.NDArray[np.float32]

# The page's order.
_ORDER = (pb.ATTENTION_KIND_CROSS, pb.ATTENTION_KIND_DECODER, pb.ATTENTION_KIND_ENCODER)
_TITLES: dict[Kind, tuple[str, str]] = {
    pb.ATTENTION_KIND_CROSS: (
        "Cross-attention",
        "Each row is a token that was written, each column a token of the source: the stronger the color, the more "
        "the decoder looked there when it chose the row's token.",
    ),
    pb.ATTENTION_KIND_DECODER: (
        "The decoder's self-attention",
        "Each row is a token that the decoder had just read, each column one that it had read by then: the stronger "
        "the color, the more it looked there when it chose the token after the row's. The first row has nothing but "
        "itself to look at and does not count for the colors.",
    ),
    pb.ATTENTION_KIND_ENCODER: (
        "The encoder's self-attention",
        "Each row is a token of the source, each column one that it looked at.",
    ),
}
_AXES: dict[Kind, tuple[str, str]] = {
    pb.ATTENTION_KIND_CROSS: ("what it wrote", "what it read"),
    pb.ATTENTION_KIND_DECODER: ("what it had just read", "what it had read by then"),
    pb.ATTENTION_KIND_ENCODER: ("what looked", "what it looked at"),
}
_PAGE_STYLE = """\
:root { color-scheme: light dark }
body { margin: 2rem auto; max-width: 80rem; padding: 0 1rem; background: #ffffff; color: #1f2328;
  font: 16px/1.5 Helvetica, Arial, sans-serif }
h1 { font-size: 1.6rem } h2 { font-size: 1.25rem; margin-top: 2.5rem } h3 { font-size: 1rem; margin: 1.5rem 0 .5rem }
p { max-width: 46rem } .faint, figcaption { color: #59636e; font-size: .875rem }
code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere }
.maps { display: flex; flex-wrap: wrap; gap: 1.25rem } figure { margin: 0; max-width: 100%; overflow-x: auto }
@media (prefers-color-scheme: dark) {
  body { background: #0d1117; color: #f0f6fc } .faint, figcaption { color: #9198a1 }
}
"""
_MEAN_WIDTH, _MEAN_CELLS = 520.0, (5.0, 26.0)
_HEAD_WIDTH, _HEAD_CELLS = 300.0, (3.0, 16.0)
# Spaces and line ends as GPT-2's byte vocabulary and SentencePiece spell them.
_SPACES = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n"})
_PICTURE_WIDTH = 900.0
_MAX_QUOTE = 48


def page(response: pb.ExplainResponse, model: str, text: str) -> str:
    """An HTML file: for every kind, the mean over heads of each layer, then each head."""
    written = _written(response)
    sections = "".join(_section(response, kind) for kind in _kinds(response))
    title = html.escape(f"{model}: where the model looked")
    return (
        "<!doctype html>\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}{_PAGE_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f"<p>It read <code>{html.escape(text)}</code><br>and wrote <code>{html.escape(written)}</code></p>\n"
        '<p class="faint">Attention is a share: each row sums to 1. Colors are relative to the strongest of '
        "their own map, whose value stands below it. Layers and heads count from 0. "
        "␣ is a space, ↵ the end of a line.</p>\n"
        f"{sections}</body>\n</html>\n"
    )


def picture(response: pb.ExplainResponse, model: str, text: str) -> str:
    """An SVG file of one heat map: of the page's first kind, the last layer's mean over heads.

    Raises:
        ValueError: the response has no attention.
    """
    kind = next(iter(_kinds(response)), None)
    if kind is None:
        raise ValueError("the answer has no attention")
    (layer, head_numbers), weights = list(means(response, kind))[-1]
    rows, columns = labels(response, kind)
    row_axis, column_axis = _AXES[kind]
    lines = (
        f"{model}: where the model looked",
        f"It read “{_quote(text)}” and wrote “{_quote(_written(response))}”.",
        f"{_TITLES[kind][0]} of layer {layer}, {_mean_of(head_numbers)}. Each row sums to 1.",
    )
    heatmap = Heatmap(rows, columns, weights, _strongest(kind, weights), lines, row_axis, column_axis)
    return draw(heatmap, _cell(len(columns), _PICTURE_WIDTH, _MEAN_CELLS), alone=True)


def _section(response: pb.ExplainResponse, kind: Kind) -> str:
    title, meaning = _TITLES[kind]
    parts = [f"<section>\n<h2>{html.escape(title)}</h2>\n<p>{html.escape(meaning)}</p>\n"]
    layers = list(means(response, kind))
    if len(layers[0][0][1]) > 1:
        maps = [
            _figure(response, kind, weights, f"layer {layer}, {_mean_of(heads)}", _MEAN_WIDTH, _MEAN_CELLS)
            for (layer, heads), weights in layers
        ]
        parts += ["<h3>Heads together</h3>\n", _row(maps), "<h3>Each head</h3>\n"]
    maps = [
        _figure(response, kind, _matrix(each), f"layer {each.layer}, head {each.head}", _HEAD_WIDTH, _HEAD_CELLS)
        for each in response.attentions
        if each.kind == kind
    ]
    return "".join((*parts, _row(maps), "</section>\n"))


def _row(figures: Sequence[str]) -> str:
    return f'<div class="maps">\n{"".join(figures)}</div>\n'


def _figure(
    response: pb.ExplainResponse, kind: Kind, weights: Weights, caption: str, width: float, cells: tuple[float, float]
) -> str:
    rows, columns = labels(response, kind)
    heatmap = Heatmap(rows, columns, weights, _strongest(kind, weights))
    drawn = draw(heatmap, _cell(len(columns), width, cells))
    caption = f"{caption}: strongest {heatmap.strongest:.2f}"
    return f"<figure>\n{drawn}<figcaption>{html.escape(caption)}</figcaption>\n</figure>\n"


def _cell(num_columns: int, width: float, cells: tuple[float, float]) -> float:
    least, most = cells
    return max(least, min(most, width / num_columns))


def _strongest(kind: Kind, weights: Weights) -> float:
    """The largest weight. Excludes the decoder's first row, whose only weight is always 1."""
    chosen = weights[1:] if kind == pb.ATTENTION_KIND_DECODER and len(weights) > 1 else weights
    return float(chosen.max())


def _written(response: pb.ExplainResponse) -> str:
    """The output's text, joined from its tokens' spelling, without special tokens such as `<eos>`."""
    tokens = (each for each in response.target_tokens if not re.fullmatch(r"<[^<>]*>", each))
    return "".join(tokens).translate(_SPACES)


def _quote(text: str) -> str:
    """The beginning of a text, on one line."""
    line = re.sub(r"\s", " ", text)
    return line if len(line) <= _MAX_QUOTE else f"{line[: _MAX_QUOTE - 1]}…"


def _kinds(response: pb.ExplainResponse) -> list[Kind]:
    """The response's kinds, in the page's order."""
    return [kind for kind in _ORDER if any(each.kind == kind for each in response.attentions)]


def means(response: pb.ExplainResponse, kind: Kind) -> Iterator[tuple[tuple[int, tuple[int, ...]], Weights]]:
    """For each layer of a kind: its number, the requested heads, and their mean."""
    own = (each for each in response.attentions if each.kind == kind)
    for layer, group in groupby(own, key=lambda each: each.layer):
        heads = list(group)
        yield (layer, tuple(each.head for each in heads)), np.mean([_matrix(each) for each in heads], axis=0)


def _mean_of(heads: Sequence[int]) -> str:
    return f"head {heads[0]}" if len(heads) == 1 else f"mean of {len(heads)} heads"


def _matrix(attention: pb.ExplainResponse.Attention) -> Weights:
    return np.array(attention.weights, np.float32).reshape(attention.rows, attention.columns)


def labels(response: pb.ExplainResponse, kind: Kind) -> tuple[Sequence[str], Sequence[str]]:
    """Labels of the rows and columns of a kind."""
    return {
        pb.ATTENTION_KIND_CROSS: (response.target_tokens, response.prompt_tokens),
        pb.ATTENTION_KIND_DECODER: (response.decoder_tokens, response.decoder_tokens),
        pb.ATTENTION_KIND_ENCODER: (response.prompt_tokens, response.prompt_tokens),
    }[kind]
