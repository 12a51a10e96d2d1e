"""FLOPs of captured matmuls, convolutions and attention equal PyTorch's own counter on the same run."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.capture import capture
from ridgeline.graph import Graph, Node


def flops_of(node: Node) -> int:
    a = node.attrs
    if node.op == "matmul":
        return 2 * a["b"] * a["m"] * a["n"] * a["k"]
    if node.op == "conv":
        grid = a["spatial"] if a["transposed"] else a["out_spatial"]
        once = 2 * a["n"] * math.prod(grid) * math.prod(a["kernel"]) * a["c"] * a["o"] // a["groups"]
        return once * (1 if a["which"] == "fwd" else len({"input", "weight"} & set(a["grads"])))
    return 0


def captured(graph: Graph) -> int:
    return sum(flops_of(node) * times for node, times in graph.nodes())


def counted(model: Any, args: tuple[Any, ...], *, train: bool) -> int:
    with FlopCounterMode(display=False) as counter:
        out = model(*args)
        if train:
            out.float().mean().backward()
    return int(counter.get_total_flops())


class Attention(nn.Module):
    """Attention written out, which the counter sees on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, s, 32))


def convnet(groups: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, groups=groups),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 2, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("model", "shape"), [
    (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)), (4, 7, 32)),
    (Attention(), (2, 16, 32)),
    (convnet(), (2, 3, 16, 16)),
    (nn.Sequential(nn.Conv1d(8, 16, 5), nn.ReLU(), nn.Conv1d(16, 4, 3, dilation=2)), (2, 8, 40)),
    (nn.Conv3d(3, 8, 3, padding=1), (1, 3, 6, 8, 8)),
], ids=["mlp", "attention", "convnet", "conv1d", "conv3d"])  # fmt: skip
def test_flops_equal_pytorchs_counter(model: nn.Module, shape: tuple[int, ...], train: bool) -> None:
    x = torch.randn(*shape)
    mode = "train" if train else "infer"
    model.train(train)
    assert captured(capture(model, (x,), mode=mode, optimizer=None)) == counted(model, (x,), train=train)


def test_grouped_convolutions_count_the_same_forward() -> None:
    x = torch.randn(2, 3, 16, 16)  # the counter forgets groups in weight gradients, so only this way
    model = convnet(groups=4).eval()
    assert captured(capture(model, (x,))) == counted(model, (x,), train=False)


def test_a_hugging_face_model_counts_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        attn_implementation="eager",
    )
    model, ids = transformers.LlamaForCausalLM(config), torch.randint(0, 96, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    graph = capture(model, kwargs={"input_ids": ids, "labels": ids, "use_cache": False}, mode="train", optimizer=None)
    assert captured(graph) == counter.get_total_flops()


def test_timm_resnet_counts_the_same() -> None:
    timm = pytest.importorskip("timm")
    model = timm.create_model("resnet18").eval()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert captured(capture(model, (x,))) == counted(model, (x,), train=False)


def test_fused_attention_poses_the_problem_of_its_two_products() -> None:
    class Fused(nn.Module):
        def forward(self, q: Any) -> Any:
            return F.scaled_dot_product_attention(q, q, q)

    q = torch.empty(2, 4, 16, 8, device="meta", dtype=torch.bfloat16)
    (node,) = [n for n, _ in capture(Fused(), (q,)).nodes() if n.op == "attention"]
    a = node.attrs
    assert 2 * a["b"] * a["h"] * a["s"] * a["skv"] * (a["d"] + a["dv"]) == 2 * 2 * 4 * 16 * 16 * 16


def test_operators_of_a_real_step_are_those_captured() -> None:
    """The profiler's view of a real CPU step, where CPU and CUDA dispatch alike (no fused attention, no dropout)."""
    from collections import Counter

    model = nn.Sequential(nn.Embedding(50, 16), Mixer(), Mixer(), nn.LayerNorm(16), nn.Linear(16, 50))
    ids = torch.randint(0, 50, (2, 8))
    graph = capture(model, (ids,), mode="train", optimizer=None, fold=False)
    ours = Counter(n.target.split(".")[1] for n, _ in graph.nodes())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(ids).float().mean().backward()
    theirs: Counter[str] = Counter()
    for event in profile.events():
        parent = event.cpu_parent
        while parent is not None and parent.name.removeprefix("aten::") not in ours:
            parent = parent.cpu_parent
        if event.name.startswith("aten::") and parent is None and event.name[6:] in ours:
            theirs[event.name[6:]] += 1
    assert {k: v for k, v in ours.items() if k != "view"} == {k: v for k, v in theirs.items() if k != "view"}


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.silu(self.up(self.norm(x)))) * torch.softmax(x, -1)
