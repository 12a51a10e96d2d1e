"""A seventeenth suite: twenty ordinary scripts as people write them (weights in fp32 under autocast, gradients clipped,
rates that change, a line every fifth step, averages of weights, batches from pinned memory), further models of a hub
among them, causes in such scripts, and what the sixteenth was told, done."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import fresh
import seventeenthnets as nets
import torch
import torch.nn.functional as F
from cases import CASES, Prefetch, Program, Setting, case, compiler, end_workers, graphed, precision
from ninth import HEALTHY, _bf16, _ints
from tenth import TRIED
from torch import Tensor, nn

LINES: dict[str, Any] = HEALTHY | {"stack": True}
"""Programs thought to be well are also recorded with their Python stack, as many people do."""
healthy = case("none", "nothing", **LINES)
high = lambda: precision("high")

EVERY = 5
"""Steps after which a script looks at its loss."""


def _script(
    s: Setting, model: nn.Module, losses: list[Callable[[], Tensor]], dtype: torch.dtype | None = torch.bfloat16,
    optimizer: torch.optim.Optimizer | None = None, average: nn.Module | None = None, clip: float = 1.0,
    close: Callable[[], None] = lambda: None,
) -> Program:  # fmt: skip
    """A training loop: one loss for every batch whose gradients are added, then clipped, applied and dropped."""
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(learned, lr=1e-4, fused=True)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 100))
    scaler = torch.amp.GradScaler(s.device, enabled=dtype is torch.float16)
    total, turns = torch.zeros((), device=s.device), itertools.count()
    kept = list(average.parameters()) if average is not None else []

    def step() -> None:
        for loss in losses:
            with torch.autocast(s.device, dtype) if dtype is not None else nullcontext():
                found = loss() / len(losses)
            scaler.scale(found).backward()
            total.add_(found.detach())
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(learned, clip)
        scaler.step(optimizer)
        scaler.update()
        rates.step()
        optimizer.zero_grad(set_to_none=True)
        if kept:
            torch._foreach_lerp_(kept, list(model.parameters()), 1e-3)
        if not next(turns) % EVERY:
            print(f"loss {total.item() / EVERY:.4f}", file=nets.NOWHERE)
            total.zero_()

    return Program(step, close=close)


def _fp32(s: Setting, make: Callable[[], nn.Module]) -> Any:
    return s.place(make, torch.float32)


def _vit(s: Setting, width: int, layers: int, **how: Any) -> Any:
    from transformers import ViTConfig

    wide = s.pick(width, 32)
    return ViTConfig(
        hidden_size=wide, num_hidden_layers=s.pick(layers, 2), num_attention_heads=s.pick(width // 64, 2),
        intermediate_size=4 * wide, image_size=s.pick(224, 32), patch_size=16, num_labels=s.pick(1000, 8),
        attn_implementation="sdpa", **how,
    )  # fmt: skip


# ---------------------------------------------------------------- texts


def _texts(s: Setting, workers: int) -> Iterator[dict[str, Tensor]]:
    words = nets.Texts(s.pick(50_265, 96), s.pick(256, 12))
    num = min(workers, 1) if s.tiny else workers
    loader = torch.utils.data.DataLoader(
        words, s.pick(64, 4), num_workers=num, collate_fn=nets.padded, pin_memory=s.cuda, persistent_workers=num > 0
    )
    return iter(loader)


def _tuned_texts(s: Setting, workers: int) -> Program:
    """An encoder of a hub learns to tell texts apart; batches are padded to their longest text."""
    from transformers import RobertaConfig, RobertaForSequenceClassification

    config = RobertaConfig(
        vocab_size=s.pick(50_265, 96), hidden_size=s.pick(768, 32), num_hidden_layers=s.pick(12, 2), num_labels=2,
        num_attention_heads=s.pick(12, 2), intermediate_size=s.pick(3072, 64),
        max_position_embeddings=s.pick(514, 20), attn_implementation="sdpa",
    )  # fmt: skip
    model, feed = _fp32(s, lambda: RobertaForSequenceClassification(config)).train(), _texts(s, workers)

    def loss() -> Tensor:
        batch = {name: part.to(s.device, non_blocking=True) for name, part in next(feed).items()}
        return model(**batch).loss

    return _script(s, model, [loss], close=lambda: end_workers(feed))


@case("none", "nothing", **LINES | {"rounds": 1, "warmup": 8})
def healthy_tuned_texts(s: Setting, fixed: bool) -> Program:
    return _tuned_texts(s, 6)


@case("data loader", "num_workers=0 → 6", **TRIED | {"rounds": 1, "warmup": 8, "steps": 12})
def texts_collated_in_the_loop(s: Setting, fixed: bool) -> Program:
    return _tuned_texts(s, 6 if fixed else 0)


def _compiled_words(s: Setting, accumulate: int, narrow: bool = False) -> Program:
    torch._dynamo.reset()
    model = fresh.rotary(s, 1024, 8, 16, 32064, 1024).float()
    for block in model.blocks:
        block.compile(backend=compiler(s), dynamic=False)
    feed = fresh.tokens(s, s.pick(8, 2), s.pick(1024, 16), s.pick(32064, 97))

    def loss() -> Tensor:
        """The model's own, but of logits as they are."""
        ids, said = next(feed)
        x = model.tokens(ids)
        for block in model.blocks:
            x = block(x, model.turn[: ids.shape[1]])
        logits = model.head(F.rms_norm(x, x.shape[-1:], model.norm))
        with torch.autocast(s.device, enabled=False):
            return F.cross_entropy(logits.flatten(0, 1), said.flatten())

    return _script(s, model, [loss if narrow else lambda: model(*next(feed))] * accumulate)


