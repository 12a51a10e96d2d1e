"""Networks of kinds that no rewrite was written for, at common sizes.

Each entry builds (model, args, kwargs) with torch's current default device and dtype, as in ``lab/workloads.py``; all
are for inference. ``lab/optimize/models.py --models NAME …`` takes their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.workloads import Built, _ids, _timm

ZOO: dict[str, Callable[[], Built]] = {}


def entry(name: str) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        ZOO[name] = build
        return build

    return register


def _text(model: nn.Module, vocab: int, batch: int, seq: int, **more: Any) -> Built:
    ids = _ids(vocab, batch, seq)
    return model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


# Images.


@entry("clip-vit-l-32")
def _() -> Built:
    from transformers import CLIPConfig, CLIPModel

    text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
              "patch_size": 14, "image_size": 224}  # fmt: skip
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=768))
    return model, (), {"input_ids": _ids(49400, 32, 77), "pixel_values": torch.randn(32, 3, 224, 224)}


@entry("dinov2-large-32")
def _() -> Built:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, patch_size=14, image_size=518)
    return Dinov2Model(config), (torch.randn(8, 3, 518, 518),), {}


@entry("deit-base-64")
def _() -> Built:
    return _timm("deit_base_patch16_224", 64)


@entry("convnextv2-base-32")
def _() -> Built:
    return _timm("convnextv2_base", 32)


@entry("regnety-64")
def _() -> Built:
    return _timm("regnety_032", 64)


@entry("resnext50-64")
def _() -> Built:
    return _timm("resnext50_32x4d", 64)


@entry("swinv2-tiny-64")
def _() -> Built:
    return _timm("swinv2_tiny_window8_256", 64, 256)


@entry("mobilenetv3-128")
def _() -> Built:
    return _timm("mobilenetv3_large_100", 128)


@entry("densenet121-64")
def _() -> Built:
    return _timm("densenet121", 64)


@entry("vgg16-64")
def _() -> Built:
    return _timm("vgg16_bn", 64)


@entry("mixer-base-64")
def _() -> Built:
    return _timm("mixer_b16_224", 64)


@entry("segformer-b2-8")
def _() -> Built:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(depths=[3, 4, 6, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768)
    return SegformerForSemanticSegmentation(config), (torch.randn(8, 3, 512, 512),), {}


@entry("sam-encoder-2")
def _() -> Built:
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionModel

    return SamVisionModel(SamVisionConfig(num_hidden_layers=12)), (torch.randn(2, 3, 1024, 1024),), {}


@entry("llava-8l-2x640")
def _() -> Built:
    """A vision-language model with 576 image tokens per text: the host checks their number."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision = CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
                              image_size=336, patch_size=14, projection_dim=768)  # fmt: skip
    text = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=8, num_attention_heads=32,
                       vocab_size=32064)  # fmt: skip
    model = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=32000))
    ids = _ids(32000, 2, 640)
    ids[:, 5:581] = 32000
    more = {"pixel_values": torch.randn(2, 3, 336, 336), "use_cache": False}
    return model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


@entry("bert-base-32x128")
def _() -> Built:
    from transformers import BertConfig, BertModel

    return _text(BertModel(BertConfig()), 30522, 32, 128)


@entry("detr-decoder-8")
def _() -> Built:
    return Detector(), (torch.randn(8, 3, 640, 640),), {}


