"""The page of heat maps: what is first, what is averaged, and that nothing on it runs or loads."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest

from onward.v1 import generation_pb2 as pb
from service.explain.attention_page import page, picture

ENCODER, DECODER, CROSS = pb.ATTENTION_KIND_ENCODER, pb.ATTENTION_KIND_DECODER, pb.ATTENTION_KIND_CROSS
NASTY = ("<script>alert(1)</script>", "</svg><script>alert(2)</script>", "' onload='x()", "&lt;")


def response(*, kinds=(ENCODER, DECODER, CROSS), layers=(0, 1), heads=(0, 1), prompt="abc", target="de"):
    prompt, target = list(prompt), list(target)
    answer = pb.ExplainResponse(prompt_tokens=prompt, target_tokens=target, decoder_tokens=["<bos>", *target[:-1]])
    sizes = {
        ENCODER: (len(prompt), len(prompt)),
        DECODER: (len(target), len(target)),
        CROSS: (len(target), len(prompt)),
    }
    rng = np.random.default_rng(0)
    for kind in kinds:
        for layer in layers:
            for head in heads:
                rows, columns = sizes[kind]
                weights = rng.dirichlet(np.ones(columns), rows).ravel().tolist()
                answer.attentions.add(kind=kind, layer=layer, head=head, rows=rows, columns=columns, weights=weights)
    return answer


class Page(HTMLParser):
    """What a browser finds: elements with their attributes, and text by the element it is in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self._open[-1], data))

    def all(self, tag: str) -> list[str]:
        return [text for element, text in self.texts if element == tag]


def shades(svg: str) -> list[float]:
    return sorted(float(opacity) for opacity in re.findall(r'fill-opacity="([\d.]+)" d=', svg))


def test_cross_attention_comes_first_and_means_before_heads() -> None:
    found = Page(page(response(), "dates", "abc"))
    assert found.all("h2") == ["Cross-attention", "The decoder's self-attention", "The encoder's self-attention"]
    assert found.all("h3") == ["Heads together", "Each head"] * 3
    captions = [caption.partition(":")[0] for caption in found.all("figcaption")]
    one_kind = ["layer 0, mean of 2 heads", "layer 1, mean of 2 heads"]
    one_kind += [f"layer {layer}, head {head}" for layer in (0, 1) for head in (0, 1)]
    assert captions == one_kind * 3


def test_one_head_needs_no_mean() -> None:
    found = Page(page(response(kinds=(DECODER,), heads=(3,)), "stdlib", "abc"))
    assert found.all("h3") == []
    assert [caption.partition(":")[0] for caption in found.all("figcaption")] == ["layer 0, head 3", "layer 1, head 3"]


def test_caption_has_the_largest_weight_of_its_map() -> None:
    answer = response(kinds=(CROSS,), layers=(1,), heads=(0, 2))
    first, second = (np.array(each.weights).reshape(2, 3) for each in answer.attentions)
    peaks = [caption.rpartition(" ")[2] for caption in Page(page(answer, "m", "abc")).all("figcaption")]
    assert peaks == [f"{matrix.max():.2f}" for matrix in ((first + second) / 2, first, second)]


def test_output_is_shown_as_text() -> None:
    tokens = ["▁Guten", "Ġ", "Tag", "!", "<eos>"]
    assert Page(page(response(target=tokens), "m", "good day")).all("code") == ["good day", " Guten Tag!"]


def test_a_decoders_first_row_has_no_say_in_its_shades() -> None:
    answer = response(kinds=(DECODER,), layers=(0,), heads=(0,), target="defg")
    weights = np.tril(np.full((4, 4), 0.3)) + np.diag([0.7, 0.4, 0.1, 0.0])
    answer.attentions[0].weights[:] = weights.ravel().tolist()
    (caption,) = Page(page(answer, "m", "abc")).all("figcaption")
    assert caption == "layer 0, head 0: strongest 0.70"


def test_tokens_stand_on_both_axes_of_every_kind() -> None:
    for kind, labels in (
        (CROSS, ["a", "b", "c", "d", "e"]),
        (DECODER, ["<bos>", "d", "<bos>", "d"]),
        (ENCODER, [*"abc", *"abc"]),
    ):
        found = Page(page(response(kinds=(kind,), layers=(0,), heads=(0,)), "m", "abc"))
        assert found.all("text") == labels


def test_nothing_on_the_page_runs_or_loads_whatever_tokens_say() -> None:
    text = page(response(prompt=NASTY, target=NASTY[::-1]), '"><script>', "<img src=x onerror=alert(3)>")
    found = Page(text)
    tags = {tag for tag, _ in found.elements}
    assert tags.isdisjoint({"script", "img", "image", "iframe", "object", "link", "foreignobject", "use", "a"})
    attributes = {name for _, attributes in found.elements for name in attributes}
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "href", "xlink:href")]
    assert "default-src 'none'; style-src 'unsafe-inline'" in [
        attributes.get("content") for tag, attributes in found.elements if tag == "meta"
    ]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "<img src=x onerror=alert(3)>" in found.all("code")
    assert sum(label.startswith("<script>alert(1") for label in found.all("text")) > 4


@pytest.mark.parametrize("layers", [(0,), (0, 1)])
def test_picture_is_the_last_layers_mean_of_the_first_kind(layers: tuple[int, ...]) -> None:
    answer = response(kinds=(DECODER, CROSS), layers=layers)
    drawn = picture(answer, "dates", "a\n" + "b" * 100)
    texts = [element.text for element in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "dates: where the model looked"
    assert texts[1] == f"It read “a {'b' * 45}…” and wrote “de”."
    assert str(texts[2]).startswith(f"Cross-attention of layer {layers[-1]}, mean of 2 heads.")
    assert [text for text in texts if text in set("abcde")] == list("abcde")
    last = [np.array(each.weights) for each in answer.attentions if each.kind == CROSS and each.layer == layers[-1]]
    mean = np.mean(last, axis=0)
    expected = sorted({round(share / mean.max() * 32) / 32 for share in mean.tolist()} - {0.0})
    assert shades(drawn) == pytest.approx(expected, abs=1e-3)


def test_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention"):
        picture(response(kinds=()), "m", "abc")