@case("none", "nothing", compiles=True, **LINES | {"rounds": 1})
def healthy_compiled_words(s: Setting, fixed: bool) -> Program:
    """A decoder whose blocks are compiled, trained over four batches a step."""
    return _compiled_words(s, 4)


@healthy
def healthy_tuned_adapters(s: Setting, fixed: bool) -> Program:
    """Adapters in a decoder of a hub whose own weights rest in bf16."""
    return _tuned_adapters(s, compiled=False)


def _tuned_adapters(s: Setting, compiled: bool, wide_loss: bool = True) -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    wide, vocab = s.pick(2048, 32), s.pick(32_000, 96)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=wide, intermediate_size=s.pick(5632, 64), num_hidden_layers=s.pick(8, 2),
        num_attention_heads=s.pick(16, 2), num_key_value_heads=s.pick(8, 2), attn_implementation="sdpa",
        use_cache=False,
    )  # fmt: skip
    model = s.place(lambda: LlamaForCausalLM(config)).train().requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, nets.Adapted(getattr(layer.self_attn, name), s.pick(16, 2)).to(s.device))
    for layer in model.model.layers if compiled else ():
        layer.compile(backend=compiler(s), dynamic=False)
    ids = _ints(s, vocab, s.pick(8, 2), s.pick(1024, 8))
    own = lambda: model(input_ids=ids, labels=ids).loss
    return _script(s, model, [own if wide_loss else lambda: _judged_as_they_are(s, model(input_ids=ids).logits, ids)])


def _judged_as_they_are(s: Setting, logits: Tensor, ids: Tensor) -> Tensor:
    with torch.autocast(s.device, enabled=False):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@healthy
def healthy_tuned_summaries(s: Setting, fixed: bool) -> Program:
    """A writer of summaries of a hub, with places that are learned."""
    from transformers import T5Config, T5ForConditionalGeneration

    wide = s.pick(768, 32)
    config = T5Config(
        vocab_size=s.pick(32_128, 96), d_model=wide, d_kv=s.pick(64, 16), d_ff=s.pick(3072, 64),
        num_layers=s.pick(8, 2), num_heads=s.pick(12, 2), decoder_start_token_id=0, dropout_rate=0.0, use_cache=False,
    )  # fmt: skip
    model = s.place(lambda: T5ForConditionalGeneration(config)).train()
    ids, said = (_ints(s, s.pick(32_000, 90), s.pick(16, 2), s.pick(length, 8)) for length in (512, 128))
    return _script(s, model, [lambda: model(input_ids=ids, labels=said).loss], None)


@healthy
def healthy_tuned_experts(s: Setting, fixed: bool) -> Program:
    """A mixture of experts of a hub."""
    return _tuned_experts(s, wide_loss=True)


