"""Modules as people write them, each with the rewrite that must find it; and near misses that none may find."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, H, K, L, D = 2, 4, 2, 12, 16
WIDTH = 48


@dataclass(frozen=True)
class Spelling:
    name: str
    rewrite: str
    make: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
    matches: int = 1
    training: bool = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


SPELLINGS: list[Spelling] = []
MISSES: list[Spelling] = []


class Of(nn.Module):
    """A function of inputs and parameters as a module."""

    def __init__(self, function: Callable[..., Any], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def spelled(rewrite: str, matches: int = 1, training: bool = True, **more: Any) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        SPELLINGS.append(Spelling(make.__name__, rewrite, make, matches, training, **more))
        return make

    return register


def missed(rewrite: str) -> Callable[[Any], Any]:
    def register(make: Any) -> Any:
        MISSES.append(Spelling(make.__name__, rewrite, make, 0))
        return make

    return register


def _x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 7, WIDTH)))


# norms --------------------------------------------------------------------------------------------------------------


def _rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


@spelled("norm")
def llama_rms_norm() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        return self.weight * x.to(dtype)

    return Of(forward, weight=torch.rand(WIDTH) + 0.5), (_x(),)


@spelled("norm")
def gemma_rms_norm_adds_one_to_its_weight() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (_rms(x.float()) * (1.0 + self.weight.float())).type_as(x)

    return Of(forward, weight=torch.randn(WIDTH) * 0.1), (_x(),)


@spelled("norm")
def t5_rms_norm() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))

    return Of(forward, weight=torch.rand(WIDTH) + 0.5), (_x(),)


@spelled("norm")
def rms_norm_divided_by_a_root_of_squares() -> Any:
    return Of(lambda self, x: x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-5) * self.weight,
              weight=torch.rand(WIDTH)), (_x(),)  # fmt: skip


@spelled("norm")
def rms_norm_without_weight_as_a_power() -> Any:
    return Of(lambda self, x: torch.square(x).mean(-1, True).add(1e-5).pow(-0.5) * x), (_x(),)


@spelled("norm")
def layer_norm_by_hand() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        var = ((x - mean) ** 2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(var + 1e-5) * self.weight + self.bias

    return Of(forward, weight=torch.rand(WIDTH), bias=torch.randn(WIDTH)), (_x(),)


@spelled("norm")
def layer_norm_by_variance() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        u, s = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return self.bias + self.weight * ((x - u) * torch.rsqrt(s + 1e-12))

    return Of(forward, weight=torch.rand(WIDTH), bias=torch.randn(WIDTH)), (_x(),)


@spelled("norm-call")
def called_layer_norm() -> Any:
    return nn.LayerNorm(WIDTH, eps=1e-6), (_x(),)


@spelled("norm-call")
def called_rms_norm_with_the_default_eps() -> Any:
    return nn.RMSNorm(WIDTH), (_x(),)


@spelled("norm-residual", matches=1)
def a_sum_before_a_layer_norm_is_used_again() -> Any:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = x + y
        return h + F.layer_norm(h, (WIDTH,), self.weight, self.bias)

    return Of(forward, weight=torch.rand(WIDTH), bias=torch.randn(WIDTH)), (_x(), _x())


@missed("norm")
def eps_outside_the_root() -> Any:
    return Of(lambda self, x: x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)), (_x(),)


@missed("norm")
def variance_divided_by_one_less() -> Any:
    return Of(lambda self, x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5)), (_x(),)


@missed("norm")
def squares_of_another_tensor() -> Any:
    return Of(lambda self, x, y: x * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)), (_x(), _x())


@missed("norm")
def mean_over_another_dim() -> Any:
    return Of(lambda self, x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)), (_x(),)


@missed("norm")
def input_written_between_the_squares_and_the_product() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 1.0
        scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        y[..., 0] = 0
        return y * scale

    return Of(forward), (_x(),)


@missed("norm-call")
def a_norm_over_two_dims() -> Any:
    return nn.LayerNorm((7, WIDTH)), (_x(),)


@missed("norm-residual")
def a_sum_that_is_broadcast() -> Any:
    return Of(lambda self, x, y: F.layer_norm(x + y, (WIDTH,))), (_x(), _x(WIDTH))


# activations and gates ------------------------------------------------------------------------------------------------


@spelled("activation")
def gpt2_gelu() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    return Of(forward), (_x(),)


@spelled("activation")
def fast_gelu_with_a_factored_cube() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))

    return Of(forward), (_x(),)


@spelled("activation")
def gelu_by_the_error_function() -> Any:
    return Of(lambda self, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))), (_x(),)


@spelled("activation")
def swish_by_hand() -> Any:
    return Of(lambda self, x: x * torch.sigmoid(x)), (_x(),)


@spelled("gate")
def silu_gate() -> Any:
    return Of(lambda self, a, b: F.silu(a) * b), (_x(), _x())


@spelled("gate")
def silu_gate_of_a_chunked_product() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.weight).chunk(2, dim=-1)
        return up * F.silu(gate)

    return Of(forward, weight=torch.randn(64, WIDTH) * 0.2), (_x(),)


@spelled("gate")
def gelu_tanh_gate() -> Any:
    return Of(lambda self, a, b: b * F.gelu(a, approximate="tanh")), (_x(), _x())


@spelled("gate")
def gelu_gate() -> Any:
    return Of(lambda self, a, b: F.gelu(a) * b), (_x(), _x())


@spelled("gate")
def squared_relu() -> Any:
    return Of(lambda self, a: F.relu(a).square()), (_x(),)


@missed("gate")
def a_gate_that_is_broadcast() -> Any:
    return Of(lambda self, a, b: F.silu(a) * b), (_x(), _x(1, 1, WIDTH))


@missed("activation")
def quick_gelu_has_another_slope() -> Any:
    return Of(lambda self, x: x * torch.sigmoid(1.702 * x)), (_x(),)


@missed("activation")
def gelu_with_a_wrong_constant() -> Any:
    return Of(lambda self, x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.05 * x**3)))), (_x(),)


# rotary ---------------------------------------------------------------------------------------------------------------


def _angles(positions: int = L, half: int = D // 2) -> Tensor:
    return torch.arange(positions).float()[None, :, None] * 10000.0 ** (-torch.arange(half).float() / half)


def _rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _heads(*heads: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(B, h, L, D) for h in heads)


@spelled("rotary")
def llama_rotary() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos().unsqueeze(1), (emb.sin() * 1.0).unsqueeze(1)
        return (q * cos) + (_rotate_half(q) * sin), (k * cos) + (_rotate_half(k) * sin)

    return Of(forward), (*_heads(H, K), _angles())


@spelled("rotary")
def chunked_rotary_with_heads_behind_positions() -> Any:
    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)

    def forward(self: Any, q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        emb = torch.cat([freqs, freqs], dim=-1)
        cos, sin = emb.cos()[:, :, None, :], emb.sin()[:, :, None, :]
        return rotate(q) * sin + q * cos, rotate(k) * sin + k * cos

    q, k = (torch.randn(B, L, h, D) for h in (H, K))
    return Of(forward), (q, k, _angles())


@spelled("rotary")
def gptj_rotary_turns_neighbors() -> Any:
    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x[:, :, :, ::2], x[:, :, :, 1::2]
        return torch.stack((-x2, x1), dim=-1).flatten(-2)

    def forward(self: Any, q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        cos = torch.repeat_interleave(freqs.cos(), 2, -1).unsqueeze(1)
        sin = torch.repeat_interleave(freqs.sin(), 2, -1).unsqueeze(1)
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

    return Of(forward), (*_heads(H, K), _angles())


def _turned_wide(narrows: bool) -> Any:
    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = (x.float() * cos) + (_rotate_half(x.float()) * sin)
        return wide.to(x.dtype) if narrows else wide

    def forward(self: Any, q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos().unsqueeze(1), emb.sin().unsqueeze(1)
        return turned(q.bfloat16(), cos, sin), turned(k.bfloat16(), cos, sin)

    return Of(forward), (*_heads(H, K), _angles())


@spelled("rotary", training=False)
def rotary_of_halves_in_float32() -> Any:
    """ModernBERT."""
    return _turned_wide(narrows=True)


@spelled("rotary", training=False)
def rotary_by_a_table_in_float32() -> Any:
    """OLMo 2: products with the table are float32 by promotion."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return ((x * cos) + (_rotate_half(x) * sin)).to(x.dtype)

    def forward(self: Any, q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos().unsqueeze(1), emb.sin().unsqueeze(1)
        return turned(q.bfloat16(), cos, sin), turned(k.bfloat16(), cos, sin)

    return Of(forward), (*_heads(H, K), _angles())


@missed("rotary")
def rotary_that_stays_in_float32() -> Any:
    return _turned_wide(narrows=False)


@missed("rotary")
def a_table_that_may_not_repeat() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin

    return Of(forward), (*_heads(H, K), torch.randn(1, L, D), torch.randn(1, L, D))


@missed("rotary")
def halves_turned_the_other_way() -> Any:
    def rotate(x: Tensor) -> Tensor:
        return torch.cat((x[..., D // 2 :], -x[..., : D // 2]), dim=-1)

    def forward(self: Any, q: Tensor, k: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos().unsqueeze(1), emb.sin().unsqueeze(1)
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

    return Of(forward), (*_heads(H, K), _angles())


# attention ------------------------------------------------------------------------------------------------------------


def _qkv() -> tuple[Tensor, ...]:
    return _heads(H, H, H)


@spelled("attention")
def attention_scaled_after_the_product() -> Any:
    return Of(lambda self, q, k, v: torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(D), dim=-1) @ v), _qkv()


@spelled("attention")
def attention_scaled_before_the_product() -> Any:
    return Of(
        lambda self, q, k, v: F.softmax((q * D**-0.5) @ k.mT, dim=-1, dtype=torch.float32).to(q.dtype) @ v
    ), _qkv()


@spelled("attention")
def attention_over_merged_heads() -> Any:
    q, k, v = (torch.randn(B * H, L, D) for _ in range(3))
    return Of(lambda self, q, k, v: torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)), (q, k, v)


@spelled("attention")
def attention_with_keys_that_lie_turned() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(torch.matmul(q, k.permute(0, 1, 3, 2)).softmax(dim=-1), 0.1, False) @ v

    return Of(forward), _qkv()


def _causal(build: Callable[[Tensor], Tensor], fill: bool = False) -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * D**-0.5
        return torch.softmax(build(scores) if fill else scores + build(scores), dim=-1) @ v

    return Of(forward), _qkv()


@spelled("attention")
def causal_by_triu_of_minus_infinity() -> Any:
    return _causal(lambda s: torch.triu(torch.full((L, L), float("-inf"), dtype=s.dtype), diagonal=1).to(s.device))


@spelled("attention")
def causal_by_masked_fill_of_tril() -> Any:
    return _causal(lambda s: s.masked_fill(torch.tril(torch.ones(L, L, device=s.device)) == 0, float("-inf")), True)


@spelled("attention")
def causal_by_where_with_the_smallest_number() -> Any:
    def build(s: Tensor) -> Tensor:
        seen = torch.ones((L, L), dtype=torch.bool, device=s.device).tril().view(1, 1, L, L)
        return torch.where(seen, s, torch.full([], torch.finfo(s.dtype).min, dtype=s.dtype, device=s.device))

    return _causal(build, True)


@spelled("attention")
def causal_by_comparing_positions() -> Any:
    def build(s: Tensor) -> Tensor:
        i = torch.arange(L, device=s.device)
        return torch.zeros(L, L, dtype=s.dtype, device=s.device).masked_fill(i[None, :] > i[:, None], -1e9)

    return _causal(build)


class BufferedCausal(nn.Module):
    """nanoGPT's way: a lower triangle in a buffer, sliced to the length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, : q.size(2), : q.size(2)] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ v


@spelled("attention")
def causal_by_a_buffer() -> Any:
    return BufferedCausal(), _qkv()


@spelled("attention")
def padding_as_bert_writes_it() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        extended = (1.0 - keep[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
        return torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D) + extended, dim=-1) @ v

    keep = torch.ones(B, L, dtype=torch.long)
    keep[1, 7:] = 0
    return Of(forward), (*_qkv(), keep)


@spelled("attention")
def padding_by_a_boolean() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, hide: Tensor) -> Tensor:
        return (q @ k.mT * 0.3).masked_fill(hide[:, None, None, :], float("-inf")).softmax(-1) @ v

    hide = torch.zeros(B, L, dtype=torch.bool)
    hide[1, 7:] = True
    return Of(forward), (*_qkv(), hide)


@spelled("attention")
def attention_with_a_position_bias() -> Any:
    return Of(lambda self, q, k, v, bias: torch.softmax(q @ k.mT + bias, -1) @ v), (*_qkv(), torch.randn(1, H, L, L))


class Modular(nn.Module):
    """PyTorch's attention module, of one tensor or of two."""

    def __init__(self, read: bool = False, **given: Any) -> None:
        super().__init__()
        self.attention, self.read = nn.MultiheadAttention(H * D, H, **given), read

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Any:
        mixed, weights = self.attention(x, *(2 * (x if y is None else y,)), attn_mask=mask)
        return (mixed, weights) if self.read else mixed + x


@spelled("multi-head", training=False)
def module_of_one_tensor() -> Any:
    return Modular(), (torch.randn(L, B, H * D),)


@spelled("multi-head", training=False)
def module_with_the_batch_first_and_no_bias() -> Any:
    return Modular(batch_first=True, bias=False), (torch.randn(B, L, H * D),)


@spelled("multi-head", training=False)
def module_of_two_tensors() -> Any:
    return Modular(), (torch.randn(L, B, H * D), torch.randn(L + 3, B, H * D))


class Causal(nn.Module):
    """A module that makes its mask itself, and hides keys where told; its weights are asked for or not."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention, self.need_weights = nn.MultiheadAttention(H * D, H, batch_first=True), need_weights

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        mask = torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)
        given = {"attn_mask": mask, "key_padding_mask": padding, "need_weights": self.need_weights}
        return self.attention(x, x, x, **given)[0]


@spelled("multi-head", training=False)
def module_without_weights_and_a_mask_from_outside() -> Any:
    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]

    module = Of(forward)
    module.attention = nn.MultiheadAttention(H * D, H)
    return module, (torch.randn(L, B, H * D), torch.randn(B * H, L, L))


@spelled("multi-head", training=False)
def module_without_weights_that_hides_keys() -> Any:
    padding = torch.arange(L).expand(B, L) >= torch.tensor([[L], [9]])
    return Causal(False), (torch.randn(B, L, H * D), padding)


@spelled("multi-head", training=False)
def module_with_keys_of_another_width() -> Any:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.attention(x, y, y)[0]

    module = Of(forward)
    module.attention = nn.MultiheadAttention(H * D, H, kdim=24, vdim=24)
    return module, (torch.randn(L, B, H * D), torch.randn(L + 3, B, 24))


@missed("multi-head")
def module_with_weights_that_hides_keys() -> Any:
    padding = torch.arange(L).expand(B, L) >= torch.tensor([[L], [9]])
    return Causal(True), (torch.randn(B, L, H * D), padding)


@spelled("attention", training=False)
def scores_with_a_bias_and_a_mask_behind_it() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        places = torch.arange(L, device=q.device)
        bias = (slopes[:, None, None] * (places[None, None, :] - places[None, :, None])).to(q.dtype)
        hidden = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
        return (q @ k.mT * 0.25 + bias).masked_fill(hidden, float("-inf")).softmax(-1) @ v

    return Of(forward), (*_qkv(), torch.rand(H))


@spelled("attention", training=False)
def scores_put_in_place_of_by_tensors_of_their_sizes() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, linked: Tensor) -> Tensor:
        scores = q @ k.mT / 4.0
        return torch.where(linked[:, None] > 0, scores, -9e15 * torch.ones_like(scores)).softmax(-1) @ v

    return Of(forward), (*_qkv(), torch.rand(B, L, L) + torch.eye(L) - 0.3)


@missed("attention")
def a_bias_behind_the_mask_of_finite_scores() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        hidden = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
        return ((q @ k.mT).masked_fill(hidden, -1e9) + bias).softmax(-1) @ v

    return Of(forward), (*_qkv(), torch.randn(L, L))


def _bloom(finish: Callable[[Tensor], Tensor] | None = None, scale: Any = 0.25, beta: float = 1.0) -> Any:
    """Heads merged with the batch for products, with a bias in the first one, and apart for the softmax."""

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (x.reshape(B * H, -1, D) for x in (q, k, v))
        scores = bias.baddbmm(batch1=q, batch2=k.transpose(-1, -2), beta=beta, alpha=scale).view(B, H, L, -1)
        weights = (scores + mask).softmax(-1) if finish is None else finish(scores + mask)
        mixed = torch.bmm(F.dropout(weights.to(q.dtype), 0.1, False).view(B * H, L, -1), v)
        return mixed.view(B, H, L, D).permute(0, 2, 1, 3).reshape(B, L, H * D)

    mask = torch.full((L, L), torch.finfo(torch.bfloat16).min).triu(1).expand(B, 1, L, L).clone()
    mask[1, :, :3] = torch.finfo(torch.bfloat16).min  # rows that see nothing get the mean of all values
    return Of(forward), (*_qkv(), torch.randn(B * H, 1, L), mask)


@spelled("attention", training=False, dtypes=(torch.float32, torch.bfloat16))
def heads_merged_for_a_product_with_a_bias() -> Any:
    return _bloom()


@spelled("attention", training=False)
def heads_merged_for_a_product_with_a_scaled_bias_and_a_softmax_in_float32() -> Any:
    return _bloom(lambda scores: scores.softmax(dim=-1, dtype=torch.float32), 0.3, 0.5)


def _two_layers(written: bool) -> Any:
    layer, args = _bloom()

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        mask = mask * 1.0
        first = layer(q, k, v, bias, mask)
        if written:
            mask.mul_(0.0)
        return first + layer(k, q, v, bias, mask)

    return Of(forward), args


@spelled("attention", matches=2, training=False)
def heads_merged_in_two_layers_that_share_a_bias() -> Any:
    return _two_layers(False)


@spelled("attention", training=False)
def heads_merged_in_two_layers_between_which_the_mask_is_written() -> Any:
    return _two_layers(True)  # the first alone, which shares nothing


@missed("attention")
def heads_merged_and_a_softmax_over_rows() -> Any:
    return _bloom(lambda scores: scores.softmax(-2))


@missed("attention")
def heads_merged_and_a_scale_behind_the_mask() -> Any:
    return _bloom(lambda scores: (scores * 0.5).softmax(-1))


@missed("attention")
def heads_merged_with_a_bias_that_is_left_out() -> Any:
    return _bloom(beta=0.0)


@missed("attention")
def heads_merged_in_float16() -> Any:
    model, args = _bloom()
    return model, tuple(x.clamp_min(-65504).half() for x in args)


@missed("attention")
def heads_taken_apart_another_way() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        scores = torch.baddbmm(bias, q, k.mT).view(1, B * H * L // 4, 4, L)
        return torch.bmm(scores.softmax(-1).view(B * H, L, L), v)

    return Of(forward), (*(torch.randn(B * H, L, D) for _ in range(3)), torch.randn(B * H, L, L))


def _wide_scores(q: Tensor, k: Tensor, v: Tensor, wide: torch.dtype, scale: Any = 4.0) -> Tensor:
    """GPT-J's way: queries and keys in float32, values not."""
    scores = torch.matmul(q.to(wide), k.to(wide).transpose(-1, -2)) / scale
    hidden = torch.full((L, L), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device).triu(1)
    return F.softmax(scores + hidden, dim=-1).to(v.dtype) @ v


@spelled("attention", training=False, dtypes=(torch.bfloat16, torch.float16, torch.float32))
def scores_in_float32_of_narrow_values() -> Any:
    return Of(lambda self, q, k, v: _wide_scores(q, k, v, torch.float32)), _qkv()


@missed("attention")
def scores_in_float32_of_which_keys_were_wider() -> Any:
    q, k, v = _qkv()
    return Of(lambda self, q, k, v: _wide_scores(q, k, v, torch.float32)), (q.bfloat16(), k, v.bfloat16())


@missed("attention")
def scores_in_float64_of_narrow_values() -> Any:
    return Of(lambda self, q, k, v: _wide_scores(q, k, v, torch.float64)), tuple(x.bfloat16() for x in _qkv())


@missed("attention")
def scores_in_float32_divided_by_a_tensor_from_outside() -> Any:
    given = (*(x.bfloat16() for x in _qkv()), torch.tensor(4.0))
    return Of(lambda self, q, k, v, scale: _wide_scores(q, k, v, torch.float32, scale)), given


def _scaled_behind(hidden: float, diagonal: int = 1, scale: float = 4.0) -> Any:
    """CodeGen's way: a mask is added to scores before both are divided."""

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((L, L), hidden, dtype=q.dtype, device=q.device).triu(diagonal)
        scores = torch.matmul(q.float(), k.float().transpose(-1, -2))
        return nn.Softmax(dim=-1)((scores + mask) / scale).to(v.dtype) @ v

    return Of(forward), _qkv()


@spelled("attention", training=False, dtypes=(torch.bfloat16, torch.float32))
def a_mask_before_the_scale() -> Any:
    return _scaled_behind(torch.finfo(torch.bfloat16).min)


@missed("attention")
def a_mask_that_hides_no_more_once_scaled() -> Any:
    return _scaled_behind(-2e4)


@missed("attention")
def a_bias_before_the_scale() -> Any:
    return _scaled_behind(-3.0)


@missed("attention")
def a_mask_before_the_scale_that_hides_a_whole_row() -> Any:
    return _scaled_behind(torch.finfo(torch.bfloat16).min, 0)


@missed("attention")
def a_mask_before_a_scale_that_turns_it_over() -> Any:
    return _scaled_behind(torch.finfo(torch.bfloat16).min, 1, -4.0)


@missed("attention")
def scores_that_are_read_besides() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        return torch.where(scores > 0, scores, torch.full_like(scores, -9e15)).softmax(-1) @ v

    return Of(forward), _qkv()


@spelled("einsum", matches=2)
def attention_by_letters() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.einsum("b h i d, b h j d -> b h i j", q, k).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", weights, v)

    return Of(forward), _qkv()


@spelled("einsum", matches=2)
def attention_by_letters_with_heads_behind_positions() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        weights = torch.einsum("bjhd,bihd->bhij", k, q).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2)

    return Of(forward), _qkv()


@spelled("einsum", matches=4)
def layers_by_letters() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        a, b = torch.einsum("bsd,ed->bse", x, self.weight), torch.einsum("...d,ed->...e", x, self.weight)
        return a + b + torch.einsum("de,bsd->bse", self.weight.t(), x) + torch.einsum("bsd,dx->bsx", x, self.weight.t())

    return Of(forward, weight=torch.randn(WIDTH, WIDTH)), (_x(),)


@missed("einsum")
def sums_of_letters_that_are_no_products() -> Any:
    def forward(self: Any, x: Tensor, y: Tensor) -> Any:
        traced = torch.einsum("bii,bij->bj", x @ x.mT, x)
        return traced, torch.einsum("bij,bij->b", x, y), torch.einsum("bij,bkl->bik", x, y), torch.einsum("bij->bji", x)

    return Of(forward), (_x(), _x())


@missed("einsum")
def three_operands_by_letters() -> Any:
    return Of(lambda self, x, y: torch.einsum("bij,bkj,k->bik", x, y, y[0, :, 0])), (_x(), _x())


def _complex_turn(x: Tensor, table: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * table).flatten(3).type_as(x)


@spelled("complex-rotary", training=False, dtypes=(torch.float32, torch.bfloat16))
def rotary_by_complex_numbers() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, angles: Tensor) -> Any:
        table = torch.polar(torch.ones_like(angles, dtype=torch.float32), angles.float())
        return _complex_turn(q, table[None, :, None]), _complex_turn(k, table[None, :, None])

    return Of(forward), (torch.randn(B, L, H, D), torch.randn(B, L, K, D), torch.randn(L, D // 2))


@missed("complex-rotary")
def complex_numbers_that_are_read_again() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, angles: Tensor) -> Any:
        table = torch.polar(torch.ones_like(angles), angles)[None, :, None]
        turned = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2)) * table
        return torch.view_as_real(turned).flatten(3).type_as(q), turned.abs(), _complex_turn(k, table * table)

    return Of(forward), (torch.randn(B, L, H, D), torch.randn(B, L, K, D), torch.randn(L, D // 2))


@spelled("encoder-layer", training=False)
def encoder_layer_with_norms_behind() -> Any:
    return nn.TransformerEncoderLayer(H * D, H, 80, batch_first=True).eval(), (torch.randn(B, L, H * D),)


@spelled("encoder-layer", training=False)
def encoder_layer_with_norms_before() -> Any:
    layer = nn.TransformerEncoderLayer(H * D, H, 80, activation="gelu", norm_first=True, batch_first=True)
    return layer.eval(), (torch.randn(B, L, H * D),)


class Ahead(nn.Module):
    """Encoder layers that hide what comes later, by a mask as PyTorch makes it."""

    def __init__(self, diagonal: int = 1) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(H * D, H, 80, batch_first=True)
        self.encoder, self.diagonal = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), diagonal

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.full((L, L), float("-inf"), device=x.device, dtype=x.dtype).triu(self.diagonal)
        return self.encoder(x, mask=mask, is_causal=True)


@spelled("encoder-layer", matches=2, training=False)
def encoder_layers_that_hide_what_comes_later() -> Any:
    return Ahead(), (torch.randn(B, L, H * D),)


class Padded(nn.Module):
    """An encoder layer that hides keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(H * D, H, 80, batch_first=True).eval()

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=hidden)


@missed("encoder-layer")
def encoder_layer_with_a_mask() -> Any:
    return Padded(), (torch.randn(B, L, H * D), torch.zeros(B, L, dtype=torch.bool))


@missed("multi-head")
def module_whose_weights_are_read() -> Any:
    return Modular(read=True), (torch.randn(L, B, H * D),)


@missed("multi-head")
def module_with_a_mask() -> Any:
    x = torch.randn(L, B, H * D)
    return Modular(), (x, x.clone(), torch.ones(L, L, dtype=torch.bool).triu(1))


@missed("multi-head")
def module_with_rows_of_its_own() -> Any:
    return Modular(add_bias_kv=True), (torch.randn(L, B, H * D),)


@missed("multi-head")
def module_that_drops() -> Any:
    return Modular(dropout=0.5), (torch.randn(L, B, H * D),)


@missed("attention")
def softmax_over_rows() -> Any:
    return Of(lambda self, q, k, v: torch.softmax(q @ k.mT, dim=-2) @ v), _qkv()


@missed("attention")
def weights_dropped_at_random() -> Any:
    return Of(lambda self, q, k, v: F.dropout(torch.softmax(q @ k.mT, -1), 0.5, True) @ v), _qkv()


@missed("attention")
def mask_scaled_with_the_scores() -> Any:
    return Of(lambda self, q, k, v, m: torch.softmax((q @ k.mT + m) * 0.25, -1) @ v), (*_qkv(), torch.randn(L, L))


@missed("attention")
def weights_returned_too() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(q @ k.mT, -1)
        return weights @ v, weights

    return Of(forward), _qkv()


def _gemma2(cap: float, divisor: float, window: int = 0) -> Any:
    def repeat(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return x[:, :, None, :, :].expand(b, h, H // K, n, d).reshape(b, H, n, d)

    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, repeat(k).transpose(2, 3)) * 0.3
        scores = torch.tanh(scores / divisor) * cap
        i = torch.arange(L, device=q.device)
        seen = i[None, :] <= i[:, None]
        if window:
            seen = seen & (i[None, :] > i[:, None] - window)
        smallest = torch.finfo(q.dtype).min
        scores = scores + torch.where(seen, torch.zeros((), dtype=q.dtype, device=q.device), smallest)[None, None]
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, repeat(v)).transpose(1, 2).contiguous()

    return Of(forward), _heads(H, K, K)


@spelled("attention-special", dtypes=(torch.bfloat16,))
def gemma2_attention() -> Any:
    return _gemma2(5.0, 5.0)


@spelled("attention-special", dtypes=(torch.bfloat16,))
def gemma2_attention_with_a_window() -> Any:
    return _gemma2(5.0, 5.0, window=4)


@spelled("attention-special", dtypes=(torch.bfloat16,))
def scores_bent_by_another_number_than_they_are_scaled_with() -> Any:
    return _gemma2(5.0, 3.0)


@spelled("attention-special", dtypes=(torch.bfloat16,))
def gpt_oss_attention_has_sinks() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
        hidden = torch.triu(torch.full((L, L), torch.finfo(q.dtype).min, dtype=q.dtype, device=q.device), 1)
        scores = scores + hidden[None, None]
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(B, -1, L, -1)
        logits = torch.cat([scores, sinks], dim=-1)
        logits = logits - logits.max(dim=-1, keepdim=True).values
        weights = F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1]
        return torch.matmul(F.dropout(weights, 0.1, False), v).transpose(1, 2).contiguous()

    return Of(forward, sinks=torch.randn(H)), _qkv()


@missed("attention-special")
def a_column_dropped_that_is_no_sink() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1)[..., :-1] @ v[:, :, 1:]

    return Of(forward), _qkv()


@missed("attention")
def scores_capped() -> Any:
    return Of(lambda self, q, k, v: torch.softmax(torch.tanh(q @ k.mT / 30) * 30, -1) @ v), _qkv()


def _call_with(build: Callable[[Tensor], Tensor], *more: Tensor) -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=build(q, *rest))

    return Of(forward), (*_qkv(), *more)


@spelled("mask")
def a_boolean_lower_triangle() -> Any:
    return _call_with(lambda q: torch.ones(L, L, dtype=torch.bool, device=q.device).tril())


@spelled("mask")
def positions_compared_and_all_true_expanded() -> Any:
    def build(q: Tensor) -> Tensor:
        i = torch.arange(L, device=q.device) + 0
        rows, keys = i[None, None, :, None], i[None, None, None, :]
        seen = rows.new_ones((), dtype=torch.bool) & (keys <= rows).to(q.device) & (rows >= 0)
        return seen.expand(B, -1, L, L)

    return _call_with(build)


@spelled("mask")
def a_mask_that_hides_nothing() -> Any:
    return _call_with(lambda q: torch.zeros(L, L, dtype=q.dtype, device=q.device))


@missed("mask")
def an_upper_triangle() -> Any:
    return _call_with(lambda q: torch.ones(L, L, dtype=torch.bool, device=q.device).triu())


@missed("mask")
def a_diagonal_hidden_too() -> Any:
    return _call_with(lambda q: torch.ones(L, L, dtype=torch.bool, device=q.device).tril(-1) | torch.eye(
        L, dtype=torch.bool, device=q.device)[:, [1, 0, *range(2, L)]])  # fmt: skip


@missed("mask")
def padding_from_an_input() -> Any:
    keep = torch.ones(B, L, dtype=torch.bool)
    keep[1, 7:] = False
    return _call_with(lambda q, keep: keep[:, None, None, :].expand(B, 1, L, L), keep)


@missed("mask")
def a_window() -> Any:
    def build(q: Tensor) -> Tensor:
        i = torch.arange(L, device=q.device)
        return (i[None] <= i[:, None]) & (i[None] > i[:, None] - 4)

    return _call_with(build)


@spelled("grouped-keys")
def keys_repeated_by_expanding() -> Any:
    def repeat(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return x[:, :, None, :, :].expand(b, h, H // K, n, d).reshape(b, H, n, d)

    return Of(lambda self, q, k, v: F.scaled_dot_product_attention(q, repeat(k), repeat(v))), _heads(H, K, K)


@spelled("grouped-keys")
def keys_repeated_by_name() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(H // K, dim=1), torch.repeat_interleave(v, H // K, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Of(forward), _heads(H, K, K)


@spelled("grouped-keys", matches=2)
def keys_repeated_behind_positions() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        k, v = (x.transpose(1, 2) for x in (k, v))
        wide = [x[:, :, :, None, :].expand(B, L, K, H // K, D).reshape(B, L, H, D).transpose(1, 2) for x in (k, v)]
        again = [torch.repeat_interleave(x, H // K, dim=2).permute(0, 2, 1, 3) for x in (k, v)]
        return F.scaled_dot_product_attention(q, *wide), F.scaled_dot_product_attention(q, *again)

    return Of(forward), (torch.randn(B, H, L, D), torch.randn(B, K, L, D), torch.randn(B, K, L, D))


@missed("grouped-keys")
def keys_whose_positions_are_repeated() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = [torch.repeat_interleave(x.transpose(1, 2), 2, dim=1).transpose(1, 2) for x in (k, v)]
        return F.scaled_dot_product_attention(q, *wide)

    return Of(forward), _qkv()


@missed("grouped-keys")
def keys_tiled_instead_of_repeated() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k.repeat(1, H // K, 1, 1), v.repeat(1, H // K, 1, 1))

    return Of(forward), _heads(H, K, K)


@spelled("attention-kernel", dtypes=(torch.bfloat16,))
def attention_call_for_our_kernel() -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return found.transpose(1, 2).reshape(B, L, -1)

    return Of(forward), _heads(H, K, K)


def _masked_call(build: Callable[..., Tensor], *more: Tensor) -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=build(q, *rest), enable_gqa=True)
        return found.transpose(1, 2).reshape(B, L, -1)

    return Of(forward), (*_heads(H, K, K), *more)


def _kept() -> Tensor:
    keep = torch.ones(B, L, dtype=torch.bool)
    keep[1, 7:] = False
    return keep


@spelled("attention-kernel", dtypes=(torch.bfloat16,))
def padding_for_our_kernel() -> Any:
    return _masked_call(lambda q, keep: keep[:, None, None, :].expand(B, 1, L, L), _kept())


@spelled("attention-kernel", dtypes=(torch.bfloat16,))
def padding_and_causality_for_our_kernel() -> Any:
    def build(q: Tensor, keep: Tensor) -> Tensor:
        i = torch.arange(L, device=q.device)
        batch = torch.arange(B, device=q.device)[:, None, None, None]
        seen = (i[None, None, None, :] <= i[None, None, :, None]) & keep[batch, i[None, None, None, :]]
        return seen.expand(B, -1, L, L)

    return _masked_call(build, _kept())


@spelled("attention-kernel", dtypes=(torch.bfloat16,))
def a_window_for_our_kernel() -> Any:
    def build(q: Tensor) -> Tensor:
        i = torch.arange(L, device=q.device)
        return (i[None] <= i[:, None]) & (i[None] > i[:, None] - 4)

    return _masked_call(build)


@spelled("attention-kernel", dtypes=(torch.bfloat16,))
def a_window_to_both_sides_for_our_kernel() -> Any:
    """ModernBERT's local layers."""

    def build(q: Tensor) -> Tensor:
        i = torch.arange(L, device=q.device)
        return (i[None] - i[:, None]).abs() <= 3

    return _masked_call(build)


@missed("attention-kernel")
def a_window_with_a_hole() -> Any:
    def build(q: Tensor) -> Tensor:
        i = torch.arange(L, device=q.device)
        distance = (i[None] - i[:, None]).abs()
        return (distance <= 3) & (distance != 2)

    return _masked_call(build)


@missed("attention-kernel")
def a_mask_of_rows_and_keys_for_our_kernel() -> Any:
    return _masked_call(lambda q, m: m, torch.rand(B, 1, L, L) > 0.3)


@spelled("attention-cudnn", dtypes=(torch.bfloat16,))
def attention_call_for_cudnn() -> Any:
    return Of(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2)), _qkv()


