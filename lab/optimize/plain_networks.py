"""Networks as people write them who use no library of models: other spellings of what the rewrites were written for.

Attention by einsum, rotary embedding by complex numbers, PyTorch's attention module with a mask and its weights asked
for, layers over sequences as convolutions of one tap, detectors and vocoders by hand, norms in float32 around 16 bits,
attention with channels before positions. Each entry builds (model, args,
kwargs) as in ``lab/optimize/zoo.py``, whose table it adds to; ``lab/optimize/models.py --models NAME …`` knows them
by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.optimize.zoo import entry
from lab.workloads import Built, _ids


class Letters(nn.Module):
    """Attention by einsum, with the norm inside and keys scaled by hand."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.reshape(*t.shape[:2], self.heads, -1).permute(0, 2, 1, 3) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        weights = (torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        return self.out(torch.einsum("bhij,bhjd->bhid", weights, v).permute(0, 2, 1, 3).flatten(2))


class Patches(nn.Module):
    """A vision transformer whose patches are cut by a view and whose attention is by letters."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12, image: int = 224, patch: int = 16) -> None:
        super().__init__()
        self.patch, size = patch, 3 * patch * patch
        self.enter = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, width), nn.LayerNorm(width))
        self.places = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width))
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.layers = nn.ModuleList(
            nn.ModuleList([Letters(width, heads), _feed(width)]) for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1000))

    def forward(self, images: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        cut = images.reshape(batch, 3, height // self.patch, self.patch, width // self.patch, self.patch)
        x = self.enter(cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2))
        x = torch.cat([self.first.expand(batch, -1, -1), x], 1) + self.places
        for attend, feed in self.layers:
            x = x + attend(x)
            x = x + feed(x)
        return self.head(x[:, 0])


def _feed(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


@entry("vit-letters-64")
def _() -> Built:
    return Patches(), (torch.randn(64, 3, 224, 224),), {}


class Scaled(nn.Module):
    """RMSNorm by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class ComplexBlock(nn.Module):
    """A decoder's block as Llama was first published."""

    def __init__(self, width: int, heads: int, num_keys: int, inner: int) -> None:
        super().__init__()
        self.size, self.repeats = width // heads, heads // num_keys
        narrow = num_keys * self.size
        self.q, self.k, self.v, self.o = (nn.Linear(width, n, bias=False) for n in (width, narrow, narrow, width))
        self.w1, self.w3 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, width, bias=False)
        self.norm1, self.norm2 = Scaled(width), Scaled(width)

    def turned(self, x: Tensor, table: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * table.view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)

    def forward(self, x: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        y, (batch, length, _) = self.norm1(x), x.shape
        q, k, v = (layer(y).view(batch, length, -1, self.size) for layer in (self.q, self.k, self.v))
        q, k = self.turned(q, table), self.turned(k, table)
        k, v = (torch.repeat_interleave(t, self.repeats, dim=2) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.size) + mask
        mixed = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        x = x + self.o(mixed.transpose(1, 2).contiguous().view(batch, length, -1))
        y = self.norm2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class ComplexDecoder(nn.Module):
    def __init__(self, width: int = 2048, layers: int = 8, heads: int = 16, words: int = 32000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(ComplexBlock(width, heads, heads // 4, 5632) for _ in range(layers))
        self.norm, self.head = Scaled(width), nn.Linear(width, words, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(2048.0), 1e4 ** -(torch.arange(0, size, 2).float() / size))
        self.table = torch.polar(torch.ones_like(angles, dtype=torch.float32), angles.float())

    def forward(self, ids: Tensor) -> Tensor:
        x, length = self.words(ids), ids.shape[1]
        table = self.table.to(ids.device)[:length]
        mask = torch.triu(torch.full((length, length), float("-inf"), device=ids.device), diagonal=1).type_as(x)
        for block in self.blocks:
            x = block(x, table, mask)
        return self.head(self.norm(x)).float()


@entry("llama-complex-8l-2x1024")
def _() -> Built:
    return ComplexDecoder(), (_ids(32000, 2, 1024),), {}


class Items(nn.Module):
    """SASRec: PyTorch's attention module behind a mask of booleans, layers as convolutions of one tap."""

    def __init__(self, items: int = 100_000, width: int = 256, length: int = 200, layers: int = 4) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(items, width, padding_idx=0), nn.Embedding(length, width)
        self.attends = nn.ModuleList(nn.MultiheadAttention(width, 4) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-8) for _ in range(2 * layers))
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, width, 1)) for _ in range(layers)
        )
        self.last = nn.LayerNorm(width, eps=1e-8)

    def forward(self, history: Tensor, asked: Tensor) -> Tensor:
        length = history.shape[1]
        x = self.items(history) * self.items.embedding_dim**0.5
        x = x + self.places(torch.arange(length, device=history.device))
        kept = (history != 0).unsqueeze(-1)
        hidden = ~torch.tril(torch.ones(length, length, dtype=torch.bool, device=history.device))
        x = x * kept
        for i, (attend, feed) in enumerate(zip(self.attends, self.feeds, strict=True)):
            x = x.transpose(0, 1)
            y = self.norms[2 * i](x)
            x = (y + attend(y, x, x, attn_mask=hidden)[0]).transpose(0, 1)
            y = self.norms[2 * i + 1](x)
            x = (y + feed(y.transpose(1, 2)).transpose(1, 2)) * kept
        return (self.last(x)[:, -1:] * self.items(asked)).sum(-1)


