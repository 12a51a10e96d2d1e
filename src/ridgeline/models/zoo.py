"""The two questions people ask the zoo: what is there, and give me this one as a graph."""

from __future__ import annotations

from typing import Any

from ridgeline.graph import Graph
from ridgeline.graph.backward import differentiate
from ridgeline.models import (  # noqa: F401  (importing a family registers it)
    dense,
    diffusion,
    driving,
    encoder,
    gnn,
    llm,
    recommend,
    sequence,
    speech,
    ssm,
    templates,
    vision,
    volume,
)
from ridgeline.models.card import Build, ModelCard, Request, catalog, check, find


def models() -> list[ModelCard]:
    """Every network of the zoo, in the order of their families."""
    return catalog()


def build(
    name: str,
    *,
    batch: int = 1,
    seq: int | None = None,
    kv: int | None = None,
    image: int | None = None,
    mode: str = "infer",
    precision: str = "bf16",
    optimizer: str = "adamw",
    **options: Any,
) -> Graph:
    """The graph of a named network.

    ``infer`` is one forward pass with logits for every position, ``prefill`` keeps only the last token's logits,
    ``decode`` is one new token on top of ``kv`` cached ones, ``train`` is forward, loss, backward and one step of
    ``optimizer``. Sizes that are not given come from the network's card.
    """
    card, builder = find(name)
    sizes = {"seq": seq, "kv": kv, "image": image}
    request = check(
        card, batch=batch, sizes=sizes, mode=mode, precision=precision, optimizer=optimizer, options=options
    )
    if card.templated:
        return templates.graph_of(request, optimizer, lambda asked: _written(builder, asked, optimizer))
    return _written(builder, request, optimizer)


def _written(builder: Build, request: Request, optimizer: str) -> Graph:
    graph = builder(request)
    return differentiate(graph, optimizer=optimizer) if request.mode == "train" else graph