@spelled("attention-kernel", dtypes=(torch.bfloat16,))
def repeated_keys_and_a_key_mask_for_our_kernel() -> Any:
    def repeat(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return x[:, :, None, :, :].expand(b, h, H // K, n, d).reshape(b, H, n, d)

    def forward(self: nn.Module, q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        mask = keep[:, None, None, :].expand(B, 1, L, L)
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=mask).transpose(1, 2)

    q, k, v = torch.randn(B, H, L, D), torch.randn(B, K, L, D), torch.randn(B, K, L, D)
    return Of(forward), (q, k, v, _kept())


@missed("attention-kernel")
def attention_call_with_dropout() -> Any:
    return Of(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)), _qkv()


# losses ---------------------------------------------------------------------------------------------------------------


def _tokens() -> Tensor:
    tokens = torch.randint(0, 40, (B, L))
    tokens[0, 3] = -100
    return tokens


@spelled("linear-cross-entropy")
def shifted_logits_and_labels() -> Any:
    def forward(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, self.weight)
        logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return F.cross_entropy(logits.view(-1, 40), labels.view(-1))

    return Of(forward, weight=torch.randn(40, WIDTH)), (_x(B, L, WIDTH), _tokens())


@spelled("linear-cross-entropy")
def padded_labels_as_transformers_shifts() -> Any:
    def forward(self: Any, x: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, self.weight).float()
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous().view(-1)
        return F.cross_entropy(logits.view(-1, 40), shifted, ignore_index=-100, reduction="sum", label_smoothing=0.1)

    return Of(forward, weight=torch.randn(40, WIDTH)), (_x(B, L, WIDTH), _tokens())


@spelled("cross-entropy")
def loss_of_widened_logits() -> Any:
    def forward(self: Any, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float().view(-1, 40), labels.view(-1))

    return Of(forward), (_x(B, L, 40), _tokens())


@missed("linear-cross-entropy")
def logits_returned_with_the_loss() -> Any:
    def forward(self: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        return F.cross_entropy(logits.view(-1, 40), labels.view(-1)), logits

    return Of(forward, weight=torch.randn(40, WIDTH)), (_x(B, L, WIDTH), _tokens())


@missed("cross-entropy")
def classes_with_weights() -> Any:
    return Of(lambda self, x, t: F.cross_entropy(x.view(-1, 40), t.view(-1), self.w), w=torch.rand(40)), (
        _x(B, L, 40), _tokens())  # fmt: skip


# rows, folding, products, algebra ----------------------------------------------------------------------------------


@spelled("softmax")
def softmax_over_the_last_dim() -> Any:
    return Of(lambda self, x: x.softmax(-1)), (_x(),)


@missed("softmax")
def softmax_over_another_dim() -> Any:
    return Of(lambda self, x: x.softmax(1)), (_x(),)


@spelled("group-norm")
def group_norm_and_silu() -> Any:
    norm = nn.GroupNorm(4, 8)
    return nn.Sequential(norm, nn.SiLU()), (_x(2, 8, 10, 12),)


@spelled("group-norm-last", training=False)
def group_norm_and_silu_between_convolutions_with_channels_last() -> Any:
    layers = nn.Sequential(nn.Conv2d(8, 8, 3), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3)).eval()
    last = torch.channels_last
    return layers.to(memory_format=last), (_x(2, 8, 10, 12).to(memory_format=last),)


@missed("group-norm-last")
def group_norm_of_channels_that_lie_first() -> Any:
    return nn.Sequential(nn.GroupNorm(4, 8), nn.Conv2d(8, 8, 3)).eval(), (_x(2, 8, 10, 12),)


@spelled("fold-norm", training=False)
def convolution_and_batch_norm() -> Any:
    norm = nn.BatchNorm2d(6)
    norm.running_mean.copy_(torch.randn(6))  # type: ignore[union-attr]
    norm.running_var.copy_(torch.rand(6) + 0.5)  # type: ignore[union-attr]
    norm.weight.data.copy_(torch.randn(6))
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), norm, nn.ReLU()).eval(), (_x(2, 3, 8, 8),)


