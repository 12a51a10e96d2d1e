"""Networks in plain JAX, exported and imported, beside PyTorch twins: results against JAX, prices against the twins.

    python lab/importers/jax_twins.py [--on h200] [--only NAME]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

B, S, H, HEADS, LAYERS = 8, 128, 512, 8, 4


class Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(H, 3 * H, bias=False), nn.Linear(H, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.reshape(B, -1, HEADS, H // HEADS).transpose(1, 2) for t in self.qkv(x).split(H, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Encoder(nn.Module):
    def __init__(self, approximate: str) -> None:
        super().__init__()
        self.approximate = approximate
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(2 * LAYERS))
        self.attentions = nn.ModuleList(Attention(False) for _ in range(LAYERS))
        self.ups = nn.ModuleList(nn.Linear(H, 4 * H) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(4 * H, H) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(LAYERS):
            x = x + self.attentions[i](self.norms[2 * i](x))
            x = x + self.downs[i](F.gelu(self.ups[i](self.norms[2 * i + 1](x)), approximate=self.approximate))
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(H, eps=1e-6) for _ in range(2 * LAYERS))
        self.attentions = nn.ModuleList(Attention(True) for _ in range(LAYERS))
        self.gates = nn.ModuleList(nn.Linear(H, 4 * H, bias=False) for _ in range(LAYERS))
        self.ups = nn.ModuleList(nn.Linear(H, 4 * H, bias=False) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(4 * H, H, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(LAYERS):
            x = x + self.attentions[i](self.norms[2 * i](x))
            y = self.norms[2 * i + 1](x)
            x = x + self.downs[i](F.silu(self.gates[i](y)) * self.ups[i](y))
        return x


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else 64, 64, 3, padding=1) for i in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, conv in enumerate(self.convs):
            x = F.relu(conv(x))
            x = F.max_pool2d(x, 2) if i % 2 else x
        return F.softmax(self.head(x.mean((2, 3))), -1)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(H, H) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x), approximate="tanh")
        return F.log_softmax(x, -1)


def in_jax(net: nn.Module) -> Callable[..., Any]:
    """The same network in JAX: a function of its weights and its input."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def attention(w: Any, path: str, x: Any, causal: bool) -> Any:
        q, k, v = (t.reshape(B, -1, HEADS, H // HEADS) for t in jnp.split(x @ w[path + "qkv.weight"].T, 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(H // HEADS).astype("float32")
        if causal:
            size = x.shape[1]
            scores = jnp.where(jnp.tril(jnp.ones((size, size), bool)), scores, -1e9)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v).reshape(x.shape)
        return y @ w[path + "out.weight"].T

    def layer_norm(w: Any, path: str, x: Any) -> Any:
        mean = x.mean(-1, keepdims=True)
        var = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(var + 1e-5) * w[path + ".weight"] + w[path + ".bias"]

    def rms_norm(w: Any, path: str, x: Any) -> Any:
        return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w[path + ".weight"]

    def dense(w: Any, path: str, x: Any) -> Any:
        y = x @ w[path + ".weight"].T
        return y + w[path + ".bias"] if path + ".bias" in w else y

    def run(w: Any, x: Any) -> Any:
        if isinstance(net, (Encoder, Decoder)):
            norm = layer_norm if isinstance(net, Encoder) else rms_norm
            for i in range(LAYERS):
                x = x + attention(w, f"attentions.{i}.", norm(w, f"norms.{2 * i}", x), isinstance(net, Decoder))
                y = norm(w, f"norms.{2 * i + 1}", x)
                if isinstance(net, Encoder):
                    y = jax.nn.gelu(dense(w, f"ups.{i}", y), approximate=net.approximate == "tanh")
                else:
                    y = jax.nn.silu(dense(w, f"gates.{i}", y)) * dense(w, f"ups.{i}", y)
                x = x + dense(w, f"downs.{i}", y)
            return x
        if isinstance(net, Convolutions):
            for i in range(len(net.convs)):
                y = lax.conv_general_dilated(x, w[f"convs.{i}.weight"], (1, 1), "SAME")
                x = jax.nn.relu(y + w[f"convs.{i}.bias"][:, None, None])
                if i % 2:
                    x = lax.reduce_window(x, -np.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
            return jax.nn.softmax(dense(w, "head", x.mean((2, 3))), -1)
        for i in range(len(net.layers)):
            x = jax.nn.gelu(dense(w, f"layers.{i}", x))
        return jax.nn.log_softmax(x, -1)

    return run


NETS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "encoder": lambda: (Encoder("none"), (B, S, H)), "encoder-tanh": lambda: (Encoder("tanh"), (B, S, H)),
    "decoder": lambda: (Decoder(), (B, S, H)), "convolutions": lambda: (Convolutions(), (B, 3, 32, 32)),
    "perceptron": lambda: (Perceptron(), (64, H)),
}  # fmt: skip


def judged(name: str, on: str) -> dict[str, Any]:
    import jax

    import ridgeline as rl

    torch.manual_seed(0)
    net, shape = NETS[name]()
    net.eval()
    x = torch.randn(shape)
    weights = {key: value.detach().numpy() for key, value in net.state_dict().items()}
    run = in_jax(net)
    exported = jax.export.export(jax.jit(run))(
        {key: jax.ShapeDtypeStruct(v.shape, v.dtype) for key, v in weights.items()},
        jax.ShapeDtypeStruct(shape, "float32"),
    )
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "net.mlir"
        path.write_text(exported.mlir_module())
        model = rl.load(path)
        given = tuple(torch.from_numpy(weights[key]) for key in sorted(weights)) + (x,)
        got, want = model(*given), net(x)
        theirs = torch.from_numpy(np.array(jax.jit(run)(weights, x.numpy())))
        imported, direct = rl.capture(model, given), rl.capture(net, (x,))
    ours, twin = rl.predict(imported, on=on), rl.predict(direct, on=on)
    size = float(want.abs().max())
    return {"name": name, "error": float((got - theirs).abs().max()) / size,
            "jax_from_twin": float((theirs - want).abs().max()) / size, "busy": ours.busy_s / twin.busy_s,
            "wall": ours.expected_s / twin.expected_s, "kernels": f"{ours.num_kernels}/{twin.num_kernels}"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", default="h200")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    for name in NETS:
        if not asked.only or name in asked.only.split(","):
            print(json.dumps(judged(name, asked.on)), flush=True)


if __name__ == "__main__":
    main()