@entry("sasrec-256x200")
def _() -> Built:
    return Items(), (_ids(100_000, 256, 200), _ids(100_000, 256, 101)), {}


class ConformerBlock(nn.Module):
    def __init__(self, width: int, heads: int, taps: int = 31) -> None:
        super().__init__()
        self.feeds = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Dropout(0.1),
                          nn.Linear(4 * width, width), nn.Dropout(0.1)) for _ in range(2)
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.enter, self.leave = nn.Conv1d(width, 2 * width, 1), nn.Conv1d(width, width, 1)
        self.along = nn.Conv1d(width, width, taps, padding=taps // 2, groups=width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.feeds[0](x)
        y = self.norms[0](x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        y = F.glu(self.enter(self.norms[1](x).transpose(1, 2)), dim=1)
        x = x + self.leave(F.silu(self.batch_norm(self.along(y)))).transpose(1, 2)
        return self.norms[2](x + 0.5 * self.feeds[1](x))


@entry("conformer-16x500")
def _() -> Built:
    return nn.Sequential(*(ConformerBlock(512, 8) for _ in range(12))), (torch.randn(16, 500, 512),), {}


class Step(nn.Module):
    """Convolution, batch norm and SiLU, as detectors stack them."""

    def __init__(self, inside: int, outside: int, taps: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, taps, stride, taps // 2, bias=False)
        self.norm, self.act = nn.BatchNorm2d(outside), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class Split(nn.Module):
    """Half of the channels through a few steps, everything on the way kept and joined."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.enter, self.leave = Step(width, width), Step(width // 2 * (2 + num), width)
        half = width // 2
        self.steps = nn.ModuleList(nn.Sequential(Step(half, half, 3), Step(half, half, 3)) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        kept = list(self.enter(x).chunk(2, 1))
        for step in self.steps:
            kept.append(kept[-1] + step(kept[-1]))
        return self.leave(torch.cat(kept, 1))


class Pooled(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave, self.pool = Step(width, width // 2), Step(2 * width, width), nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.enter(x)]
        kept.extend(self.pool(kept[-1]) for _ in range(3))
        return self.leave(torch.cat(kept, 1))


class OneLook(nn.Module):
    """A detector of one look: three levels down, two up and down again, heads of boxes and classes."""

    def __init__(self, widths: Sequence[int] = (64, 128, 256, 512), classes: int = 80) -> None:
        super().__init__()
        a, b, c, d = widths
        self.first = nn.Sequential(Step(3, a // 2, 3, 2), Step(a // 2, a, 3, 2), Split(a, 1))
        self.down = nn.ModuleList([nn.Sequential(Step(a, b, 3, 2), Split(b, 2)),
                                   nn.Sequential(Step(b, c, 3, 2), Split(c, 2)),
                                   nn.Sequential(Step(c, d, 3, 2), Split(d, 1), Pooled(d))])  # fmt: skip
        self.up = nn.ModuleList(
            [nn.Sequential(Step(d + c, c), Split(c, 1)), nn.Sequential(Step(c + b, b), Split(b, 1))]
        )
        self.heads = nn.ModuleList(
            nn.Sequential(Step(width, 64, 3), Step(64, 64, 3), nn.Conv2d(64, 64 + classes, 1)) for width in (b, c, d)
        )
        self.places = nn.Conv2d(16, 1, 1, bias=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        kept = [self.first(images)]
        for step in self.down:
            kept.append(step(kept[-1]))
        _, third, fourth, fifth = kept
        fourth = self.up[0](torch.cat([F.interpolate(fifth, scale_factor=2.0), fourth], 1))
        third = self.up[1](torch.cat([F.interpolate(fourth, scale_factor=2.0), third], 1))
        found = torch.cat([h(x).flatten(2) for h, x in zip(self.heads, (third, fourth, fifth), strict=True)], 2)
        boxes, classes = found[:, :64], found[:, 64:]
        spread = boxes.view(boxes.shape[0], 4, 16, -1).transpose(1, 2).softmax(1)
        return self.places(spread).squeeze(1), classes.sigmoid()


@entry("yolo-16x640")
def _() -> Built:
    return OneLook(), (torch.randn(16, 3, 640, 640),), {}


def _twice(inside: int, outside: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (inside, outside):
        layers += [nn.Conv2d(size, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Segmenter(nn.Module):
    """A U-Net of plain convolutions, halved by pooling and doubled by transposed convolutions."""

    def __init__(self, base: int = 64) -> None:
        super().__init__()
        sizes = [base << i for i in range(5)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * b, b, 2, 2) for b in reversed(sizes[:-1]))
        self.join = nn.ModuleList(_twice(2 * b, b) for b in reversed(sizes[:-1]))
        self.last = nn.Conv2d(base, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, step in enumerate(self.down):
            x = step(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for up, join, other in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = join(torch.cat([other, up(x)], 1))
        return self.last(x)


@entry("unet-medical-8x256")
def _() -> Built:
    return Segmenter(), (torch.randn(8, 3, 256, 256),), {}


class Vocoder(nn.Module):
    """HiFi-GAN: transposed convolutions and dilated ones along sound."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(80, width, 7, padding=3), nn.Conv1d(width // 16, 1, 7, padding=3)
        self.ups, self.sums = nn.ModuleList(), nn.ModuleList()
        for i, (stride, taps) in enumerate(((8, 16), (8, 16), (2, 4), (2, 4))):
            at = width >> (i + 1)
            self.ups.append(nn.ConvTranspose1d(2 * at, at, taps, stride, padding=(taps - stride) // 2))
            self.sums.append(nn.ModuleList(Dilated(at, taps) for taps in (3, 7, 11)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, sums in zip(self.ups, self.sums, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            x = sum(each(x) for each in sums) / len(sums)
        return torch.tanh(self.last(F.leaky_relu(x)))


class Dilated(nn.Module):
    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        pads = [(d * (taps - 1) // 2, d) for d in (1, 3, 5)]
        self.first = nn.ModuleList(nn.Conv1d(width, width, taps, padding=pad, dilation=d) for pad, d in pads)
        self.second = nn.ModuleList(nn.Conv1d(width, width, taps, padding=taps // 2) for _ in pads)

    def forward(self, x: Tensor) -> Tensor:
        for a, b in zip(self.first, self.second, strict=True):
            x = x + b(F.leaky_relu(a(F.leaky_relu(x, 0.1)), 0.1))
        return x


@entry("hifigan-8x200")
def _() -> Built:
    return Vocoder(), (torch.randn(8, 80, 200),), {}


class Wide(nn.GroupNorm):
    """Groups normed in float32, whatever the type of the image, as diffusion's first networks have it."""

    def forward(self, x: Tensor) -> Tensor:
        found = F.group_norm(x.float(), self.num_groups, self.weight.float(), self.bias.float(), self.eps)
        return found.type(x.dtype)


class Looking(nn.Module):
    """Attention over pixels with channels before positions, by letters, the scale shared by both sides."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, Wide(32, width)
        self.qkv, self.out = nn.Conv1d(width, 3 * width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, width, *sizes = x.shape
        x = x.reshape(batch, width, -1)
        qkv = self.qkv(self.norm(x)).reshape(batch * self.heads, 3 * width // self.heads, -1)
        q, k, v = qkv.split(width // self.heads, dim=1)
        scale = (width // self.heads) ** -0.25
        weights = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weights = torch.softmax(weights.float(), dim=-1).type(weights.dtype)
        mixed = torch.einsum("bts,bcs->bct", weights, v).reshape(batch, -1, x.shape[2])
        return (x + self.out(mixed)).reshape(batch, width, *sizes)


class Timed(nn.Module):
    """Two convolutions whose second norm is scaled and shifted by the time."""

    def __init__(self, width: int, out: int, times: int) -> None:
        super().__init__()
        self.first = nn.Sequential(Wide(32, width), nn.SiLU(), nn.Conv2d(width, out, 3, padding=1))
        self.times, self.norm = nn.Sequential(nn.SiLU(), nn.Linear(times, 2 * out)), Wide(32, out)
        self.last = nn.Sequential(nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Identity() if width == out else nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y, shift = self.first(x), self.times(time)[..., None, None]
        scale, shift = shift.chunk(2, dim=1)
        return self.skip(x) + self.last(self.norm(y) * (1 + scale) + shift)


class Denoiser(nn.Module):
    """A diffusion network on pixels: three sizes, attention at the smaller two."""

    def __init__(self, width: int = 192, times: int = 768) -> None:
        super().__init__()
        widths, self.width = (width, 2 * width, 3 * width), width
        self.times = nn.Sequential(nn.Linear(width, times), nn.SiLU(), nn.Linear(times, times))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList()
        for before, after in zip((width, *widths[:-1]), widths, strict=True):
            last = nn.Conv2d(after, after, 3, 2, 1) if after != widths[-1] else nn.Identity()
            looks = Looking(after, after // 64) if after != width else nn.Identity()
            self.down.append(nn.ModuleList([Timed(before, after, times), looks, Timed(after, after, times), last]))
        self.middle = nn.ModuleList([Timed(widths[-1], widths[-1], times), Looking(widths[-1], widths[-1] // 64)])
        self.up = nn.ModuleList()
        for before, after in ((2 * widths[2], widths[1]), (2 * widths[1], widths[0]), (2 * widths[0], widths[0])):
            looks = Looking(after, after // 64) if after != width else nn.Identity()
            self.up.append(nn.ModuleList([Timed(before, after, times), looks]))
        self.end = nn.Sequential(Wide(32, width), nn.SiLU(), nn.Conv2d(width, 6, 3, padding=1))

    def forward(self, x: Tensor, steps: Tensor) -> Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(1e4) * torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = steps[:, None].float() * rates[None]
        time = self.times(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1).type(x.dtype))
        x, kept = self.first(x), []
        for first, looks, second, smaller in self.down:
            x = second(looks(first(x, time)), time)
            kept.append(x)
            x = smaller(x)
        first, looks = self.middle
        x = looks(first(x, time))
        for first, looks in self.up:
            beside = kept.pop()
            if x.shape[2] != beside.shape[2]:
                x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = looks(first(torch.cat([x, beside], dim=1), time))
        return self.end(x)


@entry("denoiser-16x64")
def _() -> Built:
    return Denoiser(), (torch.randn(16, 3, 64, 64), torch.randint(0, 1000, (16,))), {}


class Sigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Careful(nn.LayerNorm):
    """Rows normed in float32, as the first code that paired images and texts has it."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.type(torch.float32), self.normalized_shape, weight, bias, self.eps).type(x.dtype)


class Paired(nn.Module):
    """A block with positions first, PyTorch's attention module and a mask that moves with its input."""

    def __init__(self, width: int, heads: int, mask: Tensor | None) -> None:
        super().__init__()
        self.attention, self.mask = nn.MultiheadAttention(width, heads), mask
        self.norm1, self.norm2 = Careful(width), Careful(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), Sigmoid(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = None if self.mask is None else self.mask.to(dtype=x.dtype, device=x.device)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.feed(self.norm2(x))


class Pairing(nn.Module):
    """Images and texts, each by a transformer, and how well each pair fits."""

    def __init__(self, width: int = 768, words: int = 512, layers: int = 12, shared: int = 512) -> None:
        super().__init__()
        self.cut, self.places = nn.Conv2d(3, width, 32, 32, bias=False), nn.Parameter(torch.randn(50, width) * 0.02)
        self.first = nn.Parameter(torch.randn(width) * 0.02)
        self.looking = nn.Sequential(Careful(width), *(Paired(width, width // 64, None) for _ in range(layers)))
        self.looked, self.image = Careful(width), nn.Parameter(torch.randn(width, shared) * width**-0.5)
        mask = torch.empty(77, 77, dtype=torch.float32).fill_(float("-inf")).triu_(1)
        self.words, self.order = nn.Embedding(49408, words), nn.Parameter(torch.randn(77, words) * 0.02)
        self.reading = nn.Sequential(*(Paired(words, words // 64, mask) for _ in range(layers)))
        self.read, self.text = Careful(words), nn.Parameter(torch.randn(words, shared) * words**-0.5)
        self.sharpness = nn.Parameter(torch.tensor(2.6))

    def forward(self, images: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.cut(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.first.to(x.dtype) + torch.zeros_like(x[:, :1]), x], dim=1) + self.places
        x = self.looked(self.looking(x.permute(1, 0, 2)).permute(1, 0, 2)[:, 0]) @ self.image
        y = self.read(self.reading((self.words(ids) + self.order).permute(1, 0, 2)).permute(1, 0, 2))
        y = y[torch.arange(y.shape[0], device=y.device), ids.argmax(dim=-1)] @ self.text
        x, y = x / x.norm(dim=-1, keepdim=True), y / y.norm(dim=-1, keepdim=True)
        logits = self.sharpness.exp() * x @ y.t()
        return logits, logits.t()


@entry("pairing-64")
def _() -> Built:
    return Pairing(), (torch.randn(64, 3, 224, 224), _ids(49000, 64, 77)), {}
