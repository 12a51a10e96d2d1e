"""A sixteenth suite: twelve further healthy programs, for rules that were mended after the fifteenth, and what the
fifteenth's fixed and healthy programs were told, done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import fresh
import sixteenthnets as nets
import torch
import torch.nn.functional as F
from cases import CASES, Program, Setting, case, graphed, precision
from eleventh import _learning
from ninth import HEALTHY, PLAIN, _bf16, _ints
from sixth import _with
from tenth import TRIED
from torch import Tensor, nn

healthy = case("none", "nothing", **HEALTHY | PLAIN)
high = lambda: precision("high")

# ---------------------------------------------------------------- what was told, done


@contextmanager
def _unasked() -> Iterator[None]:
    """A hub that does not ask the device whether its mask is needed."""
    from transformers import masking_utils

    with (
        _with(masking_utils, "find_packed_sequence_indices", lambda *_: None),
        _with(masking_utils, "_ignore_causal_mask_sdpa", lambda *_, **__: True),
    ):
        yield


def _without_asking(s: Setting, name: str, fixed: bool) -> Program:
    program = CASES[name].build(s, True)
    return Program(program.step, _unasked) if fixed else program


@case("synchronization", "nobody asks whether the mask is needed", **TRIED)
def again_healthy_hub_words(s: Setting, fixed: bool) -> Program:
    return _without_asking(s, "healthy_hub_words", fixed)


@case("synchronous logging", "nobody asks whether the mask is needed", **TRIED)
def again_healthy_hub_hearing(s: Setting, fixed: bool) -> Program:
    return _without_asking(s, "healthy_hub_hearing", fixed)


@case("synchronization", "nobody asks whether the mask is needed", compiles=True, **TRIED | {"rounds": 1})
def again_hub_decoder_in_steps(s: Setting, fixed: bool) -> Program:
    return _without_asking(s, "hub_decoder_in_steps", fixed)


def _in_graph(s: Setting, name: str, fixed: bool) -> Program:
    """The step out of a CUDA graph; its optimizers keep nothing that a graph could not."""
    program = CASES[name].build(s, True)
    return Program(graphed(program.step), program.scope) if fixed and s.cuda else program


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_four_passes_zeroed(s: Setting, fixed: bool) -> Program:
    return _in_graph(s, "four_passes_zeroed", fixed)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_squeezed_channels_first(s: Setting, fixed: bool) -> Program:
    return _in_graph(s, "squeezed_channels_first", fixed)


@case("host-bound", "capture the step in a CUDA graph", **TRIED)
def again_healthy_inner_steps(s: Setting, fixed: bool) -> Program:
    return _in_graph(s, "healthy_inner_steps", fixed)


# ---------------------------------------------------------------- healthy programs


@healthy
def healthy_hub_shared(s: Setting, fixed: bool) -> Program:
    """An encoder of a hub whose layers are one and the same learns to fill words in."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    wide, vocab = s.pick(1024, 32), s.pick(30_016, 96)
    config = AlbertConfig(
        vocab_size=vocab, embedding_size=s.pick(128, 16), hidden_size=wide, num_hidden_layers=s.pick(12, 2),
        num_attention_heads=s.pick(16, 2), intermediate_size=4 * wide, hidden_act="gelu", hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=s.pick(512, 16), attn_implementation="sdpa",
    )  # fmt: skip
    model = s.place(lambda: AlbertForMaskedLM(config)).train()
    ids, said = (_ints(s, vocab, s.pick(32, 2), s.pick(512, 8)) for _ in range(2))

    def loss() -> Tensor:
        found = model.predictions(model.albert(input_ids=ids).last_hidden_state)
        return F.cross_entropy(found.flatten(0, 1), said.flatten())

    return _learning(s, model, loss)


