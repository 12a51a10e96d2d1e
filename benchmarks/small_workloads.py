"""Small networks to compile: what Inductor saves for backward and frees when, at a few seconds of compilation each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from workloads import Built, DiT, Workload, _cache, _ids, _llama

SMALL: dict[str, Workload] = {}


def small(name: str, mode: str = "infer") -> Any:
    def register(build: Any) -> Any:
        SMALL[name] = Workload(name, build, mode, "adamw" if mode == "train" else None, True)
        return build

    return register


@small("gpt2-4l-train-8x512", "train")
def _() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = _ids(50257, 8, 512)
    model = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=4, n_head=16))
    return model, (), {"input_ids": ids, "labels": ids, "use_cache": False}


def _bert(layers: int, batch: int, seq: int) -> Built:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=1024, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=4096)
    mask = torch.ones(batch, seq, dtype=torch.int64)
    return BertModel(config), (), {"input_ids": _ids(30522, batch, seq), "attention_mask": mask}


@small("bert-4l-train-16x512", "train")
def _() -> Built:
    return _bert(4, 16, 512)


class Residual(nn.Module):
    """A bottleneck block with batch norm."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [nn.Conv2d(channels, inner, 1, bias=False), nn.Conv2d(inner, inner, 3, padding=1, bias=False),
             nn.Conv2d(inner, channels, 1, bias=False)]
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (inner, inner, channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.norms[0](self.convs[0](x)))
        h = torch.relu(self.norms[1](self.convs[1](h)))
        return torch.relu(x + self.norms[2](self.convs[2](h)))


class ConvNet(nn.Module):
    def __init__(self, blocks: int = 4, channels: int = 256) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 7, 2, 3, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(channels), nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.ModuleList(Residual(channels, channels // 4) for _ in range(blocks))
        self.head = nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@small("convnet-train-32", "train")
def _() -> Built:
    return ConvNet(), (torch.randn(32, 3, 224, 224),), {}


class ConvNext(nn.Module):
    """Depthwise 7×7, layer norm over channels, a two-layer perceptron with a scale, residual."""

    def __init__(self, depth: int = 4, dim: int = 256) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, dim, 4, 4)
        self.depthwise = nn.ModuleList(nn.Conv2d(dim, dim, 7, padding=3, groups=dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.up = nn.ModuleList(nn.Linear(dim, 4 * dim) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * dim, dim) for _ in range(depth))
        self.scales = nn.ParameterList(torch.ones(dim) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for conv, norm, up, down, scale in zip(
            self.depthwise, self.norms, self.up, self.down, self.scales, strict=True
        ):
            h = norm(conv(x).permute(0, 2, 3, 1))
            h = down(nn.functional.gelu(up(h))) * scale
            x = x + h.permute(0, 3, 1, 2)
        return x


@small("convnext-4l-64")
def _() -> Built:
    return ConvNext(), (torch.randn(64, 3, 224, 224),), {}


def _vit(layers: int, batch: int) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(num_hidden_layers=layers, num_labels=1000)
    return ViTForImageClassification(config), (torch.randn(batch, 3, 224, 224),), {}


@small("vit-base-4l-train-32", "train")
def _() -> Built:
    return _vit(4, 32)


@small("llama-2l-train-2x1024", "train")
def _() -> Built:
    ids = _ids(32000, 2, 1024)
    model = _llama(2, hidden=2048, heads=16, kv=8, inter=5632, vocab=32000)
    return model, (), {"input_ids": ids, "labels": ids, "use_cache": False}


@small("dit-4l-train-16", "train")
def _() -> Built:
    return DiT(depth=4), (torch.randn(16, 4, 32, 32), torch.randn(16, 1152)), {}


@small("dit-4l-32")
def _() -> Built:
    return DiT(depth=4), (torch.randn(32, 4, 32, 32), torch.randn(32, 1152)), {}


@small("bert-4l-8x512")
def _() -> Built:
    return _bert(4, 8, 512)


@small("vit-base-4l-64")
def _() -> Built:
    return _vit(4, 64)


@small("convnet-128")
def _() -> Built:
    return ConvNet(), (torch.randn(128, 3, 224, 224),), {}


@small("llama-2l-decode-16x1024")
def _() -> Built:
    model = _llama(2, hidden=2048, heads=16, kv=8, inter=5632, vocab=32000)
    more = {"position_ids": torch.full((16, 1), 1024, dtype=torch.int64), "use_cache": True}
    return model, (), {"input_ids": _ids(1000, 16, 1), "past_key_values": _cache(model, 16, 1024), **more}
