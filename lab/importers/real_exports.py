"""Networks of transformers and timm, exported by torch.onnx, imported again, and priced against a direct capture.

    python lab/importers/real_exports.py [--only NAME] [--out FILE.jsonl] [--slow]

Each network has random weights. Columns: largest error against PyTorch relative to its largest value, the same of
ONNX Runtime; predicted busy time, wall time and wall time of a CUDA graph of the import over those of the direct
capture, and (``_kept``) over the part of it that decides the outputs and hangs on inputs or weights: exporters leave
the rest out.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():  # what torchvision expects of its binary, which a CPU build of torch cannot load
    vision_ops = torch.library.Library("torchvision", "FRAGMENT")
    for schema in ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                   "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"):  # fmt: skip
        vision_ops.define(schema)

ids = lambda *shape: torch.arange(torch.Size(shape).numel()).reshape(shape) % 90 + 3
Made = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]


class Logits(torch.nn.Module):
    """A Hugging Face model whose one output is the first of its results."""

    def __init__(self, model: torch.nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: Any) -> Any:
        return self.model(**dict(zip(self.names, args, strict=True)), return_dict=False)[0]


def hugging(config_class: str, model_class: str, names: tuple[str, ...], inputs: tuple[Any, ...],
            **config: Any) -> Callable[[], Made]:  # fmt: skip
    def make() -> Made:
        import transformers

        made = getattr(transformers, config_class)(**config)
        if hasattr(made, "use_cache"):
            made.use_cache = False
        model = getattr(transformers, model_class)(made).eval()
        return Logits(model, names), inputs, {}

    return make


def vision(name: str, size: int = 64, batch: int = 2, **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        import timm

        return timm.create_model(name, pretrained=False, **options).eval(), (torch.randn(batch, 3, size, size),), {}

    return make


TEXT = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 2048,
        "vocab_size": 200}  # fmt: skip
LM = {**TEXT, "num_key_value_heads": 4, "max_position_embeddings": 256}
PIXELS = {**{k: v for k, v in TEXT.items() if k != "vocab_size"}, "image_size": 64}
I, M = ("input_ids",), ("input_ids", "attention_mask")
PAIR = (ids(4, 128), (torch.arange(128) < torch.tensor([[128], [100], [90], [128]])).long())
MODELS: dict[str, Callable[[], Made]] = {
    "bert": hugging("BertConfig", "BertModel", M, PAIR, **TEXT),
    "roberta": hugging("RobertaConfig", "RobertaModel", M, PAIR, **TEXT),
    "distilbert": hugging(
        "DistilBertConfig", "DistilBertModel", M, PAIR, dim=512, n_layers=4, n_heads=8, hidden_dim=2048, vocab_size=200
    ),
    "albert": hugging("AlbertConfig", "AlbertModel", M, PAIR, embedding_size=128, **TEXT),
    "electra": hugging("ElectraConfig", "ElectraModel", M, PAIR, **TEXT),
    "mpnet": hugging("MPNetConfig", "MPNetModel", M, PAIR, **TEXT),
    "deberta-v2": hugging("DebertaV2Config", "DebertaV2Model", M, PAIR, **TEXT),
    "gpt2": hugging("GPT2Config", "GPT2LMHeadModel", I, PAIR[:1], n_embd=512, n_layer=4, n_head=8, vocab_size=200),
    "gpt-neox": hugging("GPTNeoXConfig", "GPTNeoXForCausalLM", I, PAIR[:1], **TEXT),
    "opt": hugging("OPTConfig", "OPTForCausalLM", I, PAIR[:1], ffn_dim=2048, word_embed_proj_dim=512, **TEXT),
    "llama": hugging("LlamaConfig", "LlamaForCausalLM", I, PAIR[:1], **LM),
    "mistral": hugging("MistralConfig", "MistralForCausalLM", I, PAIR[:1], **LM),
    "qwen2": hugging("Qwen2Config", "Qwen2ForCausalLM", I, PAIR[:1], **LM),
    "qwen3": hugging("Qwen3Config", "Qwen3ForCausalLM", I, PAIR[:1], head_dim=64, **LM),
    "gemma": hugging("GemmaConfig", "GemmaForCausalLM", I, PAIR[:1], head_dim=64, **LM),
    "phi": hugging("PhiConfig", "PhiForCausalLM", I, PAIR[:1], **LM),
    "olmo": hugging("OlmoConfig", "OlmoForCausalLM", I, PAIR[:1], **LM),
    "stablelm": hugging("StableLmConfig", "StableLmForCausalLM", I, PAIR[:1], **LM),
    "bloom": hugging(
        "BloomConfig", "BloomForCausalLM", I, PAIR[:1], hidden_size=512, n_layer=4, n_head=8, vocab_size=200
    ),
    "t5-encoder": hugging(
        "T5Config",
        "T5EncoderModel",
        I,
        PAIR[:1],
        d_model=512,
        d_kv=64,
        d_ff=2048,
        num_layers=4,
        num_heads=8,
        vocab_size=200,
    ),
    "vit": hugging("ViTConfig", "ViTModel", ("pixel_values",), (torch.randn(2, 3, 64, 64),), **PIXELS),
    "deit": hugging("DeiTConfig", "DeiTModel", ("pixel_values",), (torch.randn(2, 3, 64, 64),), **PIXELS),
    "dinov2": hugging(
        "Dinov2Config", "Dinov2Model", ("pixel_values",), (torch.randn(2, 3, 56, 56),), **{**PIXELS, "image_size": 56}
    ),
    "clip-text": hugging("CLIPTextConfig", "CLIPTextModel", I, PAIR[:1], max_position_embeddings=128, **TEXT),
    "clip-vision": hugging(
        "CLIPVisionConfig", "CLIPVisionModel", ("pixel_values",), (torch.randn(2, 3, 64, 64),), patch_size=16, **PIXELS
    ),
    "wav2vec2": hugging(
        "Wav2Vec2Config", "Wav2Vec2Model", ("input_values",), (torch.randn(1, 4000),), mask_time_prob=0.0, **TEXT
    ),
    "resnet18": vision("resnet18"),
    "resnet50": vision("resnet50"),
    "mobilenetv3": vision("mobilenetv3_small_100"),
    "efficientnet-b0": vision("efficientnet_b0"),
    "convnext": vision("convnext_atto"),
    "densenet121": vision("densenet121"),
    "regnety": vision("regnety_002"),
    "vgg11": vision("vgg11"),
    "inception-v3": vision("inception_v3", 96),
    "mixer": vision("mixer_s32_224", 224),
    "vit-timm": vision("vit_tiny_patch16_224", 224),
    "swin": vision("swin_tiny_patch4_window7_224", 224),
    "mobilevit": vision("mobilevit_xxs", 128),
    "cait": vision("cait_xxs24_224", 224),
}


def folded(model: torch.nn.Module, args: tuple[Any, ...]) -> torch.nn.Module:
    """The network as the exporter leaves it: batch norms that alone read a convolution are folded into it."""
    import copy

    from torch.nn.utils.fusion import fuse_conv_bn_eval

    made = copy.deepcopy(model)
    source: dict[int, torch.nn.Module] = {}
    kept: list[Any] = []
    pairs: list[tuple[Any, Any]] = []

    def seen(module: torch.nn.Module, given: Any, out: Any) -> None:
        if isinstance(module, torch.nn.Conv2d):
            source[id(out)] = module
            kept.append(out)  # an id is a tensor's while it lives
        elif id(given[0]) in source:
            pairs.append((source[id(given[0])], module))

    kinds = (torch.nn.Conv2d, torch.nn.BatchNorm2d)
    hooks = [m.register_forward_hook(seen) for m in made.modules() if isinstance(m, kinds)]
    made(*args)
    for hook in hooks:
        hook.remove()
    paths = {id(m): name for name, m in made.named_modules()}
    for conv, norm in pairs:
        fused = fuse_conv_bn_eval(conv, norm)
        conv.weight, conv.bias = fused.weight, fused.bias
        after = [m for name in ("drop", "act") if isinstance(m := getattr(norm, name, None), torch.nn.Module)]
        made.set_submodule(paths[id(norm)], torch.nn.Sequential(*after))
    return made


def kept(graph: Any) -> Any:
    """The graph without what no output needs and what neither inputs nor weights decide."""
    from dataclasses import replace

    root = lambda v: v if graph.values[v].alias is None else root(graph.values[v].alias)
    needed, nodes = {root(v) for v in graph.outputs}, list[Any]()
    for node in reversed(graph.items):
        if any(root(v) in needed for v in node.outputs):
            needed.update(root(v) for v in node.inputs)
            nodes.append(node)
    decided = {root(v.id) for v in graph.values if v.kind in ("input", "param")}
    used = []
    for node in reversed(nodes):
        if any(root(v) in decided for v in node.inputs):
            decided.update(root(v) for v in node.outputs)
            used.append(node)
    return replace(graph, items=tuple(used))


def judged(name: str, make: Callable[[], Made], on: str) -> dict[str, Any]:
    import ridgeline as rl
    from ridgeline.capture import capture

    torch.manual_seed(0)
    model, args, _ = make()
    for p in model.parameters():  # no zeros and ones that an exporter folds away
        p.data.add_(0.02 * torch.randn_like(p))
    row: dict[str, Any] = {"name": name}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = first(model(*args))
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "model.onnx")
            began = time.perf_counter()
            torch.onnx.export(model, args, path, dynamo=True, opset_version=18, external_data=False, verbose=False)
            row["export_s"] = round(time.perf_counter() - began, 1)
            imported = rl.load(path)
            got = first(imported(*args))
            row["dynamic"] = imported.why_dynamic
            size = float(want.abs().max())
            row["error"] = float((got - want).abs().max()) / size
            import onnxruntime as ort

            options = ort.SessionOptions()
            options.log_severity_level = 4
            options.intra_op_num_threads = 1
            session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            feed = {spec.name: value.numpy() for spec, value in zip(session.get_inputs(), args, strict=True)}
            row["ort_error"] = float((torch.from_numpy(session.run(None, feed)[0]) - want).abs().max()) / size
            graph = capture(imported, args, fold=False)
            is_normed = any(isinstance(m, torch.nn.BatchNorm2d) for m in model.modules())
            direct = capture(folded(model, args) if is_normed else model, args, fold=False)
        for execution in ("eager", "cudagraph"):
            ours, theirs, least = (rl.predict(g, on=on, execution=execution) for g in (graph, direct, kept(direct)))
            if execution == "eager":
                row["kernels"] = f"{ours.num_kernels}/{theirs.num_kernels}/{least.num_kernels}"
                row.update(busy=ours.busy_s / theirs.busy_s, busy_kept=ours.busy_s / least.busy_s)
            what = "wall" if execution == "eager" else "graph"
            row[what], row[what + "_kept"] = ours.expected_s / theirs.expected_s, ours.expected_s / least.expected_s
    return row


def first(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) else out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--on", default="h200")
    asked = parser.parse_args()
    for name, make in MODELS.items():
        if asked.only and name not in asked.only.split(","):
            continue
        try:
            row = judged(name, make, asked.on)
        except Exception as error:
            row = {"name": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(row), flush=True)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        gc.collect()


if __name__ == "__main__":
    sys.exit(main())