def _tuned_experts(s: Setting, wide_loss: bool) -> Program:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    wide, vocab = s.pick(1024, 32), s.pick(32_000, 96)
    config = Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=wide, moe_intermediate_size=s.pick(768, 16), num_hidden_layers=s.pick(4, 2),
        num_attention_heads=s.pick(16, 2), num_key_value_heads=s.pick(4, 2), head_dim=s.pick(64, 16),
        num_experts=s.pick(16, 4), num_experts_per_tok=2, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = s.place(lambda: Qwen3MoeForCausalLM(config)).train()
    ids = _ints(s, vocab, s.pick(8, 2), s.pick(1024, 8))
    if wide_loss:
        return _script(s, model, [lambda: model(input_ids=ids, labels=ids).loss], None)
    logits = lambda: model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return _script(s, model, [lambda: F.cross_entropy(logits(), ids[:, 1:].flatten())], None)


@healthy
def healthy_remembered_words(s: Setting, fixed: bool) -> Program:
    """A language model of cells with gates, cut every so many words."""
    wide, vocab = s.pick(1536, 16), s.pick(32_000, 96)
    model = s.place(lambda: nets.Cells(vocab, wide, s.pick(2, 1)))
    ids = _ints(s, vocab, s.pick(128, 2), s.pick(129, 9))
    state = tuple(_bf16(s, s.pick(2, 1), len(ids), wide) for _ in range(2))
    return _script(s, model, [lambda: model(ids[:, :-1], ids[:, 1:], state)], None, clip=0.25)


def _judged(s: Setting, each: bool) -> Program:
    """A classifier of a hub looked over a set: what it gets right is counted on the device, or read batch by batch."""
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(
        vocab_size=s.pick(30_522, 96), dim=s.pick(768, 32), n_layers=s.pick(6, 2), n_heads=s.pick(12, 2),
        hidden_dim=s.pick(3072, 64), max_position_embeddings=s.pick(512, 16), num_labels=8, attn_implementation="sdpa",
    )  # fmt: skip
    model = s.place(lambda: DistilBertForSequenceClassification(config)).eval()
    draw = lambda: (_ints(s, s.pick(30_000, 90), s.pick(192, 2), s.pick(128, 8)), _ints(s, 8, s.pick(192, 2)))
    batches, counts = [draw() for _ in range(8)], torch.zeros(3, device=s.device)

    @torch.inference_mode()
    def step() -> None:
        for ids, truth in batches:
            logits = model(input_ids=ids).logits.float()
            right = logits.argmax(-1) == truth
            sums = torch.stack((right.sum(), F.cross_entropy(logits, truth), logits.max()))
            if each:
                _ = [part.item() for part in sums]
            counts.add_(sums)

    return Program(step)


@healthy
def healthy_judged(s: Setting, fixed: bool) -> Program:
    return _judged(s, each=False)


@case("synchronization", "counts stay on the device until the set is through", **TRIED)
def counts_read_after_each_batch(s: Setting, fixed: bool) -> Program:
    return _judged(s, each=not fixed)


@healthy
def healthy_drawn_words(s: Setting, fixed: bool) -> Program:
    """Sixteen words out of a graph, each drawn from the likeliest fifty, then read together."""
    model = fresh.rotary(s, 2048, 12, 16, 32064, 1024, batch=s.pick(32, 2)).eval()
    ids = torch.zeros(s.pick(32, 2), 1, dtype=torch.long, device=s.device)
    place = torch.full((1,), s.pick(500, 5), dtype=torch.long, device=s.device)
    kept = s.pinned(torch.zeros(16, len(ids), dtype=torch.long))

    @torch.no_grad()
    def word() -> None:
        found, which = model.following(ids, place).flatten(0, -2).float().topk(s.pick(50, 5))
        chance = found.softmax(-1) / torch.empty_like(found).exponential_()
        ids.copy_(which.gather(-1, chance.argmax(-1, keepdim=True)))

    again = graphed(word) if s.cuda else word

    def step() -> None:
        for i in range(16):
            again()
            kept[i].copy_(ids[:, 0], non_blocking=True)

    return Program(step)


# ---------------------------------------------------------------- pictures


