"""A fifteenth suite: healthy programs that show what a mistake shows (heads that are mixed, weights that are read,
tables that never learn, rows of odd number, updates of one kernel, small products, norms that walk planes), further
models of a hub, analytics and statistics, and causes in the same trades."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import fifteenthnets as nets
import fresh
import numpy as np
import torch
import torch.nn.functional as F
from cases import Program, Setting, case, compiler, precision
from eleventh import _blocks, _learning
from ninth import HEALTHY, PLAIN, _bf16, _ints, _optimized
from torch import Tensor, nn

healthy = case("none", "nothing", **HEALTHY | PLAIN)
high = lambda: precision("high")

# ---------------------------------------------------------------- models of a hub


@healthy
def healthy_hub_words(s: Setting, fixed: bool) -> Program:
    """A language model of a hub learns the next word; its loss reads the logits as they are."""
    from transformers import OPTConfig, OPTForCausalLM

    wide, vocab = s.pick(1536, 32), s.pick(32768, 96)
    config = OPTConfig(
        vocab_size=vocab, hidden_size=wide, word_embed_proj_dim=wide, ffn_dim=4 * wide, num_hidden_layers=s.pick(8, 2),
        num_attention_heads=s.pick(24, 2), max_position_embeddings=s.pick(1024, 32), dropout=0.0,
        attention_dropout=0.0, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = s.place(lambda: OPTForCausalLM(config)).train()
    ids, said = (_ints(s, vocab, s.pick(8, 2), s.pick(1024, 8)) for _ in range(2))

    def loss() -> Tensor:
        logits = model.lm_head(model.model(input_ids=ids, use_cache=False).last_hidden_state)
        return F.cross_entropy(logits.flatten(0, 1), said.flatten())

    return _learning(s, model, loss)


@healthy
def healthy_hub_sight(s: Setting, fixed: bool) -> Program:
    """Pictures described by a model of a hub."""
    from transformers import Dinov2Config, Dinov2Model

    wide = s.pick(768, 32)
    config = Dinov2Config(
        hidden_size=wide, num_hidden_layers=s.pick(12, 2), num_attention_heads=s.pick(12, 2),
        image_size=s.pick(224, 28), patch_size=14, attn_implementation="sdpa",
    )  # fmt: skip
    model = fresh.nhwc(s.place(lambda: Dinov2Model(config))).eval()
    pictures = fresh.nhwc(_bf16(s, s.pick(256, 2), 3, s.pick(224, 28), s.pick(224, 28)))

    @torch.inference_mode()
    def step() -> None:
        model(pixel_values=pictures).last_hidden_state[:, 0].float()

    return Program(step)


@healthy
def healthy_hub_hearing(s: Setting, fixed: bool) -> Program:
    """A listener of a hub learns to write down what it hears."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    wide, deep, heads, vocab = s.pick(768, 32), s.pick(6, 1), s.pick(12, 2), s.pick(51904, 96)
    config = WhisperConfig(
        vocab_size=vocab, d_model=wide, encoder_layers=deep, decoder_layers=deep, encoder_attention_heads=heads,
        decoder_attention_heads=heads, encoder_ffn_dim=4 * wide, decoder_ffn_dim=4 * wide, num_mel_bins=80,
        max_source_positions=s.pick(1500, 16), max_target_positions=s.pick(448, 16), attn_implementation="sdpa",
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, use_cache=False,
    )  # fmt: skip
    model = s.place(lambda: WhisperForConditionalGeneration(config)).train()
    heard = _bf16(s, s.pick(32, 2), 80, s.pick(3000, 32))
    ids, said = (_ints(s, vocab - 4, s.pick(32, 2), s.pick(256, 8)) + 4 for _ in range(2))

    def loss() -> Tensor:
        found = model.model(input_features=heard, decoder_input_ids=ids, use_cache=False).last_hidden_state
        return F.cross_entropy(model.proj_out(found).flatten(0, 1), said.flatten())

    return _learning(s, model, loss)