class Detector(nn.Module):
    """A DETR-like detector: a convolutional backbone, an encoder and a decoder of a hundred queries."""

    def __init__(self, dim: int = 256) -> None:
        super().__init__()
        import timm

        self.backbone = timm.create_model("resnet50", features_only=True, out_indices=(4,))
        self.project = nn.Conv2d(2048, dim, 1)
        self.transformer = nn.Transformer(dim, 8, 6, 6, 2048, batch_first=True)
        self.queries = nn.Parameter(torch.randn(100, dim))
        self.rows, self.columns = (nn.Parameter(torch.randn(50, dim // 2)) for _ in range(2))
        self.classes, self.boxes = nn.Linear(dim, 92), nn.Linear(dim, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.project(self.backbone(images)[0])
        height, width = features.shape[-2:]
        places = torch.cat(
            [
                self.columns[:width].unsqueeze(0).repeat(height, 1, 1),
                self.rows[:height].unsqueeze(1).repeat(1, width, 1),
            ],
            dim=-1,
        ).flatten(0, 1)
        source = places.unsqueeze(0) + features.flatten(2).permute(0, 2, 1)
        found = self.transformer(source, self.queries.unsqueeze(0).expand(images.shape[0], -1, -1))
        return self.classes(found), self.boxes(found).sigmoid()


# Diffusion.


class Residual(nn.Module):
    """Two convolutions, each after GroupNorm and SiLU, with a shift by the time embedding between them."""

    def __init__(self, inside: int, outside: int, time: int = 0) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inside), nn.Conv2d(inside, outside, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outside), nn.Conv2d(outside, outside, 3, padding=1)
        self.time = nn.Linear(time, outside) if time else None
        self.skip = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor, t: Tensor | None = None) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        if self.time is not None and t is not None:
            h = h + self.time(F.silu(t))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class Attend(nn.Module):
    def __init__(self, dim: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(size, dim, bias=False) for size in (dim, context, context))
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (
            layer(each).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, each in ((self.q, x), (self.k, context), (self.v, context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Across(nn.Module):
    """Self-attention, cross-attention to the prompt, and a gated MLP, over the pixels of an image."""

    def __init__(self, dim: int, context: int, heads: int) -> None:
        super().__init__()
        self.norm, self.inside, self.outside = nn.GroupNorm(32, dim), nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, dim, 1)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.own, self.cross = Attend(dim, dim, heads), Attend(dim, context, heads)
        self.up, self.down = nn.Linear(dim, 8 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        h = self.inside(self.norm(x)).flatten(2).transpose(1, 2)
        h = h + self.own(self.norm1(h))
        h = h + self.cross(self.norm2(h), context)
        value, gate = self.up(self.norm3(h)).chunk(2, dim=-1)
        h = h + self.down(value * F.gelu(gate))
        return x + self.outside(h.transpose(1, 2).unflatten(2, (height, width)))


class UNet(nn.Module):
    """A U-Net of latent diffusion: three levels with attention to a prompt."""

    def __init__(self, base: int = 320, context: int = 768, heads: int = 8) -> None:
        super().__init__()
        sizes, time = (base, 2 * base, 4 * base), 4 * base
        self.time = nn.Sequential(nn.Linear(base, time), nn.SiLU(), nn.Linear(time, time))
        self.first = nn.Conv2d(4, base, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        widths, at = [base], base
        for level, size in enumerate(sizes):
            for _ in range(2):
                self.down.append(nn.ModuleList([Residual(at, size, time), Across(size, context, heads)]))
                at = size
                widths.append(at)
            if level < len(sizes) - 1:
                self.down.append(nn.ModuleList([nn.Conv2d(at, at, 3, stride=2, padding=1)]))
                widths.append(at)
        self.middle = nn.ModuleList([Residual(at, at, time), Across(at, context, heads), Residual(at, at, time)])
        for level, size in reversed(list(enumerate(sizes))):
            for turn in range(3):
                parts = [Residual(at + widths.pop(), size, time), Across(size, context, heads)]
                at = size
                if turn == 2 and level:
                    parts.append(nn.Conv2d(at, at, 3, padding=1))
                self.up.append(nn.ModuleList(parts))
        self.norm, self.last = nn.GroupNorm(32, at), nn.Conv2d(at, 4, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, context: Tensor) -> Tensor:
        t = self.time(t)
        kept = [x := self.first(x)]
        for parts in self.down:
            x = parts[1](parts[0](x, t), context) if len(parts) == 2 else parts[0](x)
            kept.append(x)
        x = self.middle[2](self.middle[1](self.middle[0](x, t), context), t)
        for parts in self.up:
            x = parts[1](parts[0](torch.cat([x, kept.pop()], dim=1), t), context)
            if len(parts) == 3:
                x = parts[2](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.last(F.silu(self.norm(x)))


class Joint(nn.Module):
    """A two-stream block over pixels and prompt: separate projections, joint attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.shifts = nn.ModuleList(nn.Linear(width, 6 * width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.head_norms = nn.ModuleList(nn.RMSNorm(width // heads, eps=1e-6) for _ in range(4))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
            for _ in range(2)
        )

    def forward(self, streams: tuple[Tensor, Tensor], condition: Tensor) -> tuple[Tensor, Tensor]:
        tables = [shift(F.silu(condition))[:, None].chunk(6, -1) for shift in self.shifts]
        heads = []
        for i, (x, table) in enumerate(zip(streams, tables, strict=True)):
            q, k, v = self.qkv[i](self.norm(x) * (1 + table[1]) + table[0]).unflatten(-1, (3, self.heads, -1)).unbind(2)
            heads.append((self.head_norms[2 * i](q), self.head_norms[2 * i + 1](k), v))
        q, k, v = (torch.cat(each, 1).transpose(1, 2) for each in zip(*heads, strict=True))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        parts = mixed.split([x.shape[1] for x in streams], 1)
        made = []
        for i, (x, part, table) in enumerate(zip(streams, parts, tables, strict=True)):
            x = x + table[2] * self.out[i](part)
            made.append(x + table[5] * self.feed[i](self.norm(x) * (1 + table[4]) + table[3]))
        return made[0], made[1]


class JointDiffusion(nn.Module):
    """A two-stream diffusion transformer, as Stable Diffusion 3."""

    def __init__(self, width: int = 1536, layers: int = 12, heads: int = 24) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(16, width, 2, 2), nn.Linear(4096, width)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Joint(width, heads) for _ in range(layers))
        self.last = nn.Linear(width, 64)

    def forward(self, latents: Tensor, prompt: Tensor, time: Tensor) -> Tensor:
        streams = self.patches(latents).flatten(2).transpose(1, 2), self.words(prompt)
        condition = self.time(time)
        for block in self.blocks:
            streams = block(streams, condition)
        return F.pixel_shuffle(self.last(streams[0]).transpose(1, 2).unflatten(2, (latents.shape[2] // 2, -1)), 2)


@entry("mmdit-4x64")
def _() -> Built:
    return JointDiffusion(), (torch.randn(4, 16, 64, 64), torch.randn(4, 154, 4096), torch.randn(4, 256)), {}


@entry("unet-4x64")
def _() -> Built:
    return UNet(), (torch.randn(4, 4, 64, 64), torch.randn(4, 320), torch.randn(4, 77, 768)), {}


class Decoder(nn.Module):
    """The decoder of an autoencoder: residual blocks and nearest upsampling."""

    def __init__(self, base: int = 128) -> None:
        super().__init__()
        sizes = (4 * base, 4 * base, 2 * base, base)
        layers: list[nn.Module] = [nn.Conv2d(4, sizes[0], 3, padding=1), Residual(sizes[0], sizes[0])]
        at = sizes[0]
        for level, size in enumerate(sizes):
            for _ in range(2):
                layers.append(Residual(at, size))
                at = size
            if level < 3:
                layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(at, at, 3, padding=1)]
        layers += [nn.GroupNorm(32, at), nn.SiLU(), nn.Conv2d(at, 3, 3, padding=1)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@entry("vae-decoder-2x64")
def _() -> Built:
    return Decoder(), (torch.randn(2, 4, 64, 64),), {}


# Text.


@entry("gpt-neox-8l-2x1024")
def _() -> Built:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(hidden_size=4096, num_hidden_layers=8, num_attention_heads=32, intermediate_size=16384)
    return _text(GPTNeoXForCausalLM(config), 50000, 2, 1024, use_cache=False)


@entry("falcon-8l-2x1024")
def _() -> Built:
    from transformers import FalconConfig, FalconForCausalLM

    config = FalconConfig(hidden_size=4544, num_hidden_layers=8, num_attention_heads=71)
    return _text(FalconForCausalLM(config), 65000, 2, 1024, use_cache=False)


@entry("gemma2-8l-2x1024")
def _() -> Built:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(hidden_size=2304, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
                          intermediate_size=9216, head_dim=256)  # fmt: skip
    return _text(Gemma2ForCausalLM(config), 256000, 2, 1024, use_cache=False)


@entry("phi3-8l-2x1024")
def _() -> Built:
    from transformers import Phi3Config, Phi3ForCausalLM

    config = Phi3Config(hidden_size=3072, num_hidden_layers=8, num_attention_heads=32, intermediate_size=8192,
                        pad_token_id=0)  # fmt: skip
    return _text(Phi3ForCausalLM(config), 32000, 2, 1024, use_cache=False)


@entry("qwen3-0.6b-4x512")
def _() -> Built:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
                         intermediate_size=3072, head_dim=128)  # fmt: skip
    return _text(Qwen3ForCausalLM(config), 150000, 4, 512, use_cache=False)


@entry("opt-1.3b-2x1024")
def _() -> Built:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(hidden_size=2048, num_hidden_layers=24, num_attention_heads=32, ffn_dim=8192,
                       word_embed_proj_dim=2048)  # fmt: skip
    return _text(OPTForCausalLM(config), 50000, 2, 1024, use_cache=False)


@entry("gpt2-medium-8x512")
def _() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return _text(GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16)), 50257, 8, 512, use_cache=False)


@entry("mixtral-2l-2x1024")
def _() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(hidden_size=2048, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
                           intermediate_size=7168)  # fmt: skip
    return _text(MixtralForCausalLM(config), 32000, 2, 1024, use_cache=False)


@entry("gpt-oss-4l-2x1024")
def _() -> Built:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(num_hidden_layers=4, num_local_experts=32, num_attention_heads=64, num_key_value_heads=8,
                          hidden_size=2880, intermediate_size=2880, head_dim=64, vocab_size=201088,
                          layer_types=["sliding_attention", "full_attention"] * 2)  # fmt: skip
    return _text(GptOssForCausalLM(config), 200000, 2, 1024, use_cache=False)


@entry("modernbert-base-16x512")
def _() -> Built:
    from transformers import ModernBertConfig, ModernBertModel

    return _text(ModernBertModel(ModernBertConfig()), 50000, 16, 512)


@entry("distilbert-32x128")
def _() -> Built:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    return _text(DistilBertForSequenceClassification(DistilBertConfig()), 30522, 32, 128)


@entry("electra-base-16x512")
def _() -> Built:
    from transformers import ElectraConfig, ElectraModel

    config = ElectraConfig(hidden_size=768, embedding_size=768, num_attention_heads=12, intermediate_size=3072)
    return _text(ElectraModel(config), 30522, 16, 512)


@entry("deberta-v3-base-8x256")
def _() -> Built:
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
                             relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=256,
                             share_att_key=True, norm_rel_ebd="layer_norm", max_relative_positions=-1)  # fmt: skip
    return _text(DebertaV2Model(config), 128000, 8, 256)


@entry("bart-large-8x256")
def _() -> Built:
    from transformers import BartConfig, BartModel

    return BartModel(BartConfig()), (), {"input_ids": _ids(50000, 8, 256), "decoder_input_ids": _ids(50000, 8, 64),
                                         "use_cache": False}  # fmt: skip


@entry("gpt2-decode-8x512")
def _() -> Built:
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

    model, cache = GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16)), DynamicCache()
    for layer in range(24):
        cache.update(*torch.randn(2, 8, 16, 512, 64).unbind(0), layer)
    return model, (), {"input_ids": _ids(50257, 8, 1), "past_key_values": cache, "use_cache": True}


# Sound.


@entry("hubert-large-4x160000")
def _() -> Built:
    from transformers import HubertConfig, HubertModel

    config = HubertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
                          feat_extract_norm="layer", do_stable_layer_norm=True, conv_bias=True)  # fmt: skip
    return HubertModel(config), (torch.randn(4, 160000),), {}


@entry("musicgen-decoder-4x512")
def _() -> Built:
    from transformers import MusicgenDecoderConfig
    from transformers.models.musicgen.modeling_musicgen import MusicgenForCausalLM

    config = MusicgenDecoderConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, ffn_dim=4096)
    kwargs = {"input_ids": _ids(2048, 16, 512), "encoder_hidden_states": torch.randn(4, 64, 1024), "use_cache": False}
    return MusicgenForCausalLM(config), (), kwargs


# Recommenders and graphs.


class Crossing(nn.Module):
    """DCN v2: cross layers beside a deep network, over embeddings of 26 features."""

    def __init__(self, features: int = 26, rows: int = 100_000, dim: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for _ in range(features))
        width = features * dim + 13
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())
        self.last = nn.Linear(width + 512, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x0 = torch.cat([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], dim=1)
        x = x0
        for layer in self.crosses:
            x = x0 * layer(x) + x
        return torch.sigmoid(self.last(torch.cat([x, self.deep(x0)], dim=1)))


@entry("dcnv2-8192")
def _() -> Built:
    return Crossing(), (torch.randn(8192, 13), _ids(100_000, 8192, 26)), {}


class Unit(nn.Module):
    """A layer of HSTU: pointwise attention without softmax, gated."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.first, self.last = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.bias = nn.Parameter(torch.randn(1, 1, 512, 512))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        u, v, q, k = F.silu(self.first(self.norm(x))).chunk(4, dim=-1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        scores = F.silu(q @ k.transpose(-1, -2) + self.bias) * mask / x.shape[1]
        return x + self.last(self.after((scores @ v).transpose(1, 2).flatten(2)) * u)


class Sequences(nn.Module):
    def __init__(self, items: int = 200_000, dim: int = 512, layers: int = 8) -> None:
        super().__init__()
        self.items = nn.Embedding(items, dim)
        self.layers = nn.ModuleList(Unit(dim, 8) for _ in range(layers))
        self.register_buffer("mask", torch.tril(torch.ones(512, 512)))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.items(ids)
        for layer in self.layers:
            x = layer(x, self.mask)
        return F.normalize(x, dim=-1)


@entry("hstu-32x512")
def _() -> Built:
    return Sequences(), (_ids(200_000, 32, 512),), {}


class Neighbors(nn.Module):
    """GraphSAGE with means over sampled neighbors."""

    def __init__(self, dim: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.own, self.theirs = (nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers)) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(dim) for _ in range(layers))

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = torch.zeros_like(x[:, :1]).index_add_(0, target, torch.ones_like(target, dtype=x.dtype)[:, None])
        for own, theirs, norm in zip(self.own, self.theirs, self.norms, strict=True):
            mean = torch.zeros_like(x).index_add_(0, target, x[source]) / degree.clamp(min=1)
            x = F.relu(norm(own(x) + theirs(mean)))
        return x


@entry("sage-100k")
def _() -> Built:
    return Neighbors(), (torch.randn(100_000, 256), _ids(100_000, 1_000_000), _ids(100_000, 1_000_000)), {}


class Recurrent(nn.Module):
    """Speech recognition with convolutions and LSTMs, as DeepSpeech 2."""

    def __init__(self, hidden: int = 1024) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 32, (41, 11), stride=(2, 2), padding=(20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (21, 11), stride=(2, 1), padding=(10, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.lstm = nn.LSTM(32 * 41, hidden, 5, bidirectional=True, batch_first=True)
        self.last = nn.Linear(2 * hidden, 29)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x).flatten(1, 2).transpose(1, 2)
        return self.last(self.lstm(x)[0]).log_softmax(-1)


@entry("deepspeech-16x400")
def _() -> Built:
    return Recurrent(), (torch.randn(16, 1, 161, 400),), {}
