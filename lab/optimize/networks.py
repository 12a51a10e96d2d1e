"""Networks without a package on a bare GPU host: a diffusion U-Net, a recommender with cross layers, a graph network,
LoRA layers, a model with its own autocast, an LSTM language model, a tabular network, a detector that matches on the
host, and four written as third parties write them: WaveNet and a GAN discriminator with weights made by hooks, a
Transformer that stores its attention weights, a policy and value network."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions after group norms, with the time embedding added between them."""

    def __init__(self, given: int, made: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, given), nn.Conv2d(given, made, 3, padding=1)
        self.time = nn.Linear(time, made)
        self.norm2, self.conv2 = nn.GroupNorm(32, made), nn.Conv2d(made, made, 3, padding=1)
        self.skip = nn.Conv2d(given, made, 1) if given != made else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Self-attention over the pixels of an image."""

    def __init__(self, width: int, head: int = 64) -> None:
        super().__init__()
        self.head, self.norm = head, nn.GroupNorm(32, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        flat = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(flat).view(b, h * w, 3, c // self.head, self.head).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c)
        return x + self.out(found).transpose(1, 2).view(b, c, h, w)


class UNet(nn.Module):
    """A U-Net with two residual blocks per level, and attention on all levels but the widest."""

    def __init__(self, channels: int = 4, widths: tuple[int, ...] = (192, 384, 576)) -> None:
        super().__init__()
        time = 4 * widths[0]
        self.width, self.time = widths[0], nn.Sequential(nn.Linear(widths[0], time), nn.SiLU(), nn.Linear(time, time))
        self.stem = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.up, self.shrink, self.grow = (nn.ModuleList() for _ in range(4))
        before, skips = widths[0], [widths[0]]
        for level, width in enumerate(widths):
            for _ in range(2):
                self.down.append(nn.ModuleList([Residual(before, width, time), self._looked(level, width)]))
                before = width
                skips.append(width)
            self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1) if level + 1 < len(widths) else
                               nn.Identity())  # fmt: skip
        self.middle = nn.ModuleList([Residual(before, before, time), Attention(before), Residual(before, before, time)])
        for level, width in reversed(list(enumerate(widths))):
            for _ in range(2):
                self.up.append(nn.ModuleList([Residual(before + skips.pop(), width, time), self._looked(level, width)]))
                before = width
            self.grow.append(nn.Conv2d(width, width, 3, padding=1) if level else nn.Identity())
        self.norm, self.out = nn.GroupNorm(32, before), nn.Conv2d(before, channels, 3, padding=1)

    def _looked(self, level: int, width: int) -> nn.Module:
        return Attention(width) if level else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time, x = self.time(self._waves(t)), self.stem(x)
        kept = []
        for i, (residual, look) in enumerate(self.down):
            x = look(residual(x, time))
            kept.append(x)
            x = self.shrink[i // 2](x) if i % 2 else x
        first, look, second = self.middle
        x = second(look(first(x, time)), time)
        for i, (residual, look) in enumerate(self.up):
            x = look(residual(torch.cat([x, kept.pop()], 1), time))
            if i % 2 and i + 1 < len(self.up):
                x = self.grow[i // 2](F.interpolate(x, scale_factor=2.0))
        return self.out(F.silu(self.norm(x)))

    def _waves(self, t: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(1e4) * torch.arange(half, device=t.device) / half)
        angles = 1000.0 * t[:, None].float() * rates
        return torch.cat([angles.cos(), angles.sin()], -1).to(t.dtype)


class CrossNetwork(nn.Module):
    """DCN v2: embeddings and dense features through cross layers and an MLP."""

    def __init__(self, tables: int = 26, rows: int = 100_000, dim: int = 32, num_crosses: int = 3) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(tables))
        width = tables * dim + 32
        self.dense = nn.Linear(13, 32)
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(num_crosses))
        self.top = nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        first = torch.cat([self.dense(dense), *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        x = first
        for cross in self.crosses:
            x = first * cross(x) + x
        return self.top(x)


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank adapter (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.up(self.down(x))


def adapted(model: nn.Module, names: tuple[str, ...], rank: int = 16) -> nn.Module:
    """The model with frozen weights, and adapters on the linear layers with these names."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if name in names and isinstance(layer, nn.Linear):
                setattr(parent, name, LowRank(layer, rank))
    return model


