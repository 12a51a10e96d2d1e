"""The decoder: embedding, layers, norm, output projection; or, of a pipeline, the part that one stage holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.llm.model.blocks import Attention, Embedding, LatentAttention, Mlp, RMSNorm
from ridgeline.llm.model.collectives import ALONE, Groups, local, size
from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.context import Context, Packed
from ridgeline.llm.model.loss import cross_entropy_sum
from ridgeline.llm.model.moe import MoeMlp


class Layer(nn.Module):
    """Attention and MLP around the residual, with norms in front of them and, in Gemma, behind them too."""

    def __init__(self, config: ModelConfig, index: int, groups: Groups) -> None:
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(config.hidden, config.norm_eps, config.norm_offset)

        self.self_attn = (LatentAttention if config.latent else Attention)(config, index, groups)
        if config.is_moe(index):
            self.mlp: nn.Module = MoeMlp(config, groups)
        else:
            self.mlp = Mlp(config.hidden, config.intermediate, config.activation, config.mlp_bias)
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.post_norms = config.post_norms
        if config.post_norms:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    def forward(self, x: Tensor, context: Context, update: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The residual and what the MLP adds to it. The next norm adds them; ``update`` is that of the layer before."""
        y, x = (self.input_layernorm(x), x) if update is None else self.input_layernorm.add(update, x)
        y = self.self_attn(y, context)
        if self.post_norms:
            y, x = self.pre_feedforward_layernorm.add(self.post_attention_layernorm(y), x)
            return x, self.post_feedforward_layernorm(self.mlp(y))
        y, x = self.post_attention_layernorm.add(y, x)
        return x, self.mlp(y)


RunLayer = Callable[[int, Layer, Tensor, Context, Tensor | None], tuple[Tensor, Tensor]]


class Decoder(nn.Module):
    """Tokens [T] of packed documents to logits [T, vocabulary], or to the sum of their loss.

    ``layers`` are those that are built, all unless told; a first and a last stage of a pipeline also have the embedding
    and the head. Parameters are made on ``device`` (``meta`` for none) without values: ``weights`` fills them.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        layers: Iterable[int] | None = None,
        first: bool = True,
        last: bool = True,
        groups: Groups = ALONE,
        device: torch.device | str = "meta",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.groups = config, groups
        with torch.device(device):
            self.embed_tokens = Embedding(config) if first else None
            chosen = range(config.num_layers) if layers is None else layers
            self.layers = nn.ModuleDict({str(i): Layer(config, i, groups) for i in chosen})
            self.norm = RMSNorm(config.hidden, config.norm_eps, config.norm_offset) if last else None
            self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False) if last else None
        self.to(dtype)
        for name, buffer in self.named_buffers():  # the router's correction is float32 in every checkpoint
            if name.endswith("correction_bias"):
                buffer.data = buffer.data.float()
        if config.tied and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.weight
        # How one layer is run: the trainer puts recomputation around it
        self.run_layer: RunLayer = lambda i, layer, x, context, update: layer(x, context, update)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        starts: Tensor,
        targets: Tensor | None = None,
        key_starts: Tensor | None = None,
        key_index: Tensor | None = None,
        longest: int = 0,
        longest_key: int = 0,
    ) -> Tensor:
        """``x`` holds tokens, or on a later stage what the one before returned; ``targets`` asks for the loss."""
        longest = longest or int((starts[1:] - starts[:-1]).max())
        packed = Packed(positions, starts, longest, key_starts, key_index, longest_key, self.groups.context)
        return self.run(x, packed, targets)

    def run(self, x: Tensor, context: Context, targets: Tensor | None = None) -> Tensor:
        """The same with a context of another kind, such as one that has a key-value cache."""
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        update: Tensor | None = None
        for i, layer in self.layers.items():
            x, update = self.run_layer(int(i), layer, x, context, update)  # type: ignore[arg-type]
        if self.norm is None or self.lm_head is None:
            return x if update is None else x + update
        x = self.norm(x) if update is None else self.norm.add(update, x)[0]
        cap, weight = self.config.logit_softcap, local(self.lm_head.weight)
        if targets is not None:
            return cross_entropy_sum(x, weight, targets, cap, self.groups.tensor)
        if size(self.groups.tensor) > 1:
            raise NotImplementedError("logits of a tensor-parallel decoder: ask for the loss")
        logits = F.linear(x, weight)
        return (logits / cap).tanh() * cap if cap else logits

    def moe_blocks(self) -> list[MoeMlp]:
        return [layer.mlp for layer in self.layers.values() if isinstance(layer.mlp, MoeMlp)]


def packed_inputs(lengths: Iterable[int], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Positions and starts of documents of these lengths, as ``Decoder.forward`` takes them."""
    lengths = list(lengths)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return {"positions": positions, "starts": starts, "longest": max(lengths)}
