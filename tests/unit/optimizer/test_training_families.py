"""Fifty steps of small models of many kinds, recorded by a stand-in for CUDA graphs: losses are eager's, bit by bit.

Batches differ from step to step, padding with them; the loss is outside of the recording where people have it outside.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

import torch.nn.functional as F
from recorder import TapeExecutor
from torch import Tensor, nn

from ridgeline.engine.capture.cuda_graph import _answering
from ridgeline.engine.drop_in import Optimized, Plan
from ridgeline.engine.example_inputs import State, same
from ridgeline.engine.replay import training
from ridgeline.engine.replay.training import graph_training
from ridgeline.errors import NotGraphable

STEPS = 50


class Told(TapeExecutor):
    """Tells code that asks for a capture what a device would tell it."""

    def rehearse(self, run: Any, *, told: bool) -> None:
        with _answering(told):
            super().rehearse(run, told=told)

    def record(self, run: Any, *, told: bool) -> Any:
        with _answering(told):
            return super().record(run, told=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model, its batch of a step as keywords, and the loss of an output in that step."""

    model: nn.Module
    batch: Callable[[int], dict[str, Any]]
    loss: Callable[[Any, int], Tensor] = lambda output, step: output["loss"]
    cast: torch.dtype | None = None
    clip: float = 0.0
    make: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)


def _ids(below: int, *shape: int, step: int) -> Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(step))


def _x(*shape: int, step: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


class Attending(nn.Module):
    """Nodes that attend to their neighbors, edge by edge, with weights dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16, bias=False), nn.Linear(16, 4)
        self.source, self.target = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        hidden, (source, target) = self.into(x), edges
        score = F.leaky_relu((hidden * self.source).sum(-1)[source] + (hidden * self.target).sum(-1)[target], 0.2)
        most = torch.full((len(x),), -1e9, device=x.device).scatter_reduce(0, target, score, "amax")
        share = (score - most[target]).exp()
        share = share / torch.zeros(len(x), device=x.device).index_add(0, target, share)[target]
        messages = hidden[source] * F.dropout(share, 0.2, self.training)[:, None]
        return self.out(F.elu(torch.zeros_like(hidden).index_add(0, target, messages)))


def _attending() -> Family:
    def loss(output: Any, step: int) -> Tensor:
        return F.cross_entropy(output[:10], _ids(4, 10, step=step))

    return Family(model=Attending(), loss=loss,
                  batch=lambda step: {"x": _x(20, 8, step=step), "edges": _ids(20, 2, 60, step=step)})  # fmt: skip


class Segmenting(nn.Module):
    """An encoder and a decoder with batch norm, and what they hand to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up = self._two(3, 8), self._two(8, 16), self._two(24, 8)
        self.out = nn.Conv2d(8, 4, 1)

    def _two(self, given: int, made: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(given, made, 3, padding=1, bias=False), nn.BatchNorm2d(made), nn.ReLU(True),
                             nn.Conv2d(made, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU(True))  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        low = F.interpolate(self.low(F.max_pool2d(high, 2)), scale_factor=2, mode="bilinear", align_corners=True)
        return self.out(self.up(torch.cat([high, low], 1)))


def _segmenting(cast: torch.dtype | None = None) -> Family:
    def loss(output: Any, step: int) -> Tensor:
        wanted = _ids(4, 2, 16, 16, step=step)
        shares, whole = output.float().softmax(1), F.one_hot(wanted, 4).permute(0, 3, 1, 2)
        overlap = 2 * (shares * whole).sum((2, 3)) / (shares + whole).sum((2, 3))
        return F.cross_entropy(output.float(), wanted) + 1 - overlap.mean()

    return Family(model=Segmenting(), batch=lambda step: {"x": _x(2, 3, 16, 16, step=step)}, loss=loss, cast=cast,
                  make=lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9, nesterov=True))  # fmt: skip


class Detecting(nn.Module):
    """Queries that find boxes in an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.queries = nn.Conv2d(3, 32, 8, 8), nn.Embedding(6, 32)
        self.body = nn.Transformer(32, 4, 1, 1, 64, batch_first=True)
        self.kinds, self.boxes = nn.Linear(32, 5), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        cells = self.stem(x).flatten(2).transpose(1, 2)
        found = self.body(cells, self.queries.weight.expand(len(x), -1, -1))
        return {"kinds": self.kinds(found), "boxes": self.boxes(found).sigmoid()}


def _detecting() -> Family:
    """Queries and boxes are matched on the host, outside of the model."""

    def loss(output: Any, step: int) -> Tensor:
        boxes, kinds = _x(2, 3, 4, step=step).sigmoid(), _ids(5, 2, 3, step=step)
        total = torch.zeros(())
        for i in range(2):
            near = torch.cdist(output["boxes"][i].detach(), boxes[i]).argmin(0).tolist()
            total = total + F.l1_loss(output["boxes"][i][near], boxes[i])
            total = total + F.cross_entropy(output["kinds"][i][near], kinds[i])
        return total

    return Family(model=Detecting(), batch=lambda step: {"x": _x(2, 3, 32, 32, step=step)}, loss=loss, clip=0.1)


class Reading(nn.Module):
    """Recurrent layers between an embedding and a head of the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(50, 16), nn.LSTM(16, 16, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x))[0])