@healthy
def healthy_hub_pictures(s: Setting, fixed: bool) -> Program:
    """Convolutions in groups, a classifier of a hub that learns."""
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        embedding_size=32, hidden_sizes=s.pick([224, 448, 896], [16, 32]), depths=s.pick([2, 5, 8], [1, 1]),
        groups_width=s.pick(112, 8), layer_type="y", num_labels=s.pick(1000, 8),
    )  # fmt: skip
    model = fresh.nhwc(s.place(lambda: RegNetForImageClassification(config))).train()
    pictures = fresh.nhwc(_bf16(s, s.pick(128, 2), 3, s.pick(224, 32), s.pick(224, 32)))
    truth = _ints(s, s.pick(1000, 8), len(pictures))
    return Program(
        _optimized(fresh.sgd(s, model), lambda: F.cross_entropy(model(pixel_values=pictures).logits.float(), truth))
    )


# ---------------------------------------------------------------- attention without a fused form


@healthy
def healthy_mixed_heads(s: Setting, fixed: bool) -> Program:
    """Attention whose heads talk to each other before and after the softmax."""
    width, heads = s.pick(768, 32), s.pick(12, 2)
    model = s.place(lambda: nn.Sequential(*(nets.MixedHeads(width, heads) for _ in range(s.pick(4, 2)))))
    x = _bf16(s, s.pick(32, 2), s.pick(512, 8), width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_weights_seen(s: Setting, fixed: bool) -> Program:
    """Attention that learns where to look: its weights are compared with where it should."""
    width, heads, length = s.pick(768, 32), s.pick(12, 2), s.pick(512, 8)
    model = s.place(lambda: nn.ModuleList(nets.Seen(width, heads) for _ in range(s.pick(4, 2))))
    x, wanted = _bf16(s, s.pick(32, 2), length, width), _bf16(s, s.pick(32, 2), length, length).softmax(-1)

    def loss() -> Tensor:
        y, total = x, torch.zeros((), device=s.device)
        for part in model:
            y, weights = part(y)
            total = total + F.mse_loss(weights, wanted)
        return total + F.mse_loss(y, x)

    return _learning(s, model, loss)


@healthy
def healthy_padded_exact(s: Setting, fixed: bool) -> Program:
    """Texts of different lengths described in fp32, with products in TF32."""
    width, heads, batch, length = s.pick(768, 32), s.pick(12, 2), s.pick(32, 2), s.pick(512, 8)
    model = s.place(lambda: nn.ModuleList(nets.Masked(width, heads) for _ in range(s.pick(6, 2))), torch.float32).eval()
    x = torch.randn(batch, length, width, device=s.device)
    lengths = torch.linspace(0.75, 1.0, batch, device=s.device).mul(length).long()
    seen = (torch.arange(length, device=s.device) < lengths[:, None])[:, None, None].expand(-1, 1, length, -1)

    @torch.inference_mode()
    def step() -> None:
        y = x
        for part in model:
            y = part(y, seen)

    return Program(step, high)


# ---------------------------------------------------------------- tables, rows and updates


@healthy
def healthy_frozen_memory(s: Setting, fixed: bool) -> Program:
    """A network that looks up what it knows in a table of four million rows that never changes."""
    rows, deep, width = s.pick(4_194_304, 64), s.pick(128, 8), s.pick(2048, 32)
    known = s.place(lambda: nn.Embedding(rows, deep)).requires_grad_(False)
    model = s.place(lambda: nn.Sequential(nn.Linear(8 * deep, width), *(nets.Feed(width) for _ in range(s.pick(3, 1)))))
    near, wanted = _ints(s, rows, s.pick(8192, 4), 8), _bf16(s, s.pick(8192, 4), width)
    return _learning(s, model, lambda: F.mse_loss(model(known(near).flatten(1)), wanted))


@healthy
def healthy_tied_words(s: Setting, fixed: bool) -> Program:
    """A vocabulary of 262,144 words that is read and said with one table; the loss goes over the words in pieces."""
    vocab, width, pieces = s.pick(262_144, 96), s.pick(2048, 32), s.pick(4, 2)
    table, blocks = s.place(lambda: nn.Embedding(vocab, width)), _blocks(s, 2048, 16, 2, causal=True)
    ids, said = (_ints(s, vocab, s.pick(4, 2), s.pick(1024, 8)) for _ in range(2))
    optimizer = fresh.adamw(s, nn.ModuleList([table, blocks]))

    def step() -> None:
        found = blocks(table(ids)).flatten(0, 1)
        known = found.detach().requires_grad_()
        for part, truth in zip(known.chunk(pieces), said.flatten().chunk(pieces), strict=True):
            F.cross_entropy(F.linear(part, table.weight), truth).div(pieces).backward()
        found.backward(known.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@healthy
def healthy_odd_rows(s: Setting, fixed: bool) -> Program:
    """Samples whose number no power of two divides, as many as there were."""
    width = s.pick(2048, 32)
    model = s.place(lambda: nn.Sequential(*(nets.Feed(width) for _ in range(s.pick(6, 2)))))
    x = _bf16(s, s.pick(13_199, 7), width)
    return _learning(s, model, lambda: F.mse_loss(model(x), x))


@healthy
def healthy_signs_kept(s: Setting, fixed: bool) -> Program:
    """Large layers moved by an optimizer of the author's own: one kernel a weight, which is all there is to do."""
    width = s.pick(4096, 16)
    layers = lambda: (part for _ in range(s.pick(24, 3)) for part in (nn.Linear(width, width), nn.ReLU(True)))
    model = s.place(lambda: nn.Sequential(*layers()))
    x = _bf16(s, s.pick(4096, 8), width)
    return Program(_optimized(nets.Down(model.parameters(), 1e-3), lambda: F.mse_loss(model(x), x)))


@healthy
def healthy_buckets(s: Setting, fixed: bool) -> Program:
    """Texts sorted by length: every batch has another shape, and as many words."""
    model, width, words = _blocks(s, 768, 12, 8), s.pick(768, 32), s.pick(32768, 64)
    batches = [_bf16(s, words // n, n, width) for n in s.pick((128, 256, 512, 1024), (8, 16))]
    feed = itertools.cycle(batches)

    def loss() -> Tensor:
        x = next(feed)
        return F.mse_loss(model(x), x)

    return _learning(s, model, loss)


# ---------------------------------------------------------------- pictures


@healthy
def healthy_volumes(s: Setting, fixed: bool) -> Program:
    """Clips told apart by convolutions over space and time, channels last."""
    last = {"memory_format": torch.channels_last_3d}
    model = s.place(lambda: nets.volumes(s.pick(64, 8), s.pick(4, 1), 16)).to(**last)
    clips = _bf16(s, s.pick(16, 2), 8, s.pick(16, 4), s.pick(112, 8), s.pick(112, 8)).to(**last)
    truth = _ints(s, 16, len(clips))
    return Program(_optimized(fresh.sgd(s, model), lambda: F.cross_entropy(model(clips).float(), truth)))


@healthy
def healthy_assigned(s: Setting, fixed: bool) -> Program:
    """Boxes found in pictures, each compared with those that it fits best."""
    model = fresh.nhwc(s.place(lambda: nets.Boxed(s.pick(128, 8))))
    pictures = fresh.nhwc(_bf16(s, s.pick(32, 2), 3, s.pick(512, 32), s.pick(512, 32)))
    true = torch.rand(len(pictures), s.pick(16, 3), 4, device=s.device).sort(-1).values

    def loss() -> Tensor:
        boxes, scores = model(pictures)
        with torch.no_grad():
            wanted, how_well = nets.assigned(boxes.sigmoid(), true, scores)
        found = F.smooth_l1_loss(boxes, wanted, reduction="none").sum(-1) * how_well
        return found.mean() + F.binary_cross_entropy_with_logits(scores, how_well)

    return _learning(s, model, loss)


@healthy
def healthy_styles(s: Setting, fixed: bool) -> Program:
    """Pictures painted in another style."""
    model = s.place(lambda: nets.restyled(s.pick(64, 8), s.pick(6, 1))).eval()
    pictures = _bf16(s, s.pick(16, 2), 8, s.pick(384, 32), s.pick(384, 32))

    @torch.inference_mode()
    def step() -> None:
        model(pictures)

    return Program(step)


def _squeezed(s: Setting, last: bool) -> Program:
    layout = fresh.nhwc if last else lambda part: part
    model = layout(s.place(lambda: nets.squeezed(s.pick((48, 96, 192), (8, 16)), s.pick(3, 1), s.pick(1000, 8))))
    pictures = layout(_bf16(s, s.pick(64, 2), 3, s.pick(224, 32), s.pick(224, 32)))
    truth = _ints(s, s.pick(1000, 8), len(pictures))
    return Program(_optimized(fresh.sgd(s, model), lambda: F.cross_entropy(model(pictures).float(), truth)))


@healthy
def healthy_in_and_out(s: Setting, fixed: bool) -> Program:
    """Pictures that come over one stream and leave over another while the next ones are worked on."""
    model = fresh.nhwc(s.place(lambda: nn.Sequential(*_wide(s.pick(64, 8), s.pick(6, 1))))).eval()
    size = (s.pick(64, 2), s.pick(256, 16), s.pick(256, 16), 4)
    given, back = (s.pinned(torch.randn(size).bfloat16()) for _ in range(2))
    slots = [torch.empty(size, device=s.device, dtype=torch.bfloat16) for _ in range(2)]
    done = [torch.empty_like(slots[0]) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)] if s.cuda else []
    turn = itertools.count()

    @torch.inference_mode()
    def step() -> None:
        i = next(turn) % 2
        if streams:
            main = torch.cuda.current_stream()
            main.wait_stream(streams[0])
            main.wait_stream(streams[1])
            streams[0].wait_stream(main)
        with torch.cuda.stream(streams[0] if s.cuda else None):
            slots[1 - i].copy_(given, non_blocking=True)
        if streams:
            streams[1].wait_stream(main)
        with torch.cuda.stream(streams[1] if s.cuda else None):
            back.copy_(done[1 - i], non_blocking=True)
        done[i].copy_(model(slots[i].permute(0, 3, 1, 2)).permute(0, 2, 3, 1))

    return Program(step)


def _wide(width: int, layers: int) -> Iterator[nn.Module]:
    for i in range(layers):
        yield from (nn.Conv2d(width if i else 4, width, 3, 1, 1), nn.ReLU(True))
    yield nn.Conv2d(width, 4, 3, 1, 1)


# ---------------------------------------------------------------- graphs, columns and statistics


@healthy
def healthy_edges_weighed(s: Setting, fixed: bool) -> Program:
    """Nodes of a graph that weigh their neighbors."""
    nodes, edges, width = s.pick(131_072, 32), s.pick(1_048_576, 64), s.pick(128, 16)
    model = s.place(lambda: nn.ModuleList(nets.Edges(width, 4) for _ in range(2)), torch.float32)
    x = torch.randn(nodes, width, device=s.device)
    source, target = _ints(s, nodes, edges), _ints(s, nodes, edges).sort().values

    def loss() -> Tensor:
        y = x
        for part in model:
            y = part(y, source, target)
        return F.mse_loss(y, x)

    return Program(_learning(s, model, loss).step, high)


@healthy
def healthy_columns_sorted(s: Setting, fixed: bool) -> Program:
    """A table sorted by one column, and sums of the others over each of its values."""
    rows, groups = s.pick(33_554_432, 256), s.pick(65_536, 8)
    keys, values = _ints(s, groups, rows).int(), [torch.rand(rows, device=s.device) for _ in range(3)]
    bounds = torch.arange(groups, device=s.device, dtype=torch.int32)

    def step() -> None:
        order, which = keys.sort()
        starts = torch.searchsorted(order, bounds)
        for column in values:
            total = column.gather(0, which).cumsum(0, dtype=torch.float64)
            total.index_select(0, starts).diff()

    return Program(step)


@healthy
def healthy_boosted(s: Setting, fixed: bool) -> Program:
    """A level of a decision tree: histograms of slopes over every feature, the best cut, and who goes where."""
    rows, features, nodes, bins = s.pick(4_194_304, 64), s.pick(24, 3), s.pick(16, 2), s.pick(256, 4)
    table = _ints(s, bins, features, rows).to(torch.uint8)
    slopes = torch.randn(rows, 2, device=s.device)
    place = _ints(s, nodes, rows)

    @torch.no_grad()
    def step() -> None:
        found = torch.zeros(features, nodes * bins, 2, device=s.device)
        base = place * bins
        for feature in range(features):
            found[feature].index_add_(0, base + table[feature], slopes)
        sums = found.view(features, nodes, bins, 2).cumsum(2)
        left, total = sums, sums[:, :, -1:]
        gain = left[..., 0].square() / (left[..., 1].abs() + 1) + (total - left)[..., 0].square() / (
            (total - left)[..., 1].abs() + 1
        )
        best = gain.permute(1, 0, 2).flatten(1).argmax(1)
        feature, cut = best // bins, best % bins
        value = table.flatten().gather(0, feature[place] * rows + torch.arange(rows, device=s.device))
        (value > cut[place]).long().add_(place, alpha=2)

    return Program(step)


@healthy
def healthy_transport(s: Setting, fixed: bool) -> Program:
    """How goods move from many places to many others at least cost, by scaling rows and columns in turns."""
    num = s.pick(16384, 32)
    kernel = torch.exp(-torch.rand(num, num, device=s.device))
    left, right = torch.ones(num, device=s.device), torch.ones(num, device=s.device)
    have, want = (torch.full((num,), 1.0 / num, device=s.device) for _ in range(2))

    @torch.no_grad()
    def step() -> None:
        for _ in range(s.pick(16, 2)):
            torch.div(have, kernel @ right, out=left)
            torch.div(want, kernel.T @ left, out=right)

    return Program(step, high)


@healthy
def healthy_filters(s: Setting, fixed: bool) -> Program:
    """Many things followed at once, each by a filter of six numbers."""
    num = s.pick(262_144, 8)
    moves = torch.eye(6, device=s.device) + 0.1 * torch.eye(6, device=s.device).roll(3, 1)
    moves_N66 = moves.expand(num, 6, 6).contiguous()
    sees_N36 = torch.eye(3, 6, device=s.device).expand(num, 3, 6).contiguous()
    eye6, eye3 = torch.eye(6, device=s.device), torch.eye(3, device=s.device)
    state, spread = torch.zeros(num, 6, 1, device=s.device), eye6.expand(num, 6, 6).contiguous()
    seen = torch.randn(num, 3, 1, device=s.device)

    @torch.no_grad()
    def step() -> None:
        x, p = state, spread
        for _ in range(s.pick(8, 2)):
            x, p = moves_N66 @ x, torch.baddbmm(0.01 * eye6, moves_N66 @ p, moves_N66.mT)
            shared = torch.baddbmm(0.1 * eye3, sees_N36 @ p, sees_N36.mT)
            gain = torch.linalg.inv_ex(shared)[0].mT @ (sees_N36 @ p)
            x = torch.baddbmm(x, gain.mT, seen - sees_N36 @ x)
            p = p - gain.mT @ (sees_N36 @ p)

    return Program(step, high)


@healthy
def healthy_chains_sampled(s: Setting, fixed: bool) -> Program:
    """A thousand chains that walk where a regression is likely, each judged on all samples."""
    rows, width, chains = s.pick(262_144, 32), s.pick(512, 8), s.pick(1024, 8)
    x, truth = torch.randn(rows, width, device=s.device), (torch.rand(rows, 1, device=s.device) > 0.5).float()
    at = torch.zeros(width, chains, device=s.device)

    @torch.no_grad()
    def step() -> None:
        moves, place = torch.randn_like(at), at
        for _ in range(3):
            place = torch.add(place, moves, alpha=1e-3)
            moves = torch.sub(moves, x.T @ torch.sigmoid_(x @ place).sub_(truth), alpha=1e-3)
        kept = torch.rand(1, chains, device=s.device) < 0.9
        at.copy_(torch.where(kept, place, at))

    return Program(step, high)


# ---------------------------------------------------------------- learning in other ways


@healthy
def healthy_curvature(s: Setting, fixed: bool) -> Program:
    """A step along the curvature: slopes forward, slopes back, and a few conjugate directions, nothing asked."""
    width, num = s.pick(2048, 16), s.pick(4, 2)
    weights = [part for _ in range(num) for part in (0.02 * _bf16(s, width, width), _bf16(s, width))]
    x = _bf16(s, s.pick(8192, 8), width)
    run = lambda *given: nets.layers_of(list(given))(x)

    def product(direction: list[Tensor]) -> list[Tensor]:
        _, moved = torch.func.jvp(run, tuple(weights), tuple(direction))
        _, back = torch.func.vjp(run, *weights)
        return list(back(moved / len(x)))

    def step() -> None:
        y, back = torch.func.vjp(run, *weights)
        rest = list(back((x - y) / len(x)))
        direction, moved = list(rest), torch._foreach_mul(rest, 0.0)
        for _ in range(s.pick(2, 1)):
            curved = product(direction)
            torch._foreach_add_(moved, direction, alpha=0.1)
            torch._foreach_add_(rest, curved, alpha=-0.1)
            direction = torch._foreach_add(rest, direction, alpha=0.5)

    return Program(step)


@healthy
def healthy_adjoint(s: Setting, fixed: bool) -> Program:
    """A state carried along a learned field, and carried back to learn."""
    width = s.pick(1024, 16)
    field = s.place(lambda: nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)))
    x, weights = _bf16(s, s.pick(16384, 4), width), list(field.parameters())
    loss = lambda: F.mse_loss(nets.Carried.apply(field, s.pick(8, 2), x, *weights), x.flip(0))
    return _learning(s, field, loss)


@healthy
def healthy_inner_steps(s: Setting, fixed: bool) -> Program:
    """Weights from which a few steps lead far: three inner steps for each of four tasks, and one of the outer loop."""
    width, num = s.pick(2048, 16), s.pick(6, 2)
    weights = [part for _ in range(num) for part in (0.02 * _bf16(s, width, width), _bf16(s, width))]
    tasks = [(_bf16(s, s.pick(4096, 4), width), _bf16(s, s.pick(4096, 4), width)) for _ in range(s.pick(4, 2))]

    def slopes(at: list[Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        known = [weight.detach().requires_grad_() for weight in at]
        return torch.autograd.grad(F.mse_loss(nets.layers_of(known)(x), y), known)

    def step() -> None:
        total = torch._foreach_mul(weights, 0.0)
        for x, y in tasks:
            at = weights
            for _ in range(2):
                at = torch._foreach_add(at, slopes(at, x, y), alpha=-1e-3)
            torch._foreach_add_(total, slopes(at, x, y))
        torch._foreach_add_(weights, total, alpha=-1e-4)

    return Program(step)


@healthy
def healthy_half_zero(s: Setting, fixed: bool) -> Program:
    """Layers of which two values in every four are zero, stored and multiplied as such."""
    from torch.sparse import to_sparse_semi_structured

    width, num = s.pick(4096, 64), s.pick(4, 2)
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0], device=s.device, dtype=torch.bfloat16).repeat(width, width // 4)
    dense = [0.02 * _bf16(s, width, width) * mask for _ in range(num)]
    weights = [to_sparse_semi_structured(weight) if s.cuda else weight for weight in dense]
    x = _bf16(s, s.pick(16384, 64), width)

    @torch.inference_mode()
    def step() -> None:
        y = x
        for weight in weights:
            y = F.relu(F.linear(y, weight), inplace=True)

    return Program(step)


# ---------------------------------------------------------------- causes


@case("unfused pointwise chain", "torch.compile the layers", compiles=True, **PLAIN | {"rounds": 1})
def hub_decoder_in_steps(s: Setting, fixed: bool) -> Program:
    """A decoder of a hub reads prompts; its norms, positions and gates are written out."""
    from transformers import LlamaConfig, LlamaModel

    torch._dynamo.reset()
    wide = s.pick(2048, 32)
    config = LlamaConfig(
        vocab_size=s.pick(32000, 96), hidden_size=wide, intermediate_size=s.pick(5632, 64), use_cache=False,
        num_hidden_layers=s.pick(6, 2), num_attention_heads=s.pick(16, 2), num_key_value_heads=s.pick(4, 2),
        attn_implementation="sdpa",
    )  # fmt: skip
    model = s.place(lambda: LlamaModel(config)).eval()
    for layer in model.layers if fixed else ():
        layer.compile(backend=compiler(s), dynamic=False)
    ids = _ints(s, s.pick(32000, 96), s.pick(8, 2), s.pick(1024, 8))

    @torch.no_grad()
    def step() -> None:
        model(input_ids=ids, use_cache=False).last_hidden_state[:, -1].float()

    return Program(step)


@case("unfused attention", "attn_implementation='sdpa'", **PLAIN)
def hub_attends_eagerly(s: Setting, fixed: bool) -> Program:
    from transformers import ViTConfig, ViTModel

    wide, side = s.pick(768, 32), s.pick(384, 32)
    config = ViTConfig(
        hidden_size=wide, num_hidden_layers=s.pick(8, 2), num_attention_heads=s.pick(12, 2), intermediate_size=4 * wide,
        image_size=side, patch_size=16, attn_implementation="sdpa" if fixed else "eager",
    )  # fmt: skip
    model = fresh.nhwc(s.place(lambda: ViTModel(config, add_pooling_layer=False))).eval()
    pictures = fresh.nhwc(_bf16(s, s.pick(64, 2), 3, side, side))

    @torch.inference_mode()
    def step() -> None:
        model(pixel_values=pictures).last_hidden_state[:, 0].float()

    return Program(step)


@case("synchronization", "groups of sizes that are fixed beforehand", **PLAIN)
def groups_split_by_list(s: Setting, fixed: bool) -> Program:
    """Tokens sent to eight layers by a router, and the sizes of the groups read in every one of eight stages."""
    width, num, rows = s.pick(4096, 16), s.pick(8, 2), s.pick(16384, 16)
    model = s.place(lambda: nn.ModuleList(nets.Sent(width, num) for _ in range(s.pick(8, 2)))).eval()
    x, sizes = _bf16(s, rows, width), [rows // num] * num

    @torch.inference_mode()
    def step() -> None:
        y = x
        for part in model:
            y = part(y, sizes if fixed else None)

    return Program(step)


@case("gradient memsets", "zero_grad(set_to_none=True)", **PLAIN)
def four_passes_zeroed(s: Setting, fixed: bool) -> Program:
    """Gradients of four batches are added to zeros."""
    width = s.pick(4096, 16)
    layers = lambda: (part for _ in range(s.pick(16, 2)) for part in (nn.Linear(width, width), nn.ReLU(True)))
    model = s.place(lambda: nn.Sequential(*layers()))
    batches, optimizer = [_bf16(s, s.pick(512, 4), width) for _ in range(4)], fresh.sgd(s, model)

    def step() -> None:
        for x in batches:
            F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=fixed)

    return Program(step)


@case("dense embedding gradient", "sparse gradients for the table, with SparseAdam", **PLAIN)
def goods_dense_beside_towers(s: Setting, fixed: bool) -> Program:
    """Two million goods looked up beside a large network; the table's gradient has every row."""
    rows, deep, width = s.pick(2_097_152, 64), s.pick(128, 8), s.pick(2048, 16)
    with torch.device(s.device):
        table = nn.Embedding(rows, deep, sparse=fixed)
    make = lambda: (part for i in (4 * deep, *[width] * 4) for part in (nn.Linear(i, width), nn.ReLU(True)))
    model = s.place(lambda: nn.Sequential(*make(), nn.Linear(width, 8)), torch.float32)
    ids, wanted = _ints(s, rows, s.pick(8192, 4), 4), torch.rand(s.pick(8192, 4), 8, device=s.device)
    kind: Callable[..., Any] = torch.optim.SparseAdam if fixed else torch.optim.AdamW
    more: dict[str, Any] = {} if fixed else {"fused": True}
    optimizers = [fresh.adamw(s, model), kind(list(table.parameters()), lr=1e-3, **more)]

    def step() -> None:
        F.mse_loss(model(table(ids).flatten(1)), wanted).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return Program(step, high)


@case("unfused optimizer", "foreach=True", **PLAIN)
def adadelta_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    model = _blocks(s, 1024, 16, 8)
    x = _bf16(s, s.pick(32, 2), s.pick(256, 8), s.pick(1024, 32))
    optimizer = torch.optim.Adadelta(model.parameters(), foreach=fixed)
    return Program(_optimized(optimizer, lambda: F.mse_loss(model(x), x)))


@case("NCHW convolution", "model and pictures in channels_last", **PLAIN)
def squeezed_channels_first(s: Setting, fixed: bool) -> Program:
    return _squeezed(s, last=fixed)


@case("host code", "heat maps made before the loop", **PLAIN)
def targets_drawn_in_the_loop(s: Setting, fixed: bool) -> Program:
    """Where joints are, drawn as heat maps by the thread that trains."""
    side, num = s.pick(64, 8), s.pick(32, 2)
    model = fresh.nhwc(s.place(lambda: nn.Sequential(*_wide(s.pick(256, 8), s.pick(5, 2)))))
    pictures = fresh.nhwc(_bf16(s, num, 4, side, side))
    at, grid = np.random.default_rng(0).uniform(0, side, (num, 4, 2)), np.arange(side, dtype=np.float64)
    host = s.pinned(torch.empty(num, 4, side, side))

    def drawn() -> Tensor:
        for i in range(num):
            for j in range(4):
                x, y = (np.exp(-((grid - at[i, j, k]) ** 2) / 8.0) for k in range(2))
                host[i, j].copy_(torch.from_numpy(np.outer(y, x)))
        return host.to(s.device, non_blocking=True)

    known = drawn().clone()
    return _learning(s, model, lambda: F.mse_loss(model(pictures).float(), known if fixed else drawn()))