@spelled("fold-norm", training=False)
def linear_and_batch_norm() -> Any:
    norm = nn.BatchNorm1d(6, affine=False)
    norm.running_mean.copy_(torch.randn(6))  # type: ignore[union-attr]
    return nn.Sequential(nn.Linear(WIDTH, 6), norm).eval(), (_x(9, WIDTH),)


@spelled("fold-norm", training=False)
def transposed_convolution_and_batch_norm() -> Any:
    return nn.Sequential(nn.ConvTranspose2d(3, 6, 3, stride=2), nn.BatchNorm2d(6)).eval(), (_x(2, 3, 5, 5),)


@missed("fold-norm")
def batch_norm_in_training() -> Any:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)), (_x(2, 3, 8, 8),)


@missed("fold-norm")
def a_convolution_used_twice() -> Any:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    return Twice().eval(), (_x(2, 3, 8, 8),)


class Projections(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, n, bias=bias) for n in (H * D, K * D, K * D))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, H, D).transpose(1, 2)
        k, v = (p(x).view(b, n, K, D).transpose(1, 2) for p in (self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


@spelled("horizontal", training=False)
def query_key_value_projections() -> Any:
    return Projections(True), (_x(B, L, WIDTH),)


@spelled("horizontal", training=False)
def gate_and_up_projections() -> Any:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.silu(self.gate(x)) * self.up(x)

    return Gated(), (_x(),)


@spelled("side-by-side")
def query_key_value_projections_in_training() -> Any:
    return Projections(True), (_x(B, L, WIDTH),)


@spelled("side-by-side")
def projections_without_their_additions_in_training() -> Any:
    return Projections(False), (_x(B, L, WIDTH),)


@missed("horizontal")
def a_weight_used_twice() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x)) + self.b(x)

    return Tied(), (_x(),)