class Messages(nn.Module):
    """Three rounds of message passing by means over neighbors."""

    def __init__(self, given: int = 128, width: int = 256, made: int = 40) -> None:
        super().__init__()
        sizes = [given, width, width, made]
        self.own = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.others = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for own, others in zip(self.own, self.others, strict=True):
            x = own(F.relu(x)) + others(self._mean(F.relu(x), edges))
        return {"loss": F.cross_entropy(x.float(), labels)}

    def _mean(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        num = torch.zeros(len(x), 1, dtype=x.dtype, device=x.device)
        num = num.index_add(0, target, torch.ones(len(target), 1, dtype=x.dtype, device=x.device)).clamp(min=1)
        return torch.zeros_like(x).index_add(0, target, x[source]) / num


class Cast(nn.Module):
    """A float32 model that enters autocast by itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.float()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(self.parameters()).device.type, torch.bfloat16):
            found = self.inner(*args, **kwargs)
        return found.float() if isinstance(found, Tensor) else found


class Words(nn.Module):
    """An LSTM language model with two layers."""

    def __init__(self, num_words: int = 10_000, width: int = 650, layers: int = 2) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(num_words, width), nn.Dropout(0.5)
        self.layers, self.head = nn.LSTM(width, width, layers, dropout=0.5), nn.Linear(width, num_words)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found, _ = self.layers(self.drop(self.words(ids)))
        return {"loss": F.cross_entropy(self.head(self.drop(found)).flatten(0, 1).float(), labels.flatten())}


class Table(nn.Module):
    """Categorical and numeric columns through three layers with batch norm: a step of dozens of tiny kernels."""

    def __init__(self, names: int = 10, numbers: int = 20, rows: int = 1000, width: int = 256) -> None:
        super().__init__()
        self.names = nn.ModuleList(nn.Embedding(rows, 8) for _ in range(names))
        sizes = [8 * names + numbers, width, width, width]
        self.layers = nn.Sequential(*(layer for a, b in pairwise(sizes) for layer in
                                      (nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.1))))  # fmt: skip
        self.out = nn.Linear(width, 1)

    def forward(self, names: Tensor, numbers: Tensor, labels: Tensor) -> dict[str, Tensor]:
        known = [table(names[:, i]) for i, table in enumerate(self.names)]
        found = self.out(self.layers(torch.cat([*known, numbers], 1)))[:, 0]
        return {"loss": F.binary_cross_entropy_with_logits(found.float(), labels.float())}


class Detector(nn.Module):
    """Boxes by attention of queries to an image, matched to objects greedily on the host."""

    def __init__(self, width: int = 256, queries: int = 100, kinds: int = 91) -> None:
        super().__init__()
        sizes = [3, 64, 128, 256, 512]
        self.image = nn.Sequential(*(layer for a, b in pairwise(sizes) for layer in
                                     (nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(32, b), nn.ReLU())),
                                   nn.Conv2d(512, width, 3, 2, 1))  # fmt: skip
        self.looked = nn.Transformer(width, 8, 3, 3, 4 * width, dropout=0.0, batch_first=True)
        self.queries, self.places = nn.Embedding(queries, width), nn.Parameter(0.02 * torch.randn(400, width))
        self.kind, self.box = nn.Linear(width, kinds + 1), nn.Linear(width, 4)

    def forward(self, image: Tensor, kinds: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        seen = self.image(image).flatten(2).transpose(1, 2)
        asked = self.queries.weight.expand(len(image), -1, -1)
        found = self.looked(seen + self.places[: seen.shape[1]], asked)
        kind, box = self.kind(found).float(), self.box(found).float().sigmoid()
        rows, places = self._matched(kind, box, kinds, boxes)
        wanted = torch.full(kind.shape[:2], kind.shape[2] - 1, device=kind.device)
        wanted[rows, places] = kinds.flatten()
        apart = F.l1_loss(box[rows, places], boxes.flatten(0, 1).float())
        return {"loss": F.cross_entropy(kind.flatten(0, 1), wanted.flatten()) + 5.0 * apart}

    @torch.no_grad()
    def _matched(self, kind: Tensor, box: Tensor, kinds: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """For every image the rows of its objects and their queries, best pairs first, each query once."""
        likely = kind.softmax(-1).gather(2, kinds[:, None, :].expand(-1, kind.shape[1], -1))
        costs = 5.0 * torch.cdist(box, boxes.float(), p=1) - likely
        chosen: list[int] = []
        for each in costs.cpu().tolist():
            taken: dict[int, int] = {}
            for _, query, thing in sorted((c, q, t) for q, row in enumerate(each) for t, c in enumerate(row)):
                if thing not in taken and query not in taken.values():
                    taken[thing] = query
            chosen += [taken[thing] for thing in range(kinds.shape[1])]
        rows = torch.arange(len(kinds), device=kind.device).repeat_interleave(kinds.shape[1])
        return rows, torch.tensor(chosen, device=kind.device)


class Waves(nn.Module):
    """A Fourier neural operator: layers with complex weights over the lowest frequencies, in float32."""

    def __init__(self, width: int = 32, modes: int = 12, layers: int = 4) -> None:
        super().__init__()
        self.modes = modes
        self.rise, self.fall = nn.Conv2d(3, width, 1).float(), nn.Conv2d(width, 1, 1).float()
        self.points = nn.ModuleList(nn.Conv2d(width, width, 1).float() for _ in range(layers))
        size = (layers, 2, width, width, modes, modes)
        self.waves = nn.Parameter(torch.randn(size, dtype=torch.complex64) / width)

    def forward(self, field: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, k = self.rise(field), self.modes
        for point, (low, high) in zip(self.points, self.waves):
            seen = torch.fft.rfft2(x)
            made = torch.zeros_like(seen)
            made[:, :, :k, :k] = torch.einsum("bixy,ioxy->boxy", seen[:, :, :k, :k], low)
            made[:, :, -k:, :k] = torch.einsum("bixy,ioxy->boxy", seen[:, :, -k:, :k], high)
            x = F.gelu(torch.fft.irfft2(made, s=x.shape[-2:]) + point(x))
        return {"loss": F.mse_loss(self.fall(x), labels)}


class Sketches(nn.Module):
    """A variational autoencoder."""

    def __init__(self, width: int = 32, latent: int = 64) -> None:
        super().__init__()
        sizes = [3, width, 2 * width, 4 * width]
        self.down = nn.Sequential(*(layer for a, b in pairwise(sizes) for layer in
                                    (nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2))))  # fmt: skip
        self.about, self.again = nn.Linear(4 * width * 64, 2 * latent), nn.Linear(latent, 4 * width * 64)
        back = [*sizes[:0:-1], 3]
        self.up = nn.Sequential(*(layer for a, b in pairwise(back) for layer in
                                  (nn.BatchNorm2d(a), nn.ReLU(), nn.ConvTranspose2d(a, b, 4, 2, 1))))  # fmt: skip

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        mean, spread = self.about(self.down(image).flatten(1)).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        made = self.up(self.again(drawn).unflatten(1, (-1, 8, 8)))
        apart = 0.5 * (mean.float().square() + spread.float().exp() - 1.0 - spread.float()).sum(-1).mean()
        return {"loss": F.mse_loss(made.float(), image.float()) + 1e-3 * apart}


class _Causal(nn.Module):
    """Two dilated causal convolutions with weight norm by PyTorch's hooks."""

    def __init__(self, given: int, made: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.past, norm = (kernel - 1) * dilation, nn.utils.weight_norm
        self.first = norm(nn.Conv1d(given, made, kernel, padding=self.past, dilation=dilation))
        self.second = norm(nn.Conv1d(made, made, kernel, padding=self.past, dilation=dilation))
        self.skip = nn.Conv1d(given, made, 1) if given != made else nn.Identity()
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(F.relu(self.first(x)[..., : -self.past].contiguous()))
        h = self.drop(F.relu(self.second(h)[..., : -self.past].contiguous()))
        return F.relu(h + self.skip(x))


class Notes(nn.Module):
    """Piano keys predicted by convolutions along time."""

    def __init__(self, keys: int = 88, width: int = 150, levels: int = 4, kernel: int = 5) -> None:
        super().__init__()
        sizes = [keys] + [width] * levels
        self.levels = nn.Sequential(*(_Causal(a, b, kernel, 2**i) for i, (a, b) in enumerate(pairwise(sizes))))
        self.out = nn.Linear(width, keys)

    def forward(self, played: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found = self.out(self.levels(played.transpose(1, 2)).transpose(1, 2))
        return {"loss": F.binary_cross_entropy_with_logits(found, labels)}


class Judge(nn.Module):
    """A GAN discriminator with spectral norm by PyTorch's hooks."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        norm, sizes = nn.utils.spectral_norm, [3, width, 2 * width, 4 * width]
        layers: list[nn.Module] = []
        for a, b in pairwise(sizes):
            layers += [norm(nn.Conv2d(a, b, 3, 1, 1)), nn.LeakyReLU(0.1), norm(nn.Conv2d(b, b, 4, 2, 1)),
                       nn.LeakyReLU(0.1)]  # fmt: skip
        self.layers, self.out = nn.Sequential(*layers), norm(nn.Linear(4 * width * 16, 1))

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        said = self.out(self.layers(image).flatten(1))[:, 0]
        return {"loss": F.relu(1.0 - labels * said).mean()}


class _Heads(nn.Module):
    """Multi-head attention that stores its weights."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.attn = heads, None
        self.linears, self.drop = nn.ModuleList(nn.Linear(width, width) for _ in range(4)), nn.Dropout(0.1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        split = [layer(x).view(len(x), -1, self.heads, x.shape[-1] // self.heads).transpose(1, 2)
                 for layer, x in zip(self.linears, (query, key, value))]  # fmt: skip
        scores = split[0] @ split[1].transpose(-2, -1) / math.sqrt(split[0].shape[-1])
        self.attn = scores.masked_fill(mask == 0, -1e9).softmax(-1)
        joined = (self.drop(self.attn) @ split[2]).transpose(1, 2).flatten(2)
        return self.linears[3](joined)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, looks: bool) -> None:
        super().__init__()
        self.own, self.other = _Heads(width, heads), _Heads(width, heads) if looks else None
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
        self.norms, self.drop = nn.ModuleList(nn.LayerNorm(width) for _ in range(3)), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor, seen: Tensor | None = None, seen_mask: Tensor | None = None) -> Tensor:
        h = self.norms[0](x)
        x = x + self.drop(self.own(h, h, h, mask))
        if self.other is not None:
            x = x + self.drop(self.other(self.norms[1](x), seen, seen, seen_mask))
        return x + self.drop(self.feed(self.norms[2](x)))


class Translator(nn.Module):
    """An encoder-decoder Transformer as in a widely read tutorial."""

    def __init__(self, words: int = 10_000, width: int = 256, heads: int = 8, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(words, width) for _ in range(2))
        self.encoder = nn.ModuleList(_Layer(width, heads, False) for _ in range(layers))
        self.decoder = nn.ModuleList(_Layer(width, heads, True) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = (source != 0)[:, None, None, :]
        length = target.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=target.device).tril() & (target != 0)[:, None, None]
        seen, x = self.words[0](source), self.words[1](target)
        for layer in self.encoder:
            seen = layer(seen, hidden)
        for layer in self.decoder:
            x = layer(x, past, seen, hidden)
        logits = self.out(self.norm(x)).float()
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)}


class Player(nn.Module):
    """A policy and a value over four frames, with PPO's clipped loss."""

    def __init__(self, actions: int = 6) -> None:
        super().__init__()
        self.seen = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(),
                                  nn.Conv2d(64, 64, 3, 1), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 512),
                                  nn.ReLU())  # fmt: skip
        self.policy, self.value = nn.Linear(512, actions), nn.Linear(512, 1)

    def forward(self, frames: Tensor, taken: Tensor, before: Tensor, gain: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.seen(frames.float() / 255.0)
        logs = self.policy(h).log_softmax(-1)
        ratio = (logs.gather(1, taken[:, None])[:, 0] - before).exp()
        ahead = torch.min(ratio * gain, ratio.clamp(0.9, 1.1) * gain).mean()
        value, spread = F.mse_loss(self.value(h)[:, 0], labels), -(logs.exp() * logs).sum(-1).mean()
        return {"loss": 0.5 * value - ahead - 0.01 * spread}
