"""Networks made from templates are the networks their builders write, and fail with the same words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ridgeline.errors import ModelError
from ridgeline.graph import Graph
from ridgeline.graph.template import Template
from ridgeline.models import build, models, templates
from ridgeline.models.card import check, find

LANGUAGE = [card.name for card in models() if card.templated]
SIZES = [(3, 96), (1, 200), (2, 1), (5, 131)]


def plain(name: str, mode: str, batch: int, seq: int, monkeypatch: pytest.MonkeyPatch) -> Graph:
    with monkeypatch.context() as patched:
        patched.setattr(templates, "graph_of", lambda request, _, write: write(request))
        return build(name, mode=mode, batch=batch, seq=seq)


@pytest.mark.parametrize("name", LANGUAGE)
@pytest.mark.parametrize("mode", ["infer", "prefill", "decode", "train"])
def test_a_network_made_from_a_template_is_the_one_its_builder_writes(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch, seq in SIZES:
        made = build(name, mode=mode, batch=batch, seq=seq)
        assert "template" in made.__dict__
        assert made == plain(name, mode, batch, seq, monkeypatch)


def test_every_decoder_of_the_zoo_has_templates() -> None:
    assert len(LANGUAGE) >= 24
    assert {"llama3-8b", "mixtral-8x7b", "deepseek-v3", "gpt2-xl"} <= set(LANGUAGE)


def test_sizes_of_one_structure_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    templates._kind.cache_clear()
    made = list[Any]()
    monkeypatch.setattr(templates, "Template", lambda *args: made.append(args) or Template(*args))
    for seq in range(100, 110):
        build("llama3-8b", batch=2, seq=seq)
    assert len(made) == 1
    build("llama3-8b", batch=2, seq=1)
    assert len(made) == 2
    build("llama3-8b", batch=2, seq=100, use_cache=False)
    assert len(made) == 3


def test_a_window_that_fills_is_another_structure() -> None:
    short, full = (build("mistral-7b", mode="decode", kv=kv) for kv in (1000, 9000))
    assert short.template[0] is not full.template[0]  # type: ignore[attr-defined]
    assert build("mistral-7b", mode="decode", kv=1001).template[0] is short.template[0]  # type: ignore[attr-defined]


def test_few_variants_are_kept() -> None:
    card, builder = find("llama3-8b")
    sizes = {"seq": 64, "kv": None, "image": None}
    request = check(card, batch=1, sizes=sizes, mode="infer", precision="bf16", optimizer="adamw", options={})
    kind = templates._Kind()
    for seq in range(1, 3 * templates.MAX_VARIANTS):
        templates._first(kind, (1, seq, 0), replace(request, seq=seq), builder)
    assert len(kind.templates) == templates.MAX_VARIANTS


def test_an_error_names_the_size_as_before() -> None:
    with pytest.raises(ModelError, match=r"seq=5000 is 3976 more than transformer.wpe.weight holds \(1024\)"):
        build("gpt2-xl", seq=5000)