class Summed(nn.Module):
    def __init__(self, keepdim: bool) -> None:
        super().__init__()
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=-1, keepdim=self.keepdim)


@spelled("numbers", matches=2)
def several_numbers() -> Any:
    return Of(lambda self, x: ((x * 2.0 / 3.0) * 0.5).relu()), (_x(),)


@spelled("identity", matches=2)
def dropout_that_is_off_and_a_cast_to_the_same() -> Any:
    return Of(lambda self, x: F.dropout(x, 0.3, False).to(torch.float32) * 2.0), (_x(),)


@spelled("identity")
def padding_by_nothing() -> Any:
    return Of(lambda self, x: torch.relu(F.pad(x * 2, (0, 0, 0, 0)))), (torch.randn(3, 4),)


@missed("identity")
def padding_that_moves_by_one() -> Any:
    """RWKV's time shift: as many steps as before, each with what the one before it had."""
    return Of(lambda self, x: torch.relu(F.pad(x * 2, (0, 0, 1, -1)))), (torch.randn(2, 3, 4),)


@missed("identity")
def division_by_one_that_rounds() -> Any:
    return Of(lambda self, x: torch.relu(torch.div(x * 2, 1, rounding_mode="floor"))), (torch.randn(3, 4),)


@missed("identity")
def rows_shifted_by_one() -> Any:
    return Of(lambda self, x: F.pad(x, (0, 0, 1, -1)) * x), (_x(),)


