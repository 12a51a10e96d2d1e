"""Networks of the seventh suite: stock transformer layers, graphs, recurrence, adapters, experts, pictures."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def layer(width: int, heads: int) -> nn.Module:
    """The encoder layer that PyTorch ships."""
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )


class Reader(nn.Module):
    """Token ids through stock layers to classes."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, room: int, classes: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Parameter(torch.zeros(room, width))
        self.layers = nn.ModuleList(layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def trunk(self, ids_BL: Tensor) -> Tensor:
        x = self.tokens(ids_BL) + self.places[: ids_BL.shape[1]]
        for part in self.layers:
            x = part(x)
        return self.norm(x).mean(1)

    def forward(self, ids_BL: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.trunk(ids_BL)), labels_B)


class Patches(nn.Module):
    """Pictures in bytes, cut into patches by a view and a product, through stock layers to classes."""

    def __init__(self, side: int, patch: int, width: int, layers: int, heads: int, classes: int = 1000) -> None:
        super().__init__()
        self.patch, self.num = patch, side // patch
        self.enter = nn.Linear(3 * patch * patch, width)
        self.places = nn.Parameter(torch.zeros(self.num**2, width))
        self.layers = nn.ModuleList(layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def trunk(self, pictures: Tensor) -> Tensor:
        cut = pictures.view(-1, 3, self.num, self.patch, self.num, self.patch).permute(0, 2, 4, 1, 3, 5)
        x = cut.reshape(len(pictures), self.num**2, -1).to(self.enter.weight.dtype)
        x = self.enter(x.div_(255.0)) + self.places
        for part in self.layers:
            x = part(x)
        return self.norm(x).mean(1)

    def forward(self, pictures: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.trunk(pictures)).float(), labels_B)


class MixerBlock(nn.Module):
    """Products over places, then over channels."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(places, 2 * places), nn.GELU(), nn.Linear(2 * places, places))
        self.along = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_BLC: Tensor) -> Tensor:
        x_BLC = x_BLC + self.across(self.norm1(x_BLC).transpose(1, 2)).transpose(1, 2)
        return x_BLC + self.along(self.norm2(x_BLC))


class Waved(nn.Module):
    """Places and channels mixed by a Fourier transform, as FNet does; it has no parameters and takes fp32 alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLC: Tensor) -> Tensor:
        mixed = torch.fft.fft2(self.norm1(x_BLC).float(), norm="ortho").real
        x_BLC = x_BLC + mixed.to(x_BLC.dtype)
        return x_BLC + self.down(F.gelu(self.up(self.norm2(x_BLC))))


class Spread(torch.autograd.Function):
    """Sums over neighbors; the graph goes both ways, so that its transpose is itself."""

    @staticmethod
    def forward(ctx: Any, graph: Tensor, x: Tensor) -> Tensor:
        ctx.graph = graph
        return torch.sparse.mm(graph, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, torch.sparse.mm(ctx.graph, gradients[0].contiguous())


def neighborhood(nodes: int, edges: int, device: str) -> Tensor:
    """A symmetric graph with self loops, its rows divided by their number of neighbors, as CSR."""
    ends = torch.randint(0, nodes, (2, edges), device=device)
    selves = torch.arange(nodes, device=device).expand(2, -1)
    both = torch.cat((ends, ends.flip(0), selves), 1)
    graph = torch.sparse_coo_tensor(both, torch.ones(both.shape[1], device=device), (nodes, nodes)).coalesce()
    degree = torch.zeros(nodes, device=device).index_add_(0, graph.indices()[0], graph.values())
    scale = degree.rsqrt()
    values = graph.values() * scale[graph.indices()[0]] * scale[graph.indices()[1]]
    return torch.sparse_coo_tensor(graph.indices(), values, (nodes, nodes)).coalesce().to_sparse_csr()


class GraphNet(nn.Module):
    """Graph convolutions with a residual, to a class for every node."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, graph: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        for product, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(Spread.apply(graph, product(norm(x))))
        return F.cross_entropy(self.head(x), labels)


class Recurrent(nn.Module):
    """A language model over cuDNN's LSTM."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.memory = nn.Embedding(vocab, width), nn.LSTM(width, width, layers)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids_LB: Tensor, targets_LB: Tensor) -> Tensor:
        out, _ = self.memory(self.tokens(ids_LB))
        return F.cross_entropy(self.head(out).flatten(0, 1), targets_LB.flatten())


class Adapted(nn.Module):
    """A frozen product and a low-rank one beside it, added in the second's epilogue."""

    def __init__(self, inner: int, outer: int, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(inner, outer, bias=False).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inner, rank) * inner**-0.5)
        self.up = nn.Parameter(torch.zeros(rank, outer))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        return torch.addmm(self.frozen(flat), flat @ self.down, self.up, alpha=2.0).view(*x.shape[:-1], -1)


