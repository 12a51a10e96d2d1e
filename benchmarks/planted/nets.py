"""Networks of the planted-cause suite, written the usual way, each habit that costs time behind a switch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a transformer."""

    width: int = 1024
    layers: int = 8
    heads: int = 16
    vocab: int = 50304
    hidden: int = 0
    causal: bool = True


def flash(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, attn_mask=mask, is_causal=causal and mask is None)


def spelled_out(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    """Attention as the paper writes it: every score goes through memory several times."""
    scores_BHLL = q_BHLD @ k_BHLD.transpose(-2, -1) / math.sqrt(q_BHLD.shape[-1])
    if causal:
        length = scores_BHLL.shape[-1]
        future = torch.ones(length, length, dtype=torch.bool, device=q_BHLD.device).triu(1)
        scores_BHLL = scores_BHLL.masked_fill(future, float("-inf"))
    return torch.softmax(scores_BHLL.float(), dim=-1).to(q_BHLD.dtype) @ v_BHLD


class Attention(nn.Module):
    def __init__(self, shape: Shape, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.heads, self.causal, self.attend = shape.heads, shape.causal, attend

    def forward(self, x_BLC: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x_BLC.shape
        qkv = self.qkv(x_BLC).view(batch, length, 3, self.heads, width // self.heads)
        q_BHLD, k_BHLD, v_BHLD = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed_BHLD = self.attend(q_BHLD, k_BHLD, v_BHLD, self.causal, mask)
        return self.out(mixed_BHLD.transpose(1, 2).reshape(batch, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedMlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: Shape, attend: Callable[..., Tensor] = flash) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape, attend)
        self.mlp = GatedMlp(shape.width, shape.hidden) if shape.hidden else Mlp(shape.width, 4 * shape.width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """A GPT: token ids and targets to the mean loss."""

    def __init__(
        self,
        shape: Shape,
        max_len: int,
        attend: Callable[..., Tensor] = flash,
        recompute: bool = False,
        fp32_logits: bool = False,
        watch: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(shape.vocab, shape.width), nn.Embedding(max_len, shape.width)
        self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        self.recompute, self.fp32_logits, self.watch = recompute, fp32_logits, watch

    def trunk(self, ids_BL: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids_BL) + self.places.weight[: ids_BL.shape[1]]
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, mask, use_reentrant=False) if self.recompute else block(x, mask)
            if self.watch is not None:
                self.watch(i, x)
        return self.norm(x)

    def forward(self, ids_BL: Tensor, targets_BL: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = self.head(self.trunk(ids_BL, mask)).flatten(0, 1)
        return F.cross_entropy(logits.float() if self.fp32_logits else logits, targets_BL.flatten(), ignore_index=-100)


class Vit(nn.Module):
    """A vision transformer over uint8 images, normalized where it runs."""

    def __init__(self, shape: Shape, side: int, patch: int = 16, classes: int = 1000) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.width, patch, patch)
        self.places = nn.Parameter(torch.zeros((side // patch) ** 2, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images.to(self.places.dtype).div_(255.0).sub_(0.5)).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class Bottleneck(nn.Module):
    def __init__(self, inner: int, outer: int, narrow: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.bn2, self.bn3 = nn.BatchNorm2d(narrow), nn.BatchNorm2d(outer)
        self.conv3 = nn.Conv2d(narrow, outer, 1, bias=False)
        self.down: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.down = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        return F.relu(self.bn3(self.conv3(y)) + self.down(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-50 when the depths are 3, 4, 6, 3."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(True), nn.MaxPool2d(3, 2, 1)
        )
        stages, inner = [], width
        for i, depth in enumerate(depths):
            narrow, outer = width * 2**i, width * 2**i * 4
            for j in range(depth):
                stages.append(Bottleneck(inner, outer, narrow, 2 if i and not j else 1))
                inner = outer
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inner, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.stages(self.stem(images)).mean((2, 3))), labels)


class Tower(nn.Module):
    """A deep regression on wide feature vectors."""

    def __init__(self, width: int, layers: int, inner: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inner or width if not i else width, width) for i in range(layers))
        self.out = nn.Linear(width, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.out.weight.dtype)
        for layer in self.layers:
            x = F.relu(layer(x))
        return F.mse_loss(self.out(x), y)


class CachedBlock(nn.Module):
    """One layer of a decoder that generates, its keys and values kept in place."""

    def __init__(self, shape: Shape, batch: int, room: int) -> None:
        super().__init__()
        self.block = Block(shape)
        size = (batch, shape.heads, room, shape.width // shape.heads)
        self.register_buffer("keys", torch.zeros(size))
        self.register_buffer("values", torch.zeros(size))

    def forward(self, x_B1C: Tensor, place: Tensor) -> Tensor:
        inner = self.block.attention
        batch, _, width = x_B1C.shape
        qkv = inner.qkv(self.block.norm1(x_B1C)).view(batch, 1, 3, inner.heads, width // inner.heads)
        q_BH1D, k_BH1D, v_BH1D = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        self.keys.index_copy_(2, place, k_BH1D)
        self.values.index_copy_(2, place, v_BH1D)
        mixed = F.scaled_dot_product_attention(q_BH1D, self.keys, self.values)
        x_B1C = x_B1C + inner.out(mixed.transpose(1, 2).reshape(batch, 1, width))
        return x_B1C + self.block.mlp(self.block.norm2(x_B1C))


class Generator(nn.Module):
    """A decoder that yields the logits of the next token."""

    def __init__(self, shape: Shape, batch: int, room: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(CachedBlock(shape, batch, room) for _ in range(shape.layers))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, ids_B1: Tensor, place: Tensor) -> Tensor:
        x = self.tokens(ids_B1)
        for block in self.blocks:
            x = block(x, place)
        return self.head(self.norm(x))[:, -1]


class Typed(nn.Module):
    """A decoder whose tokens also have a type (speaker, segment), looked up in a small table."""

    def __init__(self, shape: Shape, max_len: int, by_index: bool, types: int = 4) -> None:
        super().__init__()
        self.decoder = Decoder(shape, max_len)
        self.types = nn.Parameter(torch.zeros(types, shape.width))
        self.by_index = by_index

    def forward(self, ids_BL: Tensor, targets_BL: Tensor, types_BL: Tensor) -> Tensor:
        typed = self.types[types_BL] if self.by_index else F.embedding(types_BL, self.types)
        x = self.decoder.tokens(ids_BL) + typed
        for block in self.decoder.blocks:
            x = block(x)
        logits = self.decoder.head(self.decoder.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, targets_BL.flatten())


class HandNorm(nn.Module):
    """RMS norm, GELU and scaled residual spelled out op by op."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(width)), nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight
        bent = 0.5 * normed * (1.0 + torch.tanh(0.7978845608 * (normed + 0.044715 * normed * normed * normed)))
        return skip + self.scale * bent
