"""`lesson encoder-decoder --served MODEL`: the lesson's picture of attention, of one request to a running server."""

from __future__ import annotations

import sys
from pathlib import Path

from lessons.frame import Lesson, Page
from lessons.maps import three_kinds
from lessons.render import terminal
from onward import NO_RETRIES, CallError, Client
from onward.v1 import generation_pb2 as pb
from service.commands.connection import connection
from service.config import ConnectionConfig
from service.errors import StartupError
from service.explain.attention_page import labels, means

_FAILED = 1
_NO_LIMIT = -1


def show(model: str, text: str, target: str, out: Path) -> int:
    """Asks the server to explain its output for this text; prints the page, writes the picture, returns the status."""
    try:
        channel = connection(ConnectionConfig(target=target), max_answer_bytes=_NO_LIMIT)
        with Client(channel, retries=NO_RETRIES) as client:
            response = client.explain(text, model=model)
    except (CallError, StartupError) as error:
        sys.stderr.write(f"{error}\n")
        return _FAILED
    lesson = Lesson("encoder-decoder-served", f"Encoder and decoder: {model} at {target}", lambda _: None)
    page = Page()
    fill(page, response, text)
    out.mkdir(parents=True, exist_ok=True)
    picture = out / f"{lesson.name}.svg"
    picture.write_text(page.picture, encoding="utf-8")
    sys.stdout.write(terminal(lesson, page, 9, str(picture)))
    return 0


def fill(page: Page, response: pb.ExplainResponse, text: str) -> None:
    """Fills a page with an `Explain` response: each kind's last layer, the mean of its heads."""
    page.say(
        "It read “{source}” and wrote “{written}”, {tokens} tokens.",
        source=text,
        written="".join(response.target_tokens),
        tokens=len(response.target_tokens),
    )
    kinds = {each.kind for each in response.attentions}
    last = {kind: list(page.call(means, response, kind))[-1][1] for kind in kinds}
    names = {kind: labels(response, kind) for kind in kinds}
    if pb.ATTENTION_KIND_CROSS not in kinds:
        tokens = names[pb.ATTENTION_KIND_DECODER][0]
        page.heat("decoder, causal", tokens, tokens, last[pb.ATTENTION_KIND_DECODER])
        return
    cross, encoder, decoder = pb.ATTENTION_KIND_CROSS, pb.ATTENTION_KIND_ENCODER, pb.ATTENTION_KIND_DECODER
    written, source = names[cross]
    three_kinds(page, last[cross], last[encoder], last[decoder], source, names[decoder][0], written)
    rows = [
        (f"{place}. {token}", source[int(row.argmax())], row.max())
        for place, (token, row) in enumerate(zip(written, last[cross], strict=True), start=1)
    ]
    page.table("alignment: where cross-attention is strongest", ("written", "looks at", "weight"), rows)
    page.look(
        "The rows of cross-attention are the tokens written; in the decoder's triangle no token sees a later one."
    )
