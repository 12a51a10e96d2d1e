"""FLOPs of the zoo against the same networks counted by PyTorch on meta tensors."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from zoo_reference import REFERENCES, torch

from ridgeline.graph import Graph, Node
from ridgeline.models import build

flop_counter = pytest.importorskip("torch.utils.flop_counter")


def counted_flops(graph: Graph) -> int:
    """Twice the multiply-adds of products, convolutions and attention, as PyTorch's counter defines them."""
    return sum(_node_flops(node) * times for node, times in graph.nodes())


def _node_flops(node: Node) -> int:
    a = node.attrs
    if node.op == "matmul":
        return 2 * a["b"] * a["m"] * a["n"] * a["k"]
    if node.op == "grouped_matmul":
        return 2 * a["m"] * a["n"] * a["k"]
    if node.op == "attention":  # backward without the recomputed scores: the reference keeps them
        pair = 2 * a["b"] * a["h"] * a["s"] * a["skv"] * (a["d"] + a.get("dv", a["d"]))
        return 2 * pair if a.get("which") == "bwd" else pair
    if node.op == "conv":
        where = a["spatial"] if a["transposed"] else a["out_spatial"]
        taps = a["c"] // a["groups"] * math.prod(a["kernel"])
        passes = sum(g != "bias" for g in a["grads"]) if a["which"] == "bwd" else 1
        return 2 * a["n"] * math.prod(where) * a["o"] * taps * passes
    return 0


def _grouped_flops(a: Any, b: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """PyTorch's counter has no formula for grouped products: rows of ``a`` each meet one [k, n] of ``b``."""
    return 2 * a[0] * a[1] * b[-1]


GROUPED_OPS = {torch.ops.aten._grouped_mm: _grouped_flops}


def torch_flops(model: Any, *args: Any, backward: bool = False, **kwargs: Any) -> int:
    with (
        flop_counter.FlopCounterMode(display=False, custom_mapping=GROUPED_OPS) as counter,
        torch.set_grad_enabled(backward),
    ):
        out = model(*args, **kwargs)
        if backward:
            (out if isinstance(out, torch.Tensor) else out.logits).sum().backward()
    return counter.get_total_flops()


def ids(*shape: int) -> Any:
    return torch.zeros(shape, dtype=torch.long, device="meta")


def floats(*shape: int) -> Any:
    return torch.zeros(shape, device="meta")


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama3.2-1b": ({"input_ids": ids(2, 128)}, {"batch": 2, "seq": 128}),
    "qwen3-8b": ({"input_ids": ids(1, 64)}, {"batch": 1, "seq": 64}),
    "gpt2-xl": ({"input_ids": ids(1, 64)}, {"batch": 1, "seq": 64}),
    "gemma2-9b": ({"input_ids": ids(1, 64)}, {"batch": 1, "seq": 64}),
    "mixtral-8x7b": ({"input_ids": ids(1, 64)}, {"batch": 1, "seq": 64}),
    "gpt-oss-20b": ({"input_ids": ids(1, 64)}, {"batch": 1, "seq": 64}),
    "deepseek-v3": ({"input_ids": ids(1, 64)}, {"batch": 1, "seq": 64}),
    "bert-large": ({"input_ids": ids(2, 128)}, {"batch": 2, "seq": 128}),
    "t5-large": (
        {"input_ids": ids(2, 128), "decoder_input_ids": ids(2, 32)},
        {"batch": 2, "seq": 128, "target_seq": 32},
    ),
    "whisper-large-v3": (
        {"input_features": floats(1, 128, 3000), "decoder_input_ids": ids(1, 32)},
        {"batch": 1, "seq": 32},
    ),
    "wav2vec2-large": ({"input_values": floats(2, 16000)}, {"batch": 2, "seq": 16000}),
    "clip-vit-l14": ({"input_ids": ids(2, 77), "pixel_values": floats(2, 3, 224, 224)}, {"batch": 2}),
    "vit-b16": ({"x": floats(2, 3, 224, 224)}, {"batch": 2}),
    "swin-b": ({"x": floats(2, 3, 224, 224)}, {"batch": 2}),
    "convnext-b": ({"x": floats(2, 3, 224, 224)}, {"batch": 2}),
    "resnet50": ({"x": floats(2, 3, 224, 224)}, {"batch": 2}),
    "efficientnet-b0": ({"x": floats(2, 3, 224, 224)}, {"batch": 2}),
    "segformer-b5": ({"pixel_values": floats(1, 3, 512, 512)}, {"batch": 1, "image": 512}),
    "sd15-unet": (
        {"sample": floats(2, 4, 64, 64), "timestep": ids(2), "encoder_hidden_states": floats(2, 77, 768)},
        {"batch": 2},
    ),
    "sdxl-unet": (
        {
            "sample": floats(1, 4, 64, 64),
            "timestep": ids(1),
            "encoder_hidden_states": floats(1, 77, 2048),
            "added_cond_kwargs": {"text_embeds": floats(1, 1280), "time_ids": floats(1, 6)},
        },
        {"batch": 1, "image": 512},
    ),
    "sd3-medium": (
        {
            "hidden_states": floats(1, 16, 64, 64),
            "timestep": floats(1),
            "encoder_hidden_states": floats(1, 77, 4096),
            "pooled_projections": floats(1, 2048),
        },
        {"batch": 1, "image": 512, "seq": 77},
    ),
    "flux-dev": (
        {
            "hidden_states": floats(1, 1024, 64),
            "timestep": floats(1),
            "encoder_hidden_states": floats(1, 77, 4096),
            "pooled_projections": floats(1, 768),
            "guidance": floats(1),
            "img_ids": floats(1024, 3),
            "txt_ids": floats(77, 3),
        },
        {"batch": 1, "image": 512, "seq": 77},
    ),
}


GROUPED = {"mixtral-8x7b", "gpt-oss-20b", "deepseek-v3"}  # whose grouped products exist in bf16 alone


def reference(name: str) -> Any:
    model = REFERENCES[name]()
    return model.to(torch.bfloat16) if name in GROUPED else model


@pytest.mark.parametrize("name", CASES)
def test_forward_flops_agree_with_pytorch_within_one_percent(name: str) -> None:
    inputs, sizes = CASES[name]
    measured = torch_flops(reference(name), **inputs)
    assert counted_flops(build(name, **sizes)) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(
    "name", ["llama3.2-1b", "bert-large", "t5-large", "vit-b16", "swin-b", "resnet50", "whisper-large-v3"]
)
def test_training_flops_agree_with_autograd_within_one_percent(name: str) -> None:
    # Networks with grouped convolutions are left out: PyTorch counts their weight gradient as if it had one group.
    inputs, sizes = CASES[name]
    measured = torch_flops(reference(name).train(), **inputs, backward=True)
    assert counted_flops(build(name, mode="train", optimizer="none", **sizes)) == pytest.approx(measured, rel=0.01)