@healthy
def healthy_tuned_pictures(s: Setting, fixed: bool) -> Program:
    """The usual residual network in fp16, its losses scaled, pictures copied ahead."""
    model = fresh.nhwc(_fp32(s, lambda: nets.Residual(s.pick((3, 4, 6, 3), (1, 1)), s.pick(64, 8), s.pick(1000, 8))))
    side, num = s.pick(224, 32), s.pick(96, 2)
    host = (s.pinned(fresh.nhwc(torch.randn(num, 3, side, side))), s.pinned(torch.randint(0, s.pick(1000, 8), (num,))))
    feed = iter(Prefetch(s, itertools.cycle([host])))

    def loss() -> Tensor:
        pictures, truth = next(feed)
        return F.cross_entropy(model(pictures), truth, label_smoothing=0.1)

    return _script(s, model, [loss], torch.float16 if s.cuda else torch.bfloat16, fresh.sgd(s, model))


@case("none", "nothing", compiles=True, **LINES | {"rounds": 1})
def healthy_compiled_sight(s: Setting, fixed: bool) -> Program:
    """A vision transformer of a hub whose layers are compiled; pictures are mixed in pairs."""
    from transformers import ViTForImageClassification

    torch._dynamo.reset()
    model = fresh.nhwc(_fp32(s, lambda: ViTForImageClassification(_vit(s, 768, 8)))).train()
    for layer in model.vit.encoder.layer if hasattr(model.vit, "encoder") else model.vit.layers:
        layer.compile(backend=compiler(s), dynamic=False)
    side, num = s.pick(224, 32), s.pick(128, 2)
    pictures = fresh.nhwc(torch.randn(num, 3, side, side, device=s.device))
    truth = _ints(s, s.pick(1000, 8), num)

    def loss() -> Tensor:
        logits = model(pixel_values=0.8 * pictures + 0.2 * pictures.flip(0)).logits
        return 0.8 * F.cross_entropy(logits, truth) + 0.2 * F.cross_entropy(logits, truth.flip(0))

    return _script(s, model, [loss])


