"""Trials: what fixed and healthy programs of earlier suites were told and nobody had tried, done and timed.

Each ``again_…`` case has the program as it was recorded ("planted") and the same with the advice taken ("fixed"). A
finding was true if that brings its low end and more than noise.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import fresh
import nineteenth
import numpy as np
import seventeenth
import torch
import torch.nn.functional as F
import twentieth
import twentiethnets
import twentyfirstnets
import twentysecond
import twentysecondnets
from cases import CASES, Program, Setting, case, compiler, end_workers
from eighteenth import ONE
from ninth import _bf16, _ints, _optimized
from sixth import _with
from tenth import TRIED
from thirteenth import _varlen
from torch import Tensor, nn

UNTRACED: dict[str, Any] = {"traced": False}
"""The device decides these steps: the recording of the program itself says what was promised."""

for name in (
    *("again_plans_padded", "again_plans_made_eagerly", "again_particles_drawn_again_on_host", "again_taught_in_fp32"),
    *("again_healthy_drawn_words", "again_adapters_judged_as_they_are", "again_healthy_tuned_experts"),
):
    CASES[name] = replace(CASES[name], traced=False)


def _compiled(s: Setting, make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    def made(*sizes: int) -> nn.Module:
        module = make(*sizes)
        module.compile(backend=compiler(s), dynamic=False)
        return module

    return made


def _as_it_was(name: str, s: Setting, changed: AbstractContextManager[Any]) -> Program:
    """The fixed or healthy program of that name, built while something is changed."""
    torch._dynamo.reset()
    with changed:
        return CASES[name].build(s, True)


# ---------------------------------------------------------------- what two programs of the twenty-first were told


@case("unfused pointwise chain", "torch.compile the network", compiles=True, **ONE | UNTRACED)
def again_healthy_crossed_clicks(s: Setting, fixed: bool) -> Program:
    crossed = _with(twentyfirstnets, "Crossed", _compiled(s, twentyfirstnets.Crossed))
    return _as_it_was("healthy_crossed_clicks", s, crossed if fixed else nullcontext())


@case("unfused attention", "FlexAttention with a mask of blocks", compiles=True, **ONE | UNTRACED)
def again_healthy_prefixed(s: Setting, fixed: bool) -> Program:
    if not fixed or not s.cuda:
        return _as_it_was("healthy_prefixed", s, nullcontext())
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend, known = torch.compile(flex_attention, dynamic=False), dict[int, Any]()

    def blocks(mask: Tensor) -> Any:
        """What may be seen, block by block, made once for a mask."""
        if mask.data_ptr() not in known:
            of_text = mask[:, 0]
            known[mask.data_ptr()] = create_block_mask(
                lambda text, head, at, seen: of_text[text, at, seen],
                len(mask), None, mask.shape[-2], mask.shape[-1], device=mask.device,
            )  # fmt: skip
        return known[mask.data_ptr()]

    def forward(layer: Any, x: Tensor, mask: Tensor) -> Tensor:
        normed = layer.first(x)
        k, v = layer.kv(normed).chunk(2, -1)
        q, k, v = (layer.split(part) for part in (layer.q(normed), k, v))
        x = x + layer.out(attend(q, k, v, block_mask=blocks(mask)).transpose(1, 2).flatten(2))
        return x + layer.down(F.gelu(layer.up(layer.second(x)), approximate="tanh"))

    program = _as_it_was("healthy_prefixed", s, nullcontext())
    return replace(program, scope=lambda: _with(twentyfirstnets.Masked, "forward", forward))


# ---------------------------------------------------------------- losses


@case("fp32 logits", "a loss that is compiled", compiles=True, **ONE | UNTRACED)
def again_partition_squared_in_fp32(s: Setting, fixed: bool) -> Program:
    vocab, long = s.pick(50_304, 64), s.pick(512, 4)
    torch._dynamo.reset()
    model = s.place(lambda: twentiethnets.Words(vocab, s.pick(512, 16), s.pick(8, 2), s.pick(4, 1), long))
    ids = _ints(s, vocab, s.pick(16, 2), long)

    def judged(logits: Tensor, known: Tensor) -> Tensor:
        return F.cross_entropy(logits, known) + 1e-4 * logits.logsumexp(-1).square().mean()

    judge = torch.compile(judged, backend=compiler(s), dynamic=False) if fixed else judged
    return twentieth._learning(s, model, lambda: judge(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()))


# ---------------------------------------------------------------- padding


@case("padding", "texts one behind the other, with attention of varying length", **TRIED | UNTRACED)
def again_speech_filled_to_thirty_seconds(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["speech_filled_to_thirty_seconds"].build(s, True)
    limit, heads = s.pick(1500, 24), s.pick(12, 2)
    lengths = np.random.default_rng(0).integers(limit // 10, limit * 2 // 5, s.pick(48, 2))
    model = s.place(lambda: nineteenth.nets.Heard(128, s.pick(768, 16), heads, s.pick(4, 1)))
    ends = torch.from_numpy(np.concatenate(([0], lengths.cumsum()))).to(s.device, torch.int32)
    frames, said = _bf16(s, int(lengths.sum()), 128), _ints(s, 64, int(lengths.sum()))
    longest = int(lengths.max())

    def loss() -> Tensor:
        x = model.enter(frames)
        for layer in model.trunk.layers:
            x = _packed_layer(s, layer, x, heads, ends, longest)
        return F.cross_entropy(model.out(x), said, reduction="sum") / len(lengths)

    return Program(_optimized(fresh.adamw(s, model), loss))


def _packed_layer(s: Setting, layer: Any, x: Tensor, heads: int, ends: Tensor, longest: int) -> Tensor:
    """PyTorch's own layer (its norms first) over texts that lie one behind the other."""
    own = layer.self_attn
    parts = F.linear(layer.norm1(x), own.in_proj_weight, own.in_proj_bias).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (heads, -1)).contiguous() for part in parts)
    x = x + own.out_proj(_varlen(s, q, k, v, ends, longest).flatten(1))
    return x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))