class AdaptedBlock(nn.Module):
    """A decoder block of which only the adapters learn."""

    def __init__(self, width: int, heads: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.RMSNorm(width).requires_grad_(False) for _ in range(2))
        self.qkv, self.out = Adapted(width, 3 * width, rank), Adapted(width, width, rank)
        self.up, self.down = Adapted(width, hidden, rank), Adapted(hidden, width, rank)

    def forward(self, x_BLC: Tensor) -> Tensor:
        batch, length, width = x_BLC.shape
        q, k, v = self.qkv(self.norm1(x_BLC)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BLC = x_BLC + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x_BLC + self.down(F.silu(self.up(self.norm2(x_BLC))))


class ChoosingExperts(nn.Module):
    """Each expert chooses its tokens, all as many: batched products, and nothing is asked on the host."""

    def __init__(self, width: int, hidden: int, num: int) -> None:
        super().__init__()
        self.num, self.norm, self.gate = num, nn.LayerNorm(width), nn.Linear(width, num, bias=False)
        self.up = nn.Parameter(torch.randn(num, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num, hidden, width) * hidden**-0.5)

    def forward(self, x_LC: Tensor) -> Tensor:
        normed = self.norm(x_LC)
        share_EL = self.gate(normed).softmax(-1).T
        weight_EK, chosen_EK = share_EL.topk(len(x_LC) // self.num, -1)
        tokens = normed.index_select(0, chosen_EK.flatten()).view(self.num, -1, x_LC.shape[1])
        out_EKC = torch.bmm(F.silu(torch.bmm(tokens, self.up)), self.down) * weight_EK[:, :, None]
        return x_LC.index_add(0, chosen_EK.flatten(), out_EKC.flatten(0, 1))


class Painter(nn.Module):
    """Numbers to pictures by transposed convolutions."""

    def __init__(self, noise: int, width: int) -> None:
        super().__init__()
        sizes, parts = (noise, 8 * width, 4 * width, 2 * width, width), []
        for i, (inner, outer) in enumerate(pairwise(sizes)):
            stride, padding = (1, 0) if not i else (2, 1)
            parts += [nn.ConvTranspose2d(inner, outer, 4, stride, padding, bias=False)]
            parts += [nn.BatchNorm2d(outer), nn.ReLU(inplace=True)]
        self.parts = nn.Sequential(*parts, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())

    def forward(self, z: Tensor) -> Tensor:
        return self.parts(z)


class Critic(nn.Module):
    """Pictures to one number each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes, parts = (width, 2 * width, 4 * width, 8 * width), [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True)]
        for inner, outer in pairwise(sizes):
            parts += [nn.Conv2d(inner, outer, 4, 2, 1, bias=False), nn.BatchNorm2d(outer), nn.LeakyReLU(0.2, True)]
        self.parts = nn.Sequential(*parts, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.parts(pictures).flatten()


class Upscaler(nn.Module):
    """A residual network that doubles a picture's sides."""

    def __init__(self, width: int, depth: int, colors: int = 3, times: int = 2) -> None:
        super().__init__()
        conv = lambda inner, outer: nn.Conv2d(inner, outer, 3, 1, 1)
        self.enter, self.leave = conv(colors, width), conv(width, colors * times * times)
        make = lambda: nn.Sequential(conv(width, width), nn.ReLU(inplace=True), conv(width, width))
        self.blocks, self.times = nn.ModuleList(make() for _ in range(depth)), times

    def forward(self, small: Tensor, large: Tensor) -> Tensor:
        x = self.enter(small)
        for block in self.blocks:
            x = x + block(x)
        return F.l1_loss(F.pixel_shuffle(self.leave(x), self.times), large)


class Labeler(nn.Module):
    """Convolutions to a class for every point of a picture."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        sizes = [3, *([width] * depth)]
        parts = [
            part for i, o in pairwise(sizes)
            for part in (nn.Conv2d(i, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
        ]  # fmt: skip
        self.parts, self.head = nn.Sequential(*parts), nn.Conv2d(width, classes, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.parts(pictures))


def mish_in_steps(x: Tensor) -> Tensor:
    return x * torch.tanh(F.softplus(x))


class Dark(nn.Module):
    """Convolutions with Mish, halving the sides at every stage."""

    def __init__(self, widths: tuple[int, ...], in_steps: bool) -> None:
        super().__init__()
        sizes = (3, *widths)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, 2, 1, bias=False) for i, o in zip(sizes, widths, strict=False))
        self.more = nn.ModuleList(nn.Conv2d(o, o, 3, 1, 1, bias=False) for o in widths)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for o in widths for _ in range(2))
        self.bend, self.head = mish_in_steps if in_steps else F.mish, nn.Linear(widths[-1], 1000)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for i, (conv, more) in enumerate(zip(self.convs, self.more, strict=True)):
            x = self.bend(self.norms[2 * i](conv(x)))
            x = self.bend(self.norms[2 * i + 1](more(x)))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Perceiver(nn.Module):
    """Few latents attend to many inputs, then think by themselves."""

    def __init__(self, width: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused, self.norm1, self.norm2 = heads, fused, nn.LayerNorm(width), nn.LayerNorm(width)
        self.ask, self.tell = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, z_BLC: Tensor, x_BMC: Tensor) -> Tensor:
        q = self.ask(self.norm1(z_BLC)).unflatten(-1, (self.heads, -1))
        k, v = self.tell(x_BMC).unflatten(-1, (2, self.heads, -1)).unbind(2)
        z_BLC = z_BLC + self.out(self._mixed(q, k, v).flatten(2))
        return z_BLC + self.think(self.norm2(z_BLC))

    def _mixed(self, q_BLHD: Tensor, k_BMHD: Tensor, v_BMHD: Tensor) -> Tensor:
        if self.fused:
            q, k, v = (part.transpose(1, 2) for part in (q_BLHD, k_BMHD, v_BMHD))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        scores = torch.einsum("blhd,bmhd->bhlm", q_BLHD, k_BMHD) * q_BLHD.shape[-1] ** -0.5
        return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v_BMHD)


class Hops(nn.Module):
    """Features gathered over several hops beforehand, a product for each, and a tower on top."""

    def __init__(self, features: int, width: int, hops: int, classes: int) -> None:
        super().__init__()
        self.enter = nn.ModuleList(nn.Linear(features, width) for _ in range(hops))
        self.tower = nn.Sequential(nn.ReLU(), nn.Linear(hops * width, width), nn.ReLU(), nn.Linear(width, classes))

    def forward(self, hops: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        seen = torch.cat([product(x) for product, x in zip(self.enter, hops, strict=True)], 1)
        return F.cross_entropy(self.tower(seen), labels)


class Lion(torch.optim.Optimizer):
    """Signs of a smoothed gradient; weight by weight, or over lists of weights."""

    def __init__(self, params: Any, lr: float, lists: bool) -> None:
        super().__init__(params, {"lr": lr})
        self.lists = lists

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            learned = [p for p in group["params"] if p.grad is not None]
            for p in learned:
                self.state[p].setdefault("mean", torch.zeros_like(p))
            means, gradients = [self.state[p]["mean"] for p in learned], [p.grad for p in learned]
            (self._by_lists if self.lists else self._one_by_one)(learned, means, gradients, group["lr"])

    def _one_by_one(self, weights: list[Tensor], means: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        for p, mean, gradient in zip(weights, means, gradients, strict=True):
            update = mean.mul(0.9).add_(gradient, alpha=0.1).sign_()
            p.mul_(1.0 - lr * 0.01).add_(update, alpha=-lr)
            mean.mul_(0.99).add_(gradient, alpha=0.01)

    def _by_lists(self, weights: list[Tensor], means: list[Tensor], gradients: list[Tensor], lr: float) -> None:
        updates = torch._foreach_lerp(means, gradients, 0.1)
        torch._foreach_sign_(updates)
        torch._foreach_mul_(weights, 1.0 - lr * 0.01)
        torch._foreach_add_(weights, updates, alpha=-lr)
        torch._foreach_lerp_(means, gradients, 0.01)
