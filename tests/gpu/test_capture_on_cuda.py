"""On a machine with a GPU: a capture holds the operators eager CUDA dispatches, and replays to its peak memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
transformers = pytest.importorskip("transformers")

from ridgeline.capture import capture, decode_kwargs
from ridgeline.cost.memory import WORKSPACE_BYTES, workspace_bytes
from ridgeline.graph import RESIDENT, Graph, expand

_IGNORED = {"detach", "detach_", "lift_fresh", "item", "_local_scalar_dense", "is_nonzero", "alias"}


def _llama() -> tuple[Any, dict[str, Any]]:
    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8000,
    )
    ids = torch.randint(0, 8000, (4, 512))
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16), {
        "input_ids": ids,
        "labels": ids,
        "use_cache": False,
    }


def _bert() -> tuple[Any, dict[str, Any]]:
    config = transformers.BertConfig(
        hidden_size=768, num_hidden_layers=6, num_attention_heads=12, intermediate_size=3072
    )
    ids = torch.randint(0, 8000, (8, 256))
    return transformers.BertForMaskedLM(config).to(torch.bfloat16), {
        "input_ids": ids,
        "labels": ids,
        "attention_mask": torch.ones_like(ids),
    }


def _vit() -> tuple[Any, dict[str, Any]]:
    config = transformers.ViTConfig(hidden_size=768, num_hidden_layers=6, num_attention_heads=12, num_labels=100)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(16, 3, 224, 224),
        "labels": torch.randint(0, 100, (16,)),
    }


def _mixtral() -> tuple[Any, dict[str, Any]]:
    config = transformers.MixtralConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8000,
        num_local_experts=8,
    )
    ids = torch.randint(0, 8000, (4, 256))
    return transformers.MixtralForCausalLM(config).to(torch.bfloat16), {
        "input_ids": ids,
        "labels": ids,
        "use_cache": False,
    }


def _convnet() -> tuple[Any, dict[str, Any]]:
    nn = torch.nn
    blocks = [
        nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(6)
    ]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(64, 10),
    )
    return model, {"input": torch.randn(16, 3, 224, 224)}


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "llama": _llama,
    "bert": _bert,
    "vit": _vit,
    "mixtral": _mixtral,
    "convnet": _convnet,
}


def _on_cuda(tree: Any) -> Any:
    return {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in tree.items()}


def _step(model: Any, kwargs: dict[str, Any], optimizer: Any) -> None:
    out = model(**kwargs)
    loss = out.loss if hasattr(out, "loss") else out.float().mean()
    del out
    if optimizer is not None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _run(model: Any, kwargs: dict[str, Any], mode: str) -> Callable[[], None]:
    if mode == "infer":
        model.eval()
        return torch.no_grad()(lambda: _step(model, kwargs, None))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    return lambda: _step(model, kwargs, optimizer)


def _dispatched(run: Callable[[], None], known: set[str]) -> Counter[str]:
    """Operators by name as the profiler saw them, those inside a known one left out."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        run()
    found: Counter[str] = Counter()
    for event in prof.events():
        name = event.name.removeprefix("aten::")
        if not event.name.startswith("aten::") or name not in known:
            continue
        parent = event.cpu_parent
        while parent is not None and parent.name.removeprefix("aten::") not in known:
            parent = parent.cpu_parent
        if parent is None:
            found[name] += 1
    return found


def _captured(graph: Graph) -> Counter[str]:
    found: Counter[str] = Counter()
    for node, times in graph.nodes():
        found[node.target.split(".")[1]] += times
    return found


_FUSED = {
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention_backward": "_scaled_dot_product_attention_backward",
    "_scaled_dot_product_efficient_attention_backward": "_scaled_dot_product_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward": "_scaled_dot_product_attention_backward",
    "cudnn_batch_norm": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
    "_batch_norm_impl_index": "native_batch_norm",
    "_batch_norm_impl_index_backward": "native_batch_norm_backward",
    "_native_batch_norm_legit_no_training": "native_batch_norm",
}


def _merged(counts: Counter[str]) -> Counter[str]:
    made: Counter[str] = Counter()
    for name, num in counts.items():
        if name not in _IGNORED:
            made[_FUSED.get(name, name)] += num
    return made


def replayed_peak_bytes(graph: Graph) -> int:
    """Peak of resident and live bytes over the schedule, each storage rounded up as the allocator does."""

    def size(value: int) -> int:
        return -(-graph.values[value].num_bytes // 512) * 512

    now = sum(size(v.id) * v.count for v in graph.values if v.kind in RESIDENT and v.alias is None)
    peak, live = now, {}
    for flat in expand(graph, 10**9):
        for out in flat.outputs:
            if out not in live and graph.values[out[0]].kind not in RESIDENT:
                live[out] = size(out[0])
                now += live[out]
        peak = max(peak, now)
        now -= sum(live.pop(f, 0) for f in flat.frees)
    return peak


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize("name", list(MODELS))
def test_operators_and_peak_memory_are_those_of_eager_cuda(name: str, mode: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # of tests that ran here before: workspaces of the libraries among them
    model, kwargs = MODELS[name]()
    graph = capture(model, kwargs=kwargs, mode=mode)
    model.cuda()
    run = _run(model, _on_cuda(kwargs), mode)
    for _ in range(2):
        run()
    known = set(_captured(graph)) | set(_FUSED)
    ours, theirs = _merged(_captured(graph)), _merged(_dispatched(run, known))
    differences = {op: (ours[op], theirs[op]) for op in sorted(set(ours) | set(theirs)) if ours[op] != theirs[op]}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    measured = torch.cuda.max_memory_allocated() - before
    predicted = replayed_peak_bytes(graph) + workspace_bytes(graph)
    print(
        f"{name} {mode}: peak measured {measured:,} replayed {predicted:,} ratio {predicted / measured:.4f}; "
        f"op differences (captured, dispatched) {differences}"
    )
    # an accumulating index_put shows the ops it is made of on the device, a convolution's batch norm its buffers
    assert sum(abs(a - b) for a, b in differences.values()) <= max(8, 0.1 * sum(theirs.values()))
    assert abs(predicted - measured) < 0.05 * measured + 2 * WORKSPACE_BYTES


def test_a_decode_step_dispatches_what_generate_does() -> None:
    model, _ = _llama()
    kwargs = decode_kwargs(model, 2, 200)
    graph = capture(model, kwargs=kwargs)
    model.cuda().eval()
    ids = torch.randint(0, 8000, (2, 200), device="cuda")
    with torch.no_grad():
        past = model(input_ids=ids, use_cache=True).past_key_values
        step = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items() if k != "past_key_values"}
        ours = _merged(_captured(graph))
        theirs = _merged(_dispatched(lambda: model(**step, past_key_values=past), set(ours) | set(_FUSED)))
    differences = {op: (ours[op], theirs[op]) for op in sorted(set(ours) | set(theirs)) if ours[op] != theirs[op]}
    print(f"decode: op differences (captured, dispatched) {differences}")
    assert sum(abs(a - b) for a, b in differences.values()) <= 0.02 * sum(theirs.values())