@healthy
def healthy_tuned_outlines(s: Setting, fixed: bool) -> Program:
    """Every pixel labeled by a model of a hub."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        hidden_sizes=s.pick([64, 128, 320, 512], [16, 16, 16, 16]), depths=s.pick([2, 2, 2, 2], [1, 1, 1, 1]),
        decoder_hidden_size=s.pick(256, 16), num_labels=s.pick(152, 8),
    )  # fmt: skip
    model = fresh.nhwc(_fp32(s, lambda: SegformerForSemanticSegmentation(config))).train()
    side, num = s.pick(512, 64), s.pick(16, 2)
    pictures, truth = (
        fresh.nhwc(torch.randn(num, 3, side, side, device=s.device)),
        _ints(s, s.pick(150, 8), num, side, side),
    )
    return _script(s, model, [lambda: model(pixel_values=pictures, labels=truth).loss])


@healthy
def healthy_averaged_diffusion(s: Setting, fixed: bool) -> Program:
    """A network that takes noise away, with an average of its weights beside it."""
    return _diffusion(s, *(fresh.nhwc(_fp32(s, lambda: nets.Denoiser(s.pick(256, 16)))) for _ in range(2)))


def _diffusion(s: Setting, model: nn.Module, average: nn.Module) -> Program:
    clean = fresh.nhwc(torch.randn(s.pick(64, 2), 4, s.pick(64, 8), s.pick(64, 8), device=s.device))

    def loss() -> Tensor:
        noise, time = torch.randn_like(clean), torch.rand(len(clean), device=s.device)
        share = time[:, None, None, None]
        return F.mse_loss(model(clean.lerp(noise, share), time), noise)

    return _script(s, model, [loss], average=average.requires_grad_(False))


def _restored(s: Setting, last: bool) -> Program:
    """Small pictures made large by a network without norms."""
    model, side = _fp32(s, lambda: nets.Restorer(s.pick(128, 8), s.pick(12, 2))), s.pick(96, 8)
    small, large = (torch.randn(s.pick(16, 2), 3, side * by, side * by, device=s.device) for by in (1, 2))
    if last:
        model, small, large = fresh.nhwc(model, small, large)
    return _script(s, model, [lambda: F.l1_loss(model(small), large)])


@healthy
def healthy_restored(s: Setting, fixed: bool) -> Program:
    return _restored(s, last=True)


@case("NCHW convolution", "model and pictures in channels_last", **TRIED)
def restored_channels_first(s: Setting, fixed: bool) -> Program:
    return _restored(s, last=fixed)


@healthy
def healthy_student_and_teacher(s: Setting, fixed: bool) -> Program:
    """Two views of a picture, one described by an average of the weights."""
    student, teacher = (fresh.nhwc(fresh.plain(s, (128, 256, 512), 2, torch.float32)) for _ in range(2))
    pictures = fresh.nhwc(fresh.images(s, 96, 128, torch.float32)[0])
    described = lambda net, x: F.normalize(net.head(nn.Sequential(*net.stages)(x).mean((2, 3))).float(), dim=1)

    def loss() -> Tensor:
        with torch.no_grad():
            wanted = described(teacher, pictures.flip(-1))
        return (2 - 2 * (described(student, pictures) * wanted).sum(1)).mean()

    return _script(s, student, [loss], average=teacher.requires_grad_(False))


def _seen(s: Setting, setting: str) -> Program:
    """Pictures described in fp32."""
    from transformers import ViTModel

    model = fresh.nhwc(_fp32(s, lambda: ViTModel(_vit(s, 768, 6), add_pooling_layer=False))).eval()
    side = s.pick(224, 32)
    pictures = fresh.nhwc(torch.randn(s.pick(96, 2), 3, side, side, device=s.device))

    @torch.inference_mode()
    def step() -> None:
        model(pixel_values=pictures).last_hidden_state[:, 0].norm(dim=-1)

    return Program(step, lambda: precision(setting))


@healthy
def healthy_seen_in_tf32(s: Setting, fixed: bool) -> Program:
    return _seen(s, "high")


@case("fp32 matmul", 'set_float32_matmul_precision("high")', **TRIED)
def seen_in_fp32(s: Setting, fixed: bool) -> Program:
    return _seen(s, "high" if fixed else "highest")


@healthy
def healthy_tuned_clips(s: Setting, fixed: bool) -> Program:
    """Clips told apart by a model of a hub."""
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    side, wide = s.pick(224, 32), s.pick(768, 32)
    config = VideoMAEConfig(
        image_size=side, num_frames=s.pick(16, 4), hidden_size=wide, num_hidden_layers=s.pick(6, 2),
        num_attention_heads=s.pick(12, 2), intermediate_size=4 * wide, num_labels=s.pick(400, 8),
        attn_implementation="sdpa",
    )  # fmt: skip
    model = _fp32(s, lambda: VideoMAEForVideoClassification(config)).train()
    clips = torch.randn(s.pick(8, 2), s.pick(16, 4), 3, side, side, device=s.device)
    truth = _ints(s, s.pick(400, 8), len(clips))
    return _script(s, model, [lambda: model(pixel_values=clips, labels=truth).loss])


# ---------------------------------------------------------------- tables, series, policies, relations


@healthy
def healthy_columns_attend(s: Setting, fixed: bool) -> Program:
    """Rows of a table whose columns look at each other."""
    num, wide = s.pick(64, 6), s.pick(192, 16)
    model = _fp32(s, lambda: nets.Columns(num, wide, s.pick(8, 2), s.pick(4, 1)))
    x, truth = torch.randn(s.pick(2048, 4), num, device=s.device), torch.rand(s.pick(2048, 4), device=s.device).round()
    return _script(s, model, [lambda: F.binary_cross_entropy_with_logits(model(x).float(), truth)])


def _series(s: Setting, ahead: bool) -> Program:
    """Series cut into patches; what comes next is foretold for each channel. Batches are copied ahead out of pinned
    memory, or when they are needed, as they come."""
    model = _fp32(s, lambda: nets.Patched(s.pick(512, 32), 16, s.pick(256, 16), s.pick(4, 2), s.pick(2, 1)))
    draw = lambda length: torch.randn(s.pick(128, 2), s.pick(32, 2), length)
    batch = tuple(s.pinned(part) if ahead else part for part in (draw(s.pick(512, 32)), draw(s.pick(96, 4))))
    host: Iterator[Any] = itertools.cycle([batch])
    feed = iter(Prefetch(s, host)) if ahead else (tuple(part.to(s.device) for part in found) for found in host)

    def loss() -> Tensor:
        past, future = next(feed)
        return F.mse_loss(model(past, future.shape[-1]).float(), future)

    return _script(s, model, [loss])


@healthy
def healthy_foretold(s: Setting, fixed: bool) -> Program:
    return _series(s, ahead=True)


def _policy(s: Setting, replayed: bool) -> Program:
    """What was played is learned from in four shuffled parts, the old policy's chances kept near."""
    wide, rows = s.pick(2048, 16), s.pick(65_536, 32)
    model = _fp32(s, lambda: nets.Actor(s.pick(256, 8), wide, s.pick(32, 4)))
    seen, done = torch.randn(rows, s.pick(256, 8), device=s.device), _ints(s, s.pick(32, 4), rows)
    old, gain, worth = (torch.randn(rows, device=s.device) for _ in range(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=replayed)
    order = torch.randperm(rows, device=s.device)

    def updates() -> None:
        for part in order.chunk(4):
            with torch.autocast(s.device, torch.bfloat16):
                chances, value = model(seen[part])
            said = F.log_softmax(chances.float(), -1).gather(1, done[part, None])[:, 0]
            ratio, won = (said - old[part].clamp(-3, 0)).clamp(-2, 2).exp(), gain[part]
            lost = -torch.minimum(ratio * won, ratio.clamp(0.8, 1.2) * won).mean()
            (lost + 0.5 * F.mse_loss(value[:, 0].float(), worth[part])).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    again = graphed(updates) if replayed and s.cuda else updates

    def step() -> None:
        order.copy_(torch.randperm(rows, device=s.device))
        again()

    return Program(step)


@healthy
def healthy_policy_near_the_old(s: Setting, fixed: bool) -> Program:
    return _policy(s, replayed=False)


@healthy
def healthy_relations(s: Setting, fixed: bool) -> Program:
    """Facts about many things: those that are so against those that are not, rows of tables alone updated."""
    things, deep, num = s.pick(4_194_304, 64), s.pick(256, 8), s.pick(8192, 4)
    with torch.device(s.device):
        table, kinds = nn.Embedding(things, deep, sparse=True), nn.Embedding(64, deep, sparse=True)
    optimizer = torch.optim.SparseAdam([table.weight, kinds.weight], lr=1e-3)
    head, tail, kind = _ints(s, things, num), _ints(s, things, num), _ints(s, 64, num)

    def step() -> None:
        wrong = torch.randint(0, things, (num, s.pick(64, 2)), device=s.device)
        given = table(head) + kinds(kind)
        right = (given - table(tail)).norm(dim=-1)
        other = (given[:, None] - table(wrong)).norm(dim=-1)
        F.softplus(right[:, None] - other).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


# ---------------------------------------------------------------- further causes


def _tuned_words(s: Setting, again: bool, fused: bool, wide_loss: bool = True, compiled: bool = False) -> Program:
    """A decoder of a hub learns; what layers computed is thrown away and computed again, or kept."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    wide, vocab = s.pick(1024, 32), s.pick(32_000, 96)
    config = GPTNeoXConfig(
        vocab_size=vocab, hidden_size=wide, num_hidden_layers=s.pick(12, 2), num_attention_heads=s.pick(16, 2),
        intermediate_size=4 * wide, max_position_embeddings=s.pick(1024, 16), attn_implementation="sdpa",
        use_cache=False, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = s.place(lambda: GPTNeoXForCausalLM(config)).train()
    if again:
        model.gradient_checkpointing_enable()
    for layer in model.gpt_neox.layers if compiled else ():
        layer.compile(backend=compiler(s), dynamic=False)
    ids = _ints(s, vocab, s.pick(16, 2), s.pick(1024, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **({"fused": True} if fused else {"foreach": False}))
    if wide_loss:
        return _script(s, model, [lambda: model(input_ids=ids, labels=ids).loss], None, optimizer)
    logits = lambda: model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return _script(s, model, [lambda: F.cross_entropy(logits(), ids[:, 1:].flatten())], None, optimizer)


@case("needless recompute", "no gradient checkpointing: the memory is free", **TRIED)
def words_checkpointed(s: Setting, fixed: bool) -> Program:
    return _tuned_words(s, again=not fixed, fused=True)


@case("unfused optimizer", "fused=True", **TRIED)
def words_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    return _tuned_words(s, again=False, fused=fixed)


@case("pageable copy", "pin the series, and copy them ahead with non_blocking=True", **TRIED)
def series_pageable(s: Setting, fixed: bool) -> Program:
    return _series(s, ahead=fixed)


# ---------------------------------------------------------------- what was told, done


@case("NCHW convolution", "convolutions along time as flat pictures in channels_last", **TRIED)
def again_healthy_speech_blocks(s: Setting, fixed: bool) -> Program:
    import sixteenthnets

    program = CASES["healthy_speech_blocks"].build(s, True)
    if not fixed:
        return program
    torch.manual_seed(0)
    width, heads = s.pick(512, 32), s.pick(8, 2)
    make = lambda: nets.flattened(sixteenthnets.Convolved(width, heads))
    model = s.place(lambda: nn.Sequential(*(make() for _ in range(s.pick(8, 2)))))
    x = _bf16(s, s.pick(32, 2), s.pick(1024, 16), width)
    optimizer = fresh.adamw(s, model)

    def step() -> None:
        F.mse_loss(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Program(step)


@case("unfused pointwise chain", "torch.compile the distances", compiles=True, **TRIED | {"rounds": 1})
def again_healthy_far_and_near(s: Setting, fixed: bool) -> Program:
    if not fixed:
        return CASES["healthy_far_and_near"].build(s, True)
    torch._dynamo.reset()
    rows, num, deep, wide = s.pick(32_768, 32), s.pick(16_384, 16), s.pick(64, 4), s.pick(512, 8)
    x, y = torch.randn(rows, deep, device=s.device), torch.randn(num, deep, device=s.device)
    values = torch.randn(num, wide, device=s.device)
    weighed = torch.compile(
        lambda part: torch.cdist(part, y).neg().exp() @ values, backend=compiler(s), dynamic=False, fullgraph=True
    )

    @torch.no_grad()
    def step() -> None:
        for part in x.chunk(s.pick(8, 2)):
            weighed(part)

    return Program(step, high)


@case("fp32 logits", "the loss of the logits as they are", **TRIED)
def again_words_tensor_by_tensor(s: Setting, fixed: bool) -> Program:
    return _tuned_words(s, again=False, fused=True, wide_loss=not fixed)


@case("unfused pointwise chain", "torch.compile the parts", compiles=True, **TRIED | {"rounds": 1})
def again_healthy_averaged_diffusion(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    model, average = (fresh.nhwc(_fp32(s, lambda: nets.Denoiser(s.pick(256, 16)))) for _ in range(2))
    for part in model.parts if fixed else ():
        part.compile(backend=compiler(s), dynamic=False)
    return _diffusion(s, model, average)


@case("unfused pointwise chain", "torch.compile the layers", compiles=True, **TRIED | {"rounds": 1})
def again_healthy_tuned_adapters(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    return _tuned_adapters(s, compiled=fixed)


@case("fp32 logits", "the loss outside of autocast", compiles=True, **TRIED | {"rounds": 1})
def again_healthy_compiled_words(s: Setting, fixed: bool) -> Program:
    return _compiled_words(s, 4, narrow=fixed)


@case("host-bound", "capture the updates in a CUDA graph", **TRIED)
def again_healthy_policy_near_the_old(s: Setting, fixed: bool) -> Program:
    return _policy(s, replayed=fixed)


@case("unfused pointwise chain", "torch.compile the layers", compiles=True, **TRIED | {"rounds": 1})
def again_words_checkpointed(s: Setting, fixed: bool) -> Program:
    torch._dynamo.reset()
    return _tuned_words(s, again=False, fused=True, compiled=fixed)


@case("fp32 logits", "the loss of the logits as they are", **TRIED)
def again_healthy_tuned_experts(s: Setting, fixed: bool) -> Program:
    return _tuned_experts(s, wide_loss=not fixed)