@healthy
def healthy_hub_matched(s: Setting, fixed: bool) -> Program:
    """Pictures and texts of a hub, each pair judged by itself."""
    from transformers import SiglipConfig, SiglipModel, SiglipTextConfig, SiglipVisionConfig

    wide = s.pick(768, 32)
    both = {"hidden_size": wide, "intermediate_size": 4 * wide, "num_hidden_layers": s.pick(8, 1),
            "num_attention_heads": s.pick(12, 2), "hidden_act": "gelu", "attn_implementation": "sdpa"}  # fmt: skip
    text = SiglipTextConfig(
        vocab_size=s.pick(32000, 96), max_position_embeddings=s.pick(64, 8), pad_token_id=0, bos_token_id=1,
        eos_token_id=2, projection_size=wide, **both,
    )  # fmt: skip
    sight = SiglipVisionConfig(image_size=s.pick(224, 32), patch_size=16, **both)
    config = SiglipConfig(text_config=text.to_dict(), vision_config=sight.to_dict(), attn_implementation="sdpa")
    model = fresh.nhwc(s.place(lambda: SiglipModel(config))).train()
    ids = _ints(s, s.pick(32000, 90), s.pick(192, 2), s.pick(64, 8))
    pictures = fresh.nhwc(_bf16(s, s.pick(192, 2), 3, s.pick(224, 32), s.pick(224, 32)))
    signs = 2 * torch.eye(len(ids), device=s.device, dtype=torch.bfloat16) - 1

    def loss() -> Tensor:
        found = model(input_ids=ids, pixel_values=pictures)
        return -F.logsigmoid(signs * found.logits_per_text).sum(-1).mean()

    return _learning(s, model, loss)