# ---------------------------------------------------------------- a hub's models


@case("unfused pointwise chain", "torch.compile the norms and the rotation", compiles=True, **ONE | UNTRACED)
def again_experts_norms_compiled(s: Setting, fixed: bool) -> Program:
    from transformers.models.qwen3_moe import modeling_qwen3_moe as hub

    torch._dynamo.reset()
    made = lambda function: torch.compile(function, backend=compiler(s), dynamic=False)
    program = seventeenth._tuned_experts(s, wide_loss=True)
    if not fixed:
        return program
    norm, turned = made(hub.Qwen3MoeRMSNorm.forward), made(hub.apply_rotary_pos_emb)

    def scope() -> AbstractContextManager[Any]:
        both = ExitStack()
        both.enter_context(_with(hub.Qwen3MoeRMSNorm, "forward", norm))
        both.enter_context(_with(hub, "apply_rotary_pos_emb", turned))
        return both

    return replace(program, scope=scope)


def _fused_summaries(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hub's attention with places that are learned, by PyTorch's fused one, which takes them as a mask."""
    num = 2 if "output_attentions" in inspect.signature(original).parameters else 3

    def forward(
        self: Any, hidden_states: Tensor, mask: Tensor | None = None, key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None, *_: Any, **__: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        heard = hidden_states if key_value_states is None else key_value_states
        split = lambda x: x.unflatten(-1, (-1, self.key_value_proj_dim)).transpose(1, 2)
        q, k, v = split(self.q(hidden_states)), split(self.k(heard)), split(self.v(heard))
        if position_bias is None and self.has_relative_attention_bias:
            position_bias = self.compute_bias(q.shape[-2], k.shape[-2], device=q.device)
            if mask is None and self.is_decoder:  # left out where a flag says it
                mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            position_bias = position_bias if mask is None else position_bias + _added(mask, q.dtype)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=position_bias, scale=1.0)
        return (self.o(found.transpose(1, 2).flatten(2)), position_bias, None)[:num]

    return forward


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of what may be seen as what is added to scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -1e9) if mask.dtype == torch.bool else mask


@case("unfused attention", "F.scaled_dot_product_attention with the places as its mask", **TRIED)
def again_healthy_tuned_summaries(s: Setting, fixed: bool) -> Program:
    program = CASES["healthy_tuned_summaries"].build(s, True)
    if not fixed:
        return program
    from transformers.models.t5.modeling_t5 import T5Attention

    return replace(program, scope=lambda: _with(T5Attention, "forward", _fused_summaries(T5Attention.forward)))


# ---------------------------------------------------------------- threads beside the loop


class _Unpacked(torch.utils.data.Dataset[Tensor]):
    """Batches of scans, each unpacked by whoever asks for it."""

    def __init__(self, side: int, num: int) -> None:
        self.side = side
        self.blobs = twentiethnets.Scans(_Nobody(), side, num, Tensor.contiguous).blobs

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, turn: int) -> Tensor:
        made = [np.frombuffer(zlib.decompress(blob), np.int16).reshape(self.side, self.side) for blob in self.blobs]
        return torch.from_numpy(np.stack(made))


class _Nobody:
    """Takes jobs that nobody does: only what is packed is wanted of them."""

    def submit(self, *_: Any) -> None:
        return None


@case("cpu contention", "unpack in processes beside the one that launches", **ONE)
def again_scans_unpacked_on_one_core(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["scans_unpacked_on_one_core"].build(s, True)
    side, num = s.pick(256, 32), s.pick(24, 2)
    model = s.place(lambda: twentiethnets.Seen(1, 16, s.pick(1024, 16), s.pick(16, 2), s.pick(8, 1), 4))
    how: dict[str, Any] = {"pin_memory": s.cuda, "persistent_workers": True, "prefetch_factor": 4}
    loader = torch.utils.data.DataLoader(_Unpacked(side, num), None, num_workers=s.pick(6, 1), **how)
    feed: Iterator[Tensor] = iter(loader)
    kinds = _ints(s, 4, num)

    def loss() -> Tensor:
        here = next(feed).to(s.device, non_blocking=True)[:, None]
        return F.cross_entropy(model(here.bfloat16() / 4096), kinds)

    return Program(_optimized(fresh.adamw(s, model), loss), close=lambda: end_workers(feed))


# ---------------------------------------------------------------- what fixed programs of the twenty-second were told


@case("unfused pointwise chain", "torch.compile the blocks", compiles=True, **ONE | UNTRACED)
def again_blocks_wrapped_to_recompute(s: Setting, fixed: bool) -> Program:
    blocks = _with(twentysecondnets, "DiTBlock", _compiled(s, twentysecondnets.DiTBlock))
    return _as_it_was("blocks_wrapped_to_recompute", s, blocks if fixed else nullcontext())


@case("unfused pointwise chain", "torch.compile the network inside of the graph", compiles=True, **ONE | UNTRACED)
def again_sampler_compares_its_timestep(s: Setting, fixed: bool) -> Program:
    planner = _with(twentysecondnets, "Planner", _compiled(s, twentysecondnets.Planner))
    return _as_it_was("sampler_compares_its_timestep", s, planner if fixed else nullcontext())


@case("unfused pointwise chain", "torch.compile what is done for each word", compiles=True, **ONE | UNTRACED)
def again_paths_summed_word_by_word(s: Setting, fixed: bool) -> Program:
    def step(alpha: Tensor, moves: Tensor, emitted: Tensor) -> Tensor:
        return torch.logsumexp(alpha.unsqueeze(2) + moves + emitted.unsqueeze(1), dim=1)

    taken = torch.compile(step, backend=compiler(s), dynamic=False)

    def forward(crf: Any, emissions: Tensor, tags: Tensor) -> Tensor:
        is_tag = (tags.unsqueeze(2) == crf.kinds).float()
        moved = (is_tag[:, :-1] @ crf.transitions.float()) * is_tag[:, 1:]
        gold = (emissions * is_tag).sum((1, 2)) + moved.sum((1, 2)) + is_tag[:, 0] @ crf.start.float()
        alpha = crf.start + emissions[:, 0]
        for t in range(1, emissions.size(1)):
            alpha = taken(alpha, crf.transitions, emissions[:, t])
        return (torch.logsumexp(alpha, dim=1) - gold).mean()

    changed = _with(twentysecondnets.Crf, "forward", forward)
    return _as_it_was("paths_summed_word_by_word", s, changed if fixed else nullcontext())


@case("padding", "reviews one behind the other, with attention of varying length", **TRIED | UNTRACED)
def again_reviews_filled_to_the_limit(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["reviews_filled_to_the_limit"].build(s, True)
    vocab, batch, limit, heads = s.pick(30_000, 64), s.pick(64, 2), s.pick(512, 16), s.pick(12, 2)
    lengths = np.random.default_rng(2).integers(limit // 10, limit * 2 // 5, batch)
    model = s.place(lambda: twentysecondnets.ReviewEncoder(vocab, s.pick(768, 16), heads, s.pick(4, 1)))
    ends = torch.from_numpy(np.concatenate(([0], lengths.cumsum()))).to(s.device, torch.int32)
    firsts, longest = ends[:-1].long(), int(lengths.max())
    words, stars, optimizer = _ints(s, vocab, int(lengths.sum())), _ints(s, 5, batch), twentysecond._adamw(model)

    def step() -> None:
        optimizer.zero_grad()
        x = model.embed(words)
        for layer in model.encoder.layers:
            x = _packed_layer(s, layer, x, heads, ends, longest)
        F.cross_entropy(model.classify(x[firsts]), stars).backward()
        optimizer.step()

    return Program(step)