@missed("identity")
def dropout_that_is_on() -> Any:
    return Of(lambda self, x: F.dropout(x, 0.3, True)), (_x(),)


@missed("identity")
def a_copy_that_is_written_to() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 1.5
        z = y.reshape(y.shape)
        z.add_(1.0)
        return z * y

    return Of(forward), (_x(),)


@spelled("views")
def a_view_of_a_view() -> Any:
    return Of(lambda self, x: x.view(21, WIDTH).view(3, 7, 4, 12) * 2.0), (_x(),)


@spelled("linear-activation", training=False)
def a_linear_layer_and_relu() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 20), nn.ReLU()), (_x(),)


@spelled("linear-activation", training=False)
def gpt2_product_and_gelu() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = torch.addmm(self.bias, x.view(-1, WIDTH), self.weight).view(3, 7, 20)
        return F.gelu(y, approximate="tanh")

    return Of(forward, weight=torch.randn(WIDTH, 20), bias=torch.randn(20)), (_x(),)


@spelled("gelu", training=False, dtypes=(torch.bfloat16,))
def an_exact_gelu_between_linear_layers() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, 8)), (_x(),)


@spelled("gelu", training=False, dtypes=(torch.float16,))
def a_gelu_by_tanh_between_products_seen_as_rows() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = F.gelu(torch.matmul(x.view(-1, WIDTH), self.weight).view(3, 7, 20), approximate="tanh")
        return F.linear(y.reshape(21, 20), self.out)

    return Of(forward, weight=torch.randn(WIDTH, 20), out=torch.randn(4, 20)), (_x(),)


