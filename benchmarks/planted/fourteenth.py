"""A fourteenth suite: further healthy programs (a hub's translator and its pictures with texts, kernels of one's own,
trees of drafts, flows, gradients of every sample, several passes by design, sound made out of spectra), and
what the thirteenth's fixed and healthy programs were told, done."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import fourteenthnets as nets
import fresh
import torch
import torch.nn.functional as F
from cases import CASES, Prefetch, Program, Setting, case, graphed, precision
from eleventh import _blocks, _learning
from ninth import HEALTHY, PLAIN, _bf16, _ints
from sixth import _with
from tenth import TRIED, _captured
from thirteenth import _hub, _said, _varlen
from torch import Tensor, nn
from twelfth import _compiled_class

healthy = case("none", "nothing", **HEALTHY | PLAIN)

# ---------------------------------------------------------------- what was told, done


def _packed(s: Setting, ends: Tensor, longest: int) -> Any:
    """Attention of a hub's model over texts that lie one behind the other."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any) -> tuple[Tensor, None]:
        q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
        return _varlen(s, q, k, v, ends, longest)[None], None

    return attend


@case("unfused attention", "texts one behind the other, with attention of varying length and without a mask", **TRIED)
def again_healthy_hub_padded(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["healthy_hub_padded"].build(s, True)
    from transformers import AttentionInterface

    model, batch, length = _hub(s, 12).eval(), s.pick(64, 2), s.pick(512, 8)
    lengths = torch.linspace(0.8, 1.0, batch, device=s.device).mul(length).long()
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    AttentionInterface.register("packed", _packed(s, ends, length))
    model.set_attn_implementation("packed")
    ids = _ints(s, s.pick(30528, 96), 1, int(lengths.sum()))
    places = torch.cat([torch.arange(num, device=s.device) for num in lengths.tolist()])[None]
    firsts = ends[:-1].long()

    @torch.inference_mode()
    def step() -> None:
        model.bert(input_ids=ids, position_ids=places).last_hidden_state[0, firsts].float()

    return Program(step)


@case("synchronization", "the mask is laid out before, so that nobody asks whether it is needed", **TRIED)
def again_mask_laid_out(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["healthy_hub_padded"].build(s, True)
    model, batch, length = _hub(s, 12).eval(), s.pick(64, 2), s.pick(512, 8)
    ids = _ints(s, s.pick(30528, 96), batch, length)
    lengths = torch.linspace(0.8, 1.0, batch, device=s.device).mul(length).long()
    mask = (torch.arange(length, device=s.device) < lengths[:, None])[:, None, None].expand(-1, 1, length, -1)

    @torch.inference_mode()
    def step() -> None:
        model.bert(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].float()

    return Program(step)


@case("NCHW convolution", "convolutions along one axis as flat pictures in channels_last", **TRIED)
def again_healthy_raw_sound(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["healthy_raw_sound"].build(s, True)
    model = s.place(lambda: nets.FlatSound(s.pick(768, 32), s.pick(12, 2), s.pick(8, 2)))
    model.cut = fresh.nhwc(model.cut)
    waves = fresh.nhwc(_bf16(s, s.pick(16, 2), 1, 1, s.pick(160_000, 2000)))
    return _learning(s, model, lambda: model(waves).float().square().mean())


@case("pinned copy on the compute stream", "copy the next columns on a side stream", **TRIED)
def again_columns_pageable(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["columns_pageable"].build(s, True)
    width, rows = s.pick(2048, 16), s.pick(32768, 8)
    make = lambda: (p for n in (width, width, width) for p in (nn.Linear(n, width), nn.ReLU(True)))
    model = s.place(lambda: nn.Sequential(*make(), nn.Linear(width, 8)))
    host = [(s.pinned(torch.randn(rows, width).bfloat16()),) for _ in range(2)]
    ahead = iter(Prefetch(s, itertools.cycle(host)))
    return _learning(s, model, lambda: model(*next(ahead)).square().mean())


@case("host-bound", "eight tokens out of a CUDA graph, and the question after them", **TRIED)
def again_ends_asked_for_every_token(s: Setting, fixed: bool) -> Program:
    if not fixed or not s.cuda:
        return CASES["ends_asked_for_every_token"].build(s, True)
    say, ended = _said(s)

    @torch.inference_mode()
    def run() -> None:
        for _ in range(8):
            say()

    replay = graphed(run)

    def step() -> None:
        replay()
        bool(ended.all())

    return Program(step)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_layers_updated_one_by_one(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["layers_updated_one_by_one"].build(s, True)
    model = _blocks(s, 512, 8, 16)
    x = _bf16(s, s.pick(64, 2), s.pick(256, 8), s.pick(512, 32))
    return _captured(s, True, model, lambda: F.mse_loss(model(x), x))


def _replaying(s: Setting, name: str, model: nn.Module, loss: Callable[[], Tensor], fixed: bool) -> Program:
    """A program as it is, or its step out of a CUDA graph."""
    return _captured(s, True, model, loss) if fixed else CASES[name].build(s, True)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_healthy_hub_translator(s: Setting, fixed: bool) -> Program:
    return _replaying(s, "healthy_hub_translator", *_translator(s), fixed)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_healthy_hub_pairs(s: Setting, fixed: bool) -> Program:
    return _replaying(s, "healthy_hub_pairs", *_pairs(s), fixed)


@case("NCHW convolution", "convolutions along one axis as flat pictures in channels_last", **TRIED)
def again_healthy_vocoder(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["healthy_vocoder"].build(s, True)
    model = fresh.nhwc(s.place(lambda: nets.flattened(nets.vocoder(s.pick(512, 16))))).eval()
    spectra = fresh.nhwc(_bf16(s, s.pick(16, 2), 80, 1, s.pick(512, 8)))

    @torch.inference_mode()
    def step() -> None:
        model(spectra)

    return Program(step)


@case("unfused pointwise chain", "torch.compile the layers", compiles=True, **TRIED | {"rounds": 1})
def again_healthy_fake_quantized(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    kind = _compiled_class(nets.Rounded, s) if fixed else nets.Rounded
    with _with(nets, "Rounded", kind):
        return CASES["healthy_fake_quantized"].build(s, True)


# ---------------------------------------------------------------- texts


@healthy
def healthy_hub_translator(s: Setting, fixed: bool) -> Program:
    """A translator of a hub, learned from pairs of sentences."""
    return _learning(s, *_translator(s))


def _translator(s: Setting) -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import BartConfig, BartForConditionalGeneration

    wide, deep, vocab = s.pick(768, 32), s.pick(4, 1), s.pick(32000, 96)
    config = BartConfig(
        vocab_size=vocab, d_model=wide, encoder_layers=deep, decoder_layers=deep, encoder_attention_heads=s.pick(12, 2),
        decoder_attention_heads=s.pick(12, 2), encoder_ffn_dim=4 * wide, decoder_ffn_dim=4 * wide, dropout=0.1,
        attn_implementation="sdpa", pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        forced_eos_token_id=None,
    )  # fmt: skip
    model = s.place(lambda: BartForConditionalGeneration(config)).train()
    ids, said = (_ints(s, vocab - 3, s.pick(32, 2), s.pick(256, 8)) + 3 for _ in range(2))
    before = said.roll(1, 1)
    return model, (lambda: model(input_ids=ids, decoder_input_ids=before, labels=said, use_cache=False).loss)


@healthy
def healthy_drafted_trees(s: Setting, fixed: bool) -> Program:
    """Trees of drafted words judged at once: each word sees the text so far and the words above it in its tree."""
    width, heads, layers, batch = s.pick(2048, 32), s.pick(16, 2), s.pick(8, 2), s.pick(16, 2)
    length, words = s.pick(4096, 16), s.pick(64, 4)
    model = s.place(lambda: nn.ModuleList(nets.Judge(width, heads, batch, length) for _ in range(layers))).eval()
    above = torch.rand(words, words, device=s.device).tril() > 0.5
    seen = torch.cat((torch.ones(words, length - words, dtype=torch.bool, device=s.device), above), 1)[None, None]
    x = _bf16(s, batch, words, width)

    @torch.inference_mode()
    def step() -> None:
        y = x
        for layer in model:
            y = layer(y, seen)

    return Program(step)


@healthy
def healthy_own_kernels(s: Setting, fixed: bool) -> Program:
    """Blocks whose norms and gates are kernels of the author's own."""
    width = s.pick(2048, 32)
    model = s.place(
        lambda: nn.Sequential(*(nets.OwnBlock(width, s.pick(5632, 64)) for _ in range(s.pick(6, 2))))
    ).eval()
    x = _bf16(s, s.pick(8192, 8), width)

    @torch.inference_mode()
    def step() -> None:
        model(x)

    return Program(step)


# ---------------------------------------------------------------- several passes by design


@healthy
def healthy_large_contrast(s: Setting, fixed: bool) -> Program:
    """Pairs compared with all others of a large batch, whose vectors are made in pieces: once to compare them, once to
    learn."""
    blocks, width, pieces = _blocks(s, 768, 12, 6), s.pick(768, 32), s.pick(4, 2)
    optimizer = fresh.adamw(s, blocks)
    batches = [_bf16(s, s.pick(128, 2), s.pick(128, 8), width) for _ in range(pieces)]

    def vectors(x: Tensor) -> Tensor:
        return F.normalize(blocks(x).mean(1).float(), dim=-1)

    def step() -> None:
        with torch.no_grad():
            known = torch.cat([vectors(x) for x in batches])
        known.requires_grad_()
        first, second = known.chunk(2)
        F.cross_entropy(first @ second.T / 0.07, torch.arange(len(first), device=s.device)).backward()
        for x, slope in zip(batches, known.grad.chunk(pieces), strict=True):
            vectors(x).backward(slope)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step, lambda: precision("high"))


@healthy
def healthy_hardened(s: Setting, fixed: bool) -> Program:
    """Pictures changed for the worse seven times, and then learned from."""
    model = fresh.nhwc(s.place(lambda: nets.convolutions(s.pick(96, 8), s.pick(10, 8))))
    pictures = fresh.nhwc(_bf16(s, s.pick(384, 2), 3, s.pick(64, 16), s.pick(64, 16)))
    truth, optimizer = _ints(s, s.pick(10, 8), len(pictures)), fresh.sgd(s, model)

    def step() -> None:
        x = pictures
        for _ in range(7):
            x = x.detach().requires_grad_()
            slope = torch.autograd.grad(F.cross_entropy(model(x), truth), x)[0]
            x = x.detach().add(slope.sign(), alpha=0.01)
        F.cross_entropy(model(x), truth).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_energies(s: Setting, fixed: bool) -> Program:
    """Pictures that slide down a learned energy for ten steps."""
    model = fresh.nhwc(s.place(lambda: nets.convolutions(s.pick(128, 8), 8))).requires_grad_(False)
    pictures = fresh.nhwc(_bf16(s, s.pick(256, 2), 3, s.pick(64, 16), s.pick(64, 16)))

    def step() -> None:
        x = pictures
        for _ in range(10):
            x = x.detach().requires_grad_()
            slope = torch.autograd.grad(model(x)[:, 0].sum(), x)[0]
            x = torch.sub(x.detach(), slope, alpha=0.01)

    return Program(step)


@healthy
def healthy_private(s: Setting, fixed: bool) -> Program:
    """Gradients of every sample by itself, cut to one length and blurred before they are summed."""
    width, rows = s.pick(512, 8), s.pick(4096, 4)
    model = s.place(lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 64)), torch.float32)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    x, truth = torch.randn(rows, width, device=s.device), _ints(s, 64, rows)

    def loss(weights: dict[str, Tensor], one: Tensor, right: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, one[None]), right[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    @torch.no_grad()
    def step() -> None:
        found = each(weights, x, truth)
        sizes = torch.stack([part.flatten(1).norm(dim=1) for part in found.values()]).norm(dim=0)
        share = (1.0 / (sizes + 1e-6)).clamp(max=1.0)
        for name, part in found.items():
            summed = torch.einsum("b,b...->...", share, part)
            weights[name].sub_(summed.add_(torch.randn_like(summed)), alpha=1e-3)

    return Program(step, lambda: precision("high"))


# ---------------------------------------------------------------- pictures and sound


@healthy
def healthy_flows(s: Setting, fixed: bool) -> Program:
    """Where every place of a picture went, found by looking up what matches and correcting again and again."""
    wide, side, batch = s.pick(128, 8), s.pick(56, 8), s.pick(96, 2)
    model = fresh.nhwc(s.place(lambda: nets.Corrector(wide)))
    first, second = (fresh.nhwc(_bf16(s, batch, wide, side, side)) for _ in range(2))
    start = torch.zeros(batch, side, side, 2, device=s.device, dtype=torch.bfloat16)
    return _learning(s, model, lambda: model(first, second, start, s.pick(6, 2)).float().square().mean())


@healthy
def healthy_masked_convolutions(s: Setting, fixed: bool) -> Program:
    """Pictures guessed point by point: convolutions that only see what was before."""
    model = fresh.nhwc(s.place(lambda: nets.before_only(s.pick(128, 8), s.pick(8, 2))))
    pictures = fresh.nhwc(_bf16(s, s.pick(64, 2), 8, s.pick(64, 8), s.pick(64, 8)))
    truth = _ints(s, s.pick(256, 8), s.pick(64, 2), s.pick(64, 8), s.pick(64, 8))
    head = s.place(lambda: nn.Linear(s.pick(128, 8), s.pick(256, 8)))

    def loss() -> Tensor:
        return F.cross_entropy(head(model(pictures).permute(0, 2, 3, 1)).flatten(0, 2), truth.flatten())

    return _learning(s, nn.ModuleList([model, head]), loss)


@healthy
def healthy_vocoder(s: Setting, fixed: bool) -> Program:
    """Sound made out of spectra by transposed convolutions along time."""
    model = s.place(lambda: nets.vocoder(s.pick(512, 16))).eval()
    spectra = _bf16(s, s.pick(16, 2), 80, s.pick(512, 8))

    @torch.inference_mode()
    def step() -> None:
        model(spectra)

    return Program(step)


@healthy
def healthy_hub_pairs(s: Setting, fixed: bool) -> Program:
    """Pictures and the texts below them, compared by a model of a hub."""
    return _learning(s, *_pairs(s))


def _pairs(s: Setting) -> tuple[nn.Module, Callable[[], Tensor]]:
    from transformers import CLIPConfig, CLIPModel

    toy = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    full = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 8}
    text = s.pick(full | {"vocab_size": 49408}, toy | {"vocab_size": 96, "eos_token_id": 2})
    sight = s.pick(
        full | {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "patch_size": 16},
        toy | {"image_size": 32, "patch_size": 8},
    )
    config = CLIPConfig(text_config=text | {"hidden_act": "gelu"}, vision_config=sight | {"hidden_act": "gelu"})
    config._attn_implementation = "sdpa"
    model = fresh.nhwc(s.place(lambda: CLIPModel(config))).train()
    ids = _ints(s, s.pick(49000, 90), s.pick(128, 2), s.pick(77, 8))
    pictures = fresh.nhwc(_bf16(s, s.pick(128, 2), 3, s.pick(224, 32), s.pick(224, 32)))
    return model, (lambda: model(input_ids=ids, pixel_values=pictures, return_loss=True).loss)


# ---------------------------------------------------------------- sciences and rankings


@healthy
def healthy_listwise(s: Setting, fixed: bool) -> Program:
    """Goods put into order, learned from whole lists."""
    lists, num, width = s.pick(128, 2), s.pick(2048, 8), s.pick(1024, 16)
    make = lambda: (part for i in (s.pick(256, 8), width, width) for part in (nn.Linear(i, width), nn.ReLU(True)))
    model = s.place(lambda: nn.Sequential(*make(), nn.Linear(width, 8)))
    x, order = _bf16(s, lists, num, s.pick(256, 8)), torch.rand(lists, num, device=s.device).argsort(1)

    def loss() -> Tensor:
        scores = model(x)[..., 0].float().gather(1, order)
        return (scores.flip(1).logcumsumexp(1) - scores.flip(1)).mean()

    return _learning(s, model, loss)


@healthy
def healthy_nonnegative(s: Setting, fixed: bool) -> Program:
    """A table as a product of two without negative values, by turns."""
    rows, columns, deep = s.pick(16384, 16), s.pick(16384, 16), s.pick(256, 4)
    table = torch.rand(rows, columns, device=s.device)
    left, right = torch.rand(rows, deep, device=s.device), torch.rand(deep, columns, device=s.device)

    @torch.no_grad()
    def step() -> None:
        for _ in range(2):
            right.mul_((left.T @ table).div_((left.T @ left) @ right))
            left.mul_((table @ right.T).div_(left @ (right @ right.T)))

    return Program(step, lambda: precision("high"))


@healthy
def healthy_many_spectra(s: Setting, fixed: bool) -> Program:
    """Many small symmetric matrices taken apart, and put together again after a change of their values."""
    num, side = s.pick(8192, 4), s.pick(32, 4)
    x = torch.randn(num, side, side, device=s.device)
    given = x @ x.mT

    @torch.no_grad()
    def step() -> None:
        values, vectors = torch.linalg.eigh(given)
        torch.baddbmm(given, vectors * values.clamp(max=1.0)[:, None], vectors.mT)

    return Program(step, lambda: precision("high"))


@healthy
def healthy_fake_quantized(s: Setting, fixed: bool) -> Program:
    """Layers that learn as if their weights had eight bits."""
    width = s.pick(2048, 16)
    model = s.place(lambda: nn.Sequential(*(nets.Rounded(width) for _ in range(s.pick(8, 2)))), torch.float32)
    x = torch.randn(s.pick(16384, 8), width, device=s.device)
    program = _learning(s, model, lambda: F.mse_loss(model(x), x))
    return Program(program.step, lambda: precision("high"))
