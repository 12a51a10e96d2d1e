"""Networks and data sets that the programs of several causes share."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lab.planted.registry import Shape


def flash(q_BHLD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, attn_mask=mask, is_causal=causal and mask is None)


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


class SelfAttention(nn.Module):
    """Queries, keys and values of one product; whoever may be seen is said by a mask or by an order."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attends, then thinks about it."""

    def __init__(self, dim: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = SelfAttention(dim, heads, causal)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.mlp(self.mlp_norm(x))


class Trunk(nn.Module):
    """Layers one behind the other."""

    def __init__(self, dim: int, heads: int, depth: int, causal: bool = False) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer(dim, heads, causal) for _ in range(depth)), nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Tokens(nn.Module):
    """Pieces of whatever it is, as vectors, through a trunk; one answer for each thing."""

    def __init__(self, piece: int, dim: int, heads: int, depth: int, answers: int) -> None:
        super().__init__()
        self.enter, self.trunk = nn.Linear(piece, dim), Trunk(dim, heads, depth)
        self.answer = nn.Linear(dim, answers)

    def forward(self, pieces: Tensor) -> Tensor:
        return self.answer(self.trunk(self.enter(pieces)).mean(1))


class NextWord(nn.Module):
    """What comes next, for every place of a text."""

    def __init__(self, vocab: int, dim: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embed, self.trunk = nn.Embedding(vocab, dim), Trunk(dim, heads, depth, causal=True)
        self.unembed = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.unembed(self.trunk(self.embed(ids)))


class PackedSelfAttention(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.to_qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        B, N, D = x.shape
        q, k, v = (t.view(B, N, self.h, D // self.h).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.proj(out.transpose(1, 2).reshape(B, N, D))


class ResidualLayer(nn.Module):
    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.n1, self.n2, self.attn = nn.LayerNorm(d), nn.LayerNorm(d), PackedSelfAttention(d, h)
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        x = x + self.attn(self.n1(x), mask, causal)
        return x + self.fc2(F.gelu(self.fc1(self.n2(x))))