@missed("gelu")
def a_gelu_of_float32() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU(), nn.Linear(20, 8)), (_x(),)


@spelled("linear-activation", training=False, dtypes=(torch.bfloat16,))
def a_linear_layer_and_an_exact_gelu() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU()), (_x(),)


@missed("linear-activation")
def an_exact_gelu_of_float32_has_no_epilogue() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 20), nn.GELU()), (_x(),)


@missed("linear-activation")
def a_product_used_before_its_activation() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return F.relu(y) + y

    return Of(forward, weight=torch.randn(20, WIDTH), bias=torch.randn(20)), (_x(),)


class Residual(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x) + x)


@spelled("in-place", matches=2, training=False)
def a_residual_sum_and_relu_in_place() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2.0
        y += x
        return F.relu(y, inplace=True) * 3.0

    return Of(forward), (_x(),)


@spelled("in-place", matches=3, training=False)
def a_mask_that_is_filled_in_place() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        mask = torch.zeros_like(x).masked_fill_(x > 0, float("-inf")).triu_(1)
        return mask.clamp_(-2.0, 2.0) + x

    return Of(forward), (_x(),)


@spelled("in-place", training=False)
def a_tensor_read_after_it_was_written() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2.0
        z = F.relu(y, inplace=True)
        return z + y

    return Of(forward), (_x(),)


