"""The paper's figures, with what they were trained on and what a run of its preset needs."""

from __future__ import annotations

from lessons.frame import Page
from model.spec import cost
from model.training.presets import resolve

_SENTENCE = 30


def figures(page: Page) -> None:
    """Adds them to a page."""
    page.say("BLEU that the paper reports, and what its models were trained on:")
    pairs = page.given("english_german_pairs"), page.given("english_french_pairs")
    page.say(
        "The paper's big model reports {german:.1f} BLEU from English to German, more than {above:.0f} above earlier "
        "systems, trained on the {german_pairs:.1f} million pairs of WMT (2014), and {french:.1f} from English to "
        "French, on {french_pairs:.0f} million pairs, after {days:.1f} days on {cards} cards.",
        german=page.given("english_german_bleu"),
        above=page.given("bleu_above_earlier"),
        german_pairs=pairs[0] / 1e6,
        french=page.given("english_french_bleu"),
        french_pairs=pairs[1] / 1e6,
        days=page.given("days_of_training"),
        cards=page.given("num_cards"),
    )
    recipe = page.call(resolve, "paper")
    if recipe.train is None:
        raise ValueError("the preset has no training")
    tokens = recipe.train.batch_tokens * recipe.train.gradient_accumulation // 2
    work = page.call(cost.forward_flops, recipe.transformer, _SENTENCE, _SENTENCE)
    total = cost.BACKWARD_AND_FORWARD * work.total / _SENTENCE * tokens * recipe.train.steps
    page.say(
        "The preset `paper` is its base model: {layers} layers on each side, as the notes say ({own} in the preset), "
        "and {parameters:.1f} million parameters; the paper has {base_german:.1f} and {base_french:.1f} BLEU for it. A "
        "run of {steps:,} updates of {tokens:,} target tokens is {total:.1e} operations at sentences of {length} "
        "tokens. What ours reached on another corpus is in examples/recipes/en-de.md. BLEU on different corpora, or "
        "of different tokenizations, cannot be compared.",
        layers=page.given("num_layers"),
        own=recipe.transformer.num_layers,
        parameters=page.call(cost.num_parameters, recipe.transformer) / 1e6,
        base_german=page.given("base_english_german_bleu"),
        base_french=page.given("base_english_french_bleu"),
        steps=recipe.train.steps,
        tokens=tokens,
        total=total,
        length=_SENTENCE,
    )