@healthy
def healthy_speech_blocks(s: Setting, fixed: bool) -> Program:
    """Speech through attention and convolutions along time in turns."""
    width, heads = s.pick(512, 32), s.pick(8, 2)
    model = s.place(lambda: nn.Sequential(*(nets.Convolved(width, heads) for _ in range(s.pick(8, 2)))))
    x = _bf16(s, s.pick(32, 2), s.pick(1024, 16), width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_read_both_ways(s: Setting, fixed: bool) -> Program:
    """Texts read forward and backward by cells with gates."""
    width, length = s.pick(1024, 16), s.pick(256, 8)
    model = s.place(lambda: nn.GRU(width, width, s.pick(2, 1), batch_first=True, bidirectional=True))
    x, wanted = _bf16(s, s.pick(256, 2), length, width), _bf16(s, s.pick(256, 2), length, 2 * width)
    return _learning(s, model, lambda: F.mse_loss(model(x)[0], wanted))


@healthy
def healthy_narrow_keys(s: Setting, fixed: bool) -> Program:
    """A decoder that keeps one narrow row for all keys and values of a word."""
    width, heads = s.pick(1536, 32), s.pick(16, 2)
    make = lambda: nets.LatentHeads(width, heads, s.pick(128, 16), s.pick(512, 16))
    model = s.place(lambda: nn.Sequential(*(make() for _ in range(s.pick(4, 2)))))
    x = _bf16(s, s.pick(8, 2), s.pick(1024, 8), width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_dropped(s: Setting, fixed: bool) -> Program:
    """A decoder that forgets a tenth of everything."""
    width, heads = s.pick(1024, 32), s.pick(16, 2)
    model = s.place(lambda: nn.Sequential(*(nets.Dropped(width, heads) for _ in range(s.pick(8, 2))))).train()
    x = _bf16(s, s.pick(16, 2), s.pick(1024, 8), width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_few_ask_many(s: Setting, fixed: bool) -> Program:
    """A few rows that read long inputs, layer by layer."""
    width, heads = s.pick(1024, 32), s.pick(16, 2)
    model = s.place(lambda: nn.ModuleList(nets.Asking(width, heads, s.pick(512, 4)) for _ in range(s.pick(4, 2))))
    x = _bf16(s, s.pick(8, 2), s.pick(8192, 16), width)

    def loss() -> Tensor:
        rows = None
        for part in model:
            rows = part(x, rows)
        return rows.float().square().mean()

    return _learning(s, model, loss)


@healthy
def healthy_equalized(s: Setting, fixed: bool) -> Program:
    """Pictures whose brightness is spread evenly: counts, sums of them, and a lookup."""
    num, side = s.pick(64, 2), s.pick(1024, 16)
    pictures = _ints(s, 256, num, side * side)
    ones = torch.ones(num, side * side, device=s.device, dtype=torch.int32)

    @torch.no_grad()
    def step() -> None:
        counts = torch.zeros(num, 256, device=s.device, dtype=torch.int32).scatter_add_(1, pictures, ones)
        shares = counts.cumsum(1).float().mul_(255.0 / (side * side))
        shares.gather(1, pictures).to(torch.uint8)

    return Program(step)


@healthy
def healthy_neighbors_drawn(s: Setting, fixed: bool) -> Program:
    """Nodes described by the mean of ten neighbors and of theirs, out of a table that is only read."""
    nodes, width, batch = s.pick(2_097_152, 64), s.pick(256, 16), s.pick(8192, 4)
    known = _bf16(s, nodes, width)
    first, second = (s.place(lambda: nn.Linear(2 * width, width)) for _ in range(2))
    near, far = _ints(s, nodes, batch, 10), _ints(s, nodes, batch * 10, 10)
    own, wanted = _ints(s, nodes, batch), _bf16(s, batch, width)

    def loss() -> Tensor:
        told = F.embedding_bag(far, known, mode="mean")
        inner = F.relu(first(torch.cat((known[near.flatten()], told), 1)), inplace=True)
        return F.mse_loss(second(torch.cat((known[own], inner.view(batch, 10, width).mean(1)), 1)), wanted)

    return _learning(s, nn.ModuleList([first, second]), loss)


@healthy
def healthy_two_tasks(s: Setting, fixed: bool) -> Program:
    """Two tasks whose slopes are kept from pulling against each other before the weights move."""
    width = s.pick(4096, 16)
    trunk = s.place(
        lambda: nn.Sequential(*(p for _ in range(s.pick(6, 2)) for p in (nn.Linear(width, width), nn.ReLU())))
    )
    heads = s.place(lambda: nn.ModuleList(nn.Linear(width, 64) for _ in range(2)))
    x, wanted = _bf16(s, s.pick(8192, 4), width), [_bf16(s, s.pick(8192, 4), 64) for _ in range(2)]
    weights, optimizer = list(trunk.parameters()), fresh.adamw(s, trunk)

    def step() -> None:
        found = trunk(x)
        losses = [F.mse_loss(head(found), truth) for head, truth in zip(heads, wanted, strict=True)]
        first, second = (torch.autograd.grad(loss, weights, retain_graph=not i) for i, loss in enumerate(losses))
        pairs = zip(first, second, strict=True)
        dots = torch.stack([torch.dot(a.flatten(), b.flatten()) for a, b in pairs]).sum()
        size = torch.stack(torch._foreach_norm(second)).square().sum()
        share = (dots / size).clamp(max=0.0)
        total = torch._foreach_add(torch._foreach_mul(second, 1.0 - share), first)
        for weight, slope in zip(weights, total, strict=True):
            weight.grad = slope
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_far_and_near(s: Setting, fixed: bool) -> Program:
    """Values at many points out of values at others, weighed by how near they are, in pieces."""
    rows, num, deep, wide = s.pick(32_768, 32), s.pick(16_384, 16), s.pick(64, 4), s.pick(512, 8)
    x, y = torch.randn(rows, deep, device=s.device), torch.randn(num, deep, device=s.device)
    values = torch.randn(num, wide, device=s.device)

    @torch.no_grad()
    def step() -> None:
        for part in x.chunk(s.pick(8, 2)):
            torch.cdist(part, y).neg_().exp_() @ values

    return Program(step, high)


@healthy
def healthy_grown(s: Setting, fixed: bool) -> Program:
    """Pictures grown by cells that see their neighbors, sixteen times over."""
    model = fresh.nhwc(s.place(lambda: nets.Grown(s.pick(64, 8), s.pick(256, 16)))).eval()
    start = fresh.nhwc(_bf16(s, s.pick(16, 2), s.pick(64, 8), s.pick(256, 16), s.pick(256, 16)))

    @torch.inference_mode()
    def step() -> None:
        x = start
        for _ in range(s.pick(16, 2)):
            x = model(x)

    return Program(step)