@spelled("in-place", matches=3, training=False)
def a_tensor_written_for_the_sake_of_it() -> Any:
    """A view of what nobody reads any more, too; and a wider mask, which is rounded to what it is added to."""

    def forward(self: Any, x: Tensor) -> Tensor:
        scores = (x * 2.0).view(x.shape)
        scores.mul_(0.5)
        scores.masked_fill_(scores > 1.0, -1e4)
        scores += torch.ones(scores.shape[-1], dtype=torch.float64, device=x.device)
        return scores.softmax(-1)

    return Of(forward), (_x(),)


@missed("in-place")
def a_view_written_whose_base_is_read() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2.0
        y[..., 0].mul_(3.0)
        return y + 1.0

    return Of(forward), (_x(),)


@missed("in-place")
def views_of_views_written_twice() -> Any:
    """The second write reaches what the first returned."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2.0
        flat = y.view(-1)
        y.add_(1.0)
        flat.mul_(3.0)
        return y + flat.sum()

    return Of(forward), (_x(),)


@missed("in-place")
def a_view_of_what_is_written() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = x * 2.0
        v = y[..., 0]
        z = y.relu_()
        return z.sum(-1) + v

    return Of(forward), (_x(),)


class Widened(nn.Module):
    """A norm in float32 around 16 bits, as much published code has it."""

    def __init__(self, kind: str, result: torch.dtype | None = None) -> None:
        super().__init__()
        self.kind, self.result = kind, result
        self.weight, self.bias = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        w, b = self.weight.float(), self.bias.float()
        if self.kind == "groups":
            y = F.group_norm(x.float().transpose(1, 2), 4, w, b, 1e-5)
        else:
            y = F.layer_norm(x.type(torch.float32), (WIDTH,), w, b, 1e-5)
        return y.type(x.dtype if self.result is None else self.result) * 2.0


@spelled("norm-casts", training=False, dtypes=(torch.bfloat16,))
def a_norm_in_float32() -> Any:
    return Widened("rows"), (torch.randn(B, L, WIDTH),)


@missed("norm-casts")
def a_norm_in_float32_of_float32() -> Any:
    return Widened("rows"), (torch.randn(B, L, WIDTH),)


@missed("norm-casts")
def a_norm_in_float32_that_stays_so() -> Any:
    return Widened("rows", torch.float32).bfloat16(), (torch.randn(B, L, WIDTH).bfloat16(),)


@missed("in-place")
def an_input_that_is_written() -> Any:
    return Of(lambda self, x: x.mul_(1.0) * 2.0), (_x(),)
