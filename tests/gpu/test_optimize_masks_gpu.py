"""Masks that decoders of transformers build while they are traced become flags on a GPU too."""

import pytest
import torch

pytest.importorskip("triton")
transformers = pytest.importorskip("transformers")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from ridgeline.optimizer import backend
from ridgeline.optimizer.rewrites import recommended
from ridgeline.optimizer.rewrites.attention import masks
from ridgeline.optimizer.rewrites.attention.backends import attention_call

DEVICE = torch.device("cuda")
SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=512))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def told(ctx):
    """What is known of each mask: its factors, and what kept one from being worked out."""
    found = []
    for node in ctx.nodes:
        read = attention_call(node)
        if read is None or read.mask is None:
            continue
        for factor in masks.conjuncts(ctx, read.mask):
            known = masks.Constants(ctx)
            try:
                value = known._value(factor)
                what = f"{tuple(value.shape)} {masks.pattern_of(value, *ctx.shape(read.query)[2:3] * 2)}"
            except Exception as error:  # told, not raised
                what = f"{type(error).__name__}: {error}"
            known_nodes = [f"{n.name}:{n.target}" for n in known._known]
            found.append(f"{factor.name} {factor.target}: {what}; known {known_nodes[-3:]}")
        found.append(f"users {[(u.name, str(u.target)) for u in node.users]} strides {ctx.value(node).stride()}")
        break
    return found


@pytest.mark.parametrize("make", [gpt2, qwen3, llama])
def test_a_decoders_mask_is_a_flag(make):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = make().to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(0, 512, (2, 128), device=DEVICE)
    reports, details = [], []

    def look(gm, inputs):
        reports.append(backend.Report())
        names = [name for name in recommended("inference", "none", "cuda") if name != "attention-kernel"]
        ctx = backend.rewritten(gm, inputs, rewrites=names, report=reports[-1])
        details.extend(told(ctx))
        return ctx.gm.forward if not ctx.extras else gm.forward

    with torch.no_grad():
        torch.compile(model, backend=look)(input_ids=ids, use_cache=False)
    counts = reports[0].counts()
    assert counts.get("mask") == 2, (counts, [str(each)[:300] for each in reports[0].refusals], details)


def test_windows_to_both_sides_are_our_kernels():
    torch.manual_seed(0)
    torch._dynamo.reset()
    config = transformers.ModernBertConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=3, num_attention_heads=4,
        local_attention=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    model = transformers.ModernBertModel(config).to(DEVICE, torch.bfloat16).eval()
    ids = torch.randint(3, 512, (2, 256), device=DEVICE)
    reports, details = [], []

    def look(gm, inputs):
        reports.append(backend.Report())
        names = recommended("inference", "none", "cuda")
        ctx = backend.rewritten(gm, inputs, rewrites=names, report=reports[-1])
        details.extend(told(ctx))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=look)(input_ids=ids)
    counts = reports[0].counts()
    assert counts.get("attention-kernel") == 2, (counts, [str(r)[:300] for r in reports[0].refusals], details)