def _reading() -> Family:
    return Family(model=Reading(), batch=lambda step: {"x": _ids(50, 3, 9, step=step)}, clip=0.5,
                  loss=lambda output, step: F.cross_entropy(output.flatten(0, 1), _ids(50, 27, step=step)))  # fmt: skip


def _classifying(cast: torch.dtype | None = None) -> Family:
    """Sentences of several lengths, padded, with dropout."""
    t = pytest.importorskip("transformers")
    config = t.DistilBertConfig(dim=32, n_heads=4, n_layers=2, hidden_dim=64, vocab_size=64, num_labels=3)

    def batch(step: int) -> dict[str, Any]:
        kept = torch.arange(10)[None] < 5 + _ids(6, 4, 1, step=step)
        return {"input_ids": _ids(64, 4, 10, step=step), "attention_mask": kept.long(),
                "labels": _ids(3, 4, step=step)}  # fmt: skip

    return Family(model=t.DistilBertForSequenceClassification(config), batch=batch, cast=cast)


def _captioned() -> Family:
    """Images and captions told from one another."""
    t = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    words = {**small, "vocab_size": 64, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    config = t.CLIPConfig(text_config=words, vision_config={**small, "image_size": 32, "patch_size": 8},
                          projection_dim=16)  # fmt: skip
    return Family(model=t.CLIPModel(config), batch=lambda step: {
        "input_ids": _ids(64, 4, 8, step=step), "pixel_values": _x(4, 3, 32, 32, step=step), "return_loss": True,
    })  # fmt: skip


FAMILIES: dict[str, Callable[[], Family]] = {
    "a graph's attention": _attending, "segmentation": _segmenting, "detection": _detecting,
    "a recurrent reader": _reading, "padded sentences": _classifying, "captions": _captioned,
    "segmentation under autocast": lambda: _segmenting(torch.bfloat16),
    "padded sentences under autocast": lambda: _classifying(torch.bfloat16),
}  # fmt: skip


def _cast(family: Family) -> Any:
    return torch.autocast("cpu", family.cast) if family.cast is not None else contextlib.nullcontext()


def _losses(family: Family, call: Any, model: nn.Module) -> list[float]:
    torch.manual_seed(11)
    parameters = list(model.parameters())
    optimizer, found = family.make(parameters), []
    for step in range(STEPS):
        optimizer.zero_grad()
        with _cast(family):
            output = call(**family.batch(step))
        value = family.loss(output, step)
        del output  # whoever holds it gets a copy of the next
        value.backward()
        if family.clip:
            nn.utils.clip_grad_norm_(parameters, family.clip)
        optimizer.step()
        found.append(value.item())
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_fifty_captured_steps_are_eagers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are handed out without a copy, as those of a megabyte are: CLIP's recording had held its own."""
    monkeypatch.setattr(training, "LENT_BYTES", 16)
    torch.manual_seed(0)
    family = FAMILIES[name]()
    model = family.model.train()
    eager = copy.deepcopy(model)
    with _cast(family):
        graphed = graph_training(model, (), family.batch(0), model, loss=lambda output: family.loss(output, 0),
                                 executor=Told())  # fmt: skip
    fast = Optimized(model, [Plan(graphed.signature, graphed)], mode="train")
    assert _losses(family, fast, model) == _losses(family, eager, eager)
    assert graphed.replays == STEPS and not graphed.misses
    for mine, theirs in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


class Bagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.EmbeddingBag(50, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x))


class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor, neighbors: Tensor) -> Tensor:
        return torch.sparse.mm(neighbors, self.out(x))


class Held(Spread):
    """Its neighbors are its own."""

    def __init__(self, neighbors: Tensor) -> None:
        super().__init__()
        self.register_buffer("neighbors", neighbors)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, self.neighbors)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_cannot_be_captured_says_why() -> None:
    neighbors, x = torch.eye(6).to_sparse_csr(), _x(6, 8, step=0)
    for model, kwargs, why in ((Bagged(), {"x": _ids(50, 6, 3, step=0)}, "sparse=False"),
                               (Spread(), {"x": x, "neighbors": neighbors}, "sparse_csr"),
                               (Held(neighbors), {"x": x}, "holds a sparse tensor .*neighbors")):  # fmt: skip
        with pytest.raises(NotGraphable, match=why):
            graph_training(model, (), kwargs, model, executor=Told())


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_sparse_csc])
def test_a_model_that_holds_sparse_tensors_is_searched(sparse: Callable[[Tensor], Tensor]) -> None:
    """It was left as it is: such tensors could not be compared with what they were."""
    kept = sparse(torch.eye(6))
    other = sparse(torch.eye(6) * 2)
    assert same(kept, kept.clone()) and not same(kept, other) and not same(kept, torch.eye(6))
    state = State(Held(kept).train())
    assert not state.changed()
