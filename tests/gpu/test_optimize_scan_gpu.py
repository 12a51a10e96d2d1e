"""Selective scans, and blocks that ask a cache by number, on a real GPU: numbers, and recorded calls."""

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from ridgeline.bench.check import check_case
from ridgeline.engine.example_inputs import Inputs, leaves
from ridgeline.kernels import rope, selective_scan, tuning
from ridgeline.kernels.cache_append.op import append, rope_append
from ridgeline.kernels.contract import trials
from ridgeline.kernels.selective_scan import reference
from ridgeline.kernels.selective_scan.config import Chunk
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.rewrites.attention.decode import attended
from ridgeline.optimizer.rewrites.linear.few_rows import product
from ridgeline.optimizer.search.candidate import Candidate, build

DEVICE = torch.device("cuda")
TRIAL = trials()["selective_scan"][1]


@pytest.mark.parametrize("of", TRIAL.checks, ids=str)
def test_the_scan_agrees_with_its_reference(of):
    for finding in check_case("selective_scan", of, DEVICE, 3):
        assert finding.ok, finding


@pytest.mark.parametrize("chosen", [Chunk(2, 32), Chunk(4, 16), Chunk(1, 64), Chunk(8, 8), Chunk(2, 64, 2)], ids=str)
def test_every_way_to_cut_a_scan_gives_the_same_answer(chosen):
    args = TRIAL.make(TRIAL.races[0], DEVICE, torch.Generator(DEVICE).manual_seed(0))
    with tuning.forced("selective_scan", chosen):
        y, last = selective_scan(*args)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            selective_scan(*args)
        end.record()
    torch.cuda.synchronize()
    print(f"{chosen}: {start.elapsed_time(end) / 10 * 1e3:.1f} us")
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    for found, meant in zip((y, last), reference.forward(*wide), strict=True):
        assert (found.double() - meant).norm() / meant.norm() < 4e-3


@pytest.mark.parametrize("compiler", ["none", "inductor"])
@pytest.mark.parametrize("kind", ["static", "growing", "none"])
def test_blocks_over_a_cache_compile_to_one_graph_and_can_be_captured(kind, compiler):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1024,
        vocab_size=100, max_position_embeddings=512,
    )  # fmt: skip
    torch._dynamo.reset()
    torch.manual_seed(0)
    with DEVICE:
        model = transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16)
        kwargs = {"input_ids": torch.randint(0, 100, (1, 1 if kind != "none" else 64))}
        if kind != "none":
            static = kind == "static"
            cache = transformers.StaticCache(config=config, max_cache_len=96) if static else transformers.DynamicCache()
            for layer in range(4):
                keys, values = torch.randn(2, 1, 4, 80, 64).bfloat16().unbind(0)
                cache.update(keys, values, layer, {"cache_position": torch.arange(80)})
            kwargs |= {"past_key_values": cache, "position_ids": torch.full((1, 1), 80)}
    inputs = Inputs((), kwargs)
    kept = [(tensor, tensor.clone()) for tensor in inputs.tensors()]  # building writes to the inputs
    names = recommended("inference", compiler, "cuda")
    candidate = Candidate(name="blocks", rewrites=names, compiler=compiler, scope="blocks")
    with torch.no_grad():
        meant = list(leaves(model(**inputs.copied().kwargs)))
        base = build(candidate, model, inputs, "infer")
        assert base.report.graphs == 1
        built = build(Candidate(**{**candidate.to_dict(), "graphed": True, "options": (), "rewrites": names,
                                   "substituted": ()}), model, inputs, "infer", base=base)  # fmt: skip
        for tensor, was in kept:
            tensor.copy_(was)
        with built.switched() as call:
            found = list(leaves(call(**inputs.reused().kwargs)))
        assert built.call.replays == 1
    assert [name for name, _ in found] == [name for name, _ in meant]
    for (_, mine), (_, other) in zip(found, meant, strict=True):
        assert (mine.double() - other.double()).norm() <= 0.03 * other.double().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_keys_turned_into_a_cache_are_those_turned_first_and_written_then(dtype, interleaved):
    caches = [torch.zeros(2, 8, 300, 128, dtype=dtype, device=DEVICE) for _ in range(4)]
    q, k, v = (torch.randn(2, 1, heads, 128, device=DEVICE).to(dtype).transpose(1, 2) for heads in (32, 8, 8))
    angles = torch.randn(2, 1, 64, device=DEVICE)
    table = angles if interleaved else torch.cat((angles, angles), -1)
    cos, sin, place = table.cos().to(dtype), table.sin().to(dtype), torch.tensor([211], device=DEVICE)
    meant_q, meant_k = rope(q, k, cos, sin, interleaved=interleaved)
    append(caches[0], caches[1], place, meant_k, v)
    found_q = rope_append(caches[2], caches[3], place, q, k, v, cos, sin, interleaved)
    torch.testing.assert_close(found_q, meant_q, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(caches[2], caches[0], rtol=1e-2, atol=1e-2)
    assert torch.equal(caches[3], caches[1])


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layout", ["heads first", "positions first"])
def test_a_captured_step_whose_kernels_start_early_computes_what_one_after_the_other_does(batch, layout):
    """Layers of products, keys turned into a cache, attention and the product behind it."""

    def draw(*shape):
        return torch.randn(*shape, device=DEVICE).bfloat16() * shape[-1] ** -0.5

    torch.manual_seed(0)
    weights = [(draw(1536, 1024), draw(1024, 1024), draw(1024, 1024)) for _ in range(6)]
    first = layout == "heads first"
    caches = [draw(2, batch, 2, 700, 128) if first else draw(2, batch, 700, 2, 128).transpose(2, 3) for _ in range(6)]
    kept = [cache.clone() for cache in caches]
    cos, sin = torch.randn(2, 1, 1, 128, device=DEVICE).bfloat16().unbind(0)
    place, seen, start = torch.tensor([0], device=DEVICE), torch.tensor([1], device=DEVICE), draw(batch, 1, 1024) * 32

    def step():
        x = start
        for at, ((qkv, out, more), (keys, values)) in enumerate(zip(weights, caches, strict=True)):
            wide = product(x, qkv, None, None, None, 0.0, 0.0, "none", False, at > 0)
            q, k, v = wide.view(batch, 1, 12, 128).transpose(1, 2).split([8, 2, 2], 1)
            q = rope_append(keys, values, place, q, k, v, cos, sin, False)
            found = attended(q, keys, values, None, None, False, seen).transpose(1, 2).reshape(batch, 1, 1024)
            x = product(found, out, None, None, x, 0.0, 0.0, "none", False, True)
            x = product(x, more, None, None, x, 0.0, 0.0, "none", False, True)
        return x

    with torch.no_grad():
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        for length in (0, 1, 211, 699):
            place.fill_(length)
            seen.fill_(length + 1)
            outcomes = []
            for run in (step, graph.replay):
                for cache, was in zip(caches, kept, strict=True):
                    cache.copy_(was)
                found = run()
                torch.cuda.synchronize()
                outcomes.append([(result if found is None else found).clone(), *(cache.clone() for cache in caches)])
            for mine, meant in zip(outcomes[1], outcomes[0], strict=True):
                assert meant.isfinite().all()
                assert (mine.double() - meant.double()).norm() <= 0.01 * meant.double().norm()
