"""Attention and decoding on shapes of no model in the repository: odd heads, groups, bands, lengths, layouts."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from ridgeline.bench.check import check_case
from ridgeline.errors import KernelError
from ridgeline.kernels import attention, decode_attention, paged_attention, varlen_attention
from ridgeline.kernels.attention import reference
from ridgeline.kernels.contract import case, trials
from ridgeline.kernels.variants import variants_of

pytestmark = pytest.mark.usefixtures("packed")


def heads(h, k, d, rows, keys, dv=None, dtype="bfloat16", b=2, **more):
    wide = {} if dv is None else {"dv": dv}
    return case(dtype, b=b, h=h, k=k, l=rows, s=keys, d=d, **wide, **({"causal": False} | more))


DENSE = (
    *(heads(6, 2, d, 190, 190, causal=True) for d in (64, 72, 80, 96, 128, 160, 192, 256)),
    *(heads(h, k, 80, 131, 259, causal=True, lower_right=True) for h, k in ((5, 5), (9, 3), (10, 2), (12, 2), (7, 1))),
    heads(14, 2, 128, 300, 77, causal=True, lower_right=True), heads(14, 2, 192, 300, 77, causal=True),
    heads(6, 1, 256, 33, 500, causal=True, lower_right=True), heads(10, 2, 72, 500, 33),
    *(heads(6, 2, d, 200, 200, causal=causal, window=window, lower_right=True)
      for d, causal, window in ((64, True, (3, 0)), (128, False, (1, 0)), (96, False, (5, 7)), (128, True, (17, 0)))),
    heads(6, 2, 64, 130, 400, causal=True, window=(9, 0), lower_right=True, sinks=True, b=4),
    heads(12, 2, 128, 260, 260, causal=True, window=(40, 0), sinks=True, cap=12.0),
    heads(10, 2, 160, 150, 150, causal=True, cap=8.0), heads(6, 6, 192, 140, 140, dv=128, causal=True, mask=0.5),
    heads(7, 7, 104, 129, 3, dtype="float16"), heads(3, 3, 248, 65, 66, dtype="float16", causal=True),
)  # fmt: skip
VARLEN = tuple(
    case("bfloat16", h=h, k=k, d=d, q=q, kv=kv, causal=causal, window=window, cap=cap)
    for h, k, d, q, kv, causal, window, cap in (
        (6, 2, 80, (0, 5, 0, 129, 1), (7, 0, 0, 300, 64), True, None, 0.0),
        (5, 1, 128, (64, 0, 0), (3, 0, 200), False, None, 0.0),
        (7, 7, 256, (130, 3), (40, 190), True, (6, 0), 0.0), (6, 2, 64, (1,) * 40, (33,) * 40, True, None, 9.0),
    )
)  # fmt: skip
PAGED = tuple(
    case(dtype, b=b, h=h, k=k, s=s, d=d, page=page, uneven=True)
    for dtype, b, h, k, s, d, page in (
        ("bfloat16", 3, 9, 3, 700, 128, 16), ("bfloat16", 5, 10, 2, 333, 64, 48), ("float16", 2, 6, 1, 1000, 256, 32),
        ("bfloat16", 4, 7, 1, 450, 128, 64), ("bfloat16", 2, 12, 2, 300, 96, 8), ("bfloat16", 3, 6, 2, 129, 128, 1),
        ("float16", 4, 5, 5, 260, 72, 16), ("bfloat16", 130, 6, 2, 90, 128, 16), ("bfloat16", 2, 34, 2, 500, 160, 24),
        ("bfloat16", 33, 15, 3, 400, 192, 16),
    )
)  # fmt: skip
TASKS = [("attention", of) for of in DENSE] + [("varlen_attention", of) for of in VARLEN]
TASKS += [("paged_attention", of) for of in PAGED]


def wanted_variants():
    wanted = []
    for name, of in TASKS:
        wanted += variants_of(name, [of])
    return list(dict.fromkeys(wanted))


@pytest.mark.parametrize(("name", "of"), TASKS, ids=str)
def test_an_odd_case_is_as_right_as_pytorch_and_repeats_bit_for_bit(name, of):
    wrong = [finding for finding in check_case(name, of, torch.device("cuda"), 11) if not finding.ok]
    assert not wrong, wrong


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda").to(dtype)


def close(found, meant, within=0.02):
    return float((found.double() - meant.double()).norm() / meant.double().norm().clamp_min(1e-30)) < within


def test_queries_keys_and_values_of_one_product_are_read_where_they_lie():
    packed = drawn(2, 150, 3, 6, 80).requires_grad_()
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    out = attention(q, k, v, True)
    (mine,) = torch.autograd.grad(out, packed, torch.ones_like(out))
    wide = packed.detach().double().requires_grad_()
    meant = reference.public(*(wide[:, :, i].transpose(1, 2) for i in range(3)), True)
    (right,) = torch.autograd.grad(meant, wide, torch.ones_like(meant))
    assert close(out, meant) and close(mine, right, 0.03)


def test_a_batch_with_nothing_in_it_has_results_and_gradients_with_nothing_in_them():
    for shape in ((0, 4, 33, 64), (2, 4, 0, 64)):
        q, k, v = drawn(*shape).requires_grad_(), drawn(shape[0], 2, 40, 64), drawn(shape[0], 2, 40, 64)
        out = attention(q, k, v, True)
        out.sum().backward()
        assert out.shape == shape and q.grad.shape == shape
    q, k, v = drawn(2, 4, 9, 64), drawn(2, 2, 0, 64), drawn(2, 2, 0, 64)
    assert torch.equal(attention(q, k, v), torch.zeros_like(q))
    none = torch.zeros(0, 3, device="cuda", dtype=torch.int32)
    cache = drawn(5, 16, 2, 64)
    assert paged_attention(drawn(0, 4, 64), cache, cache, none, none[:, 0].contiguous()).shape == (0, 4, 64)


def test_other_numbers_of_sequences_in_as_many_rows_are_another_problem():
    q, k, v = (drawn(256, n, 64) for n in (4, 2, 2))
    for lens in ((256,), (100, 156), (64, 64, 64, 64), (1, 2, 253)):
        starts = torch.tensor([0, *lens], device="cuda").cumsum(0).to(torch.int32)
        out = varlen_attention(q, k, v, starts, starts, 256, 256, True)
        meant = reference.varlen_public(q.double(), k.double(), v.double(), starts, starts, 256, 256, True)
        assert close(out, meant), lens


def test_a_second_call_with_other_types_is_refused_and_not_run_as_the_first():
    q, k, v = (drawn(1, 2, 64, 64) for _ in range(3))
    attention(q, k, v)
    with pytest.raises(KernelError, match="all alike"):
        attention(q, k.half(), v)
    with pytest.raises(KernelError, match="different devices"):
        attention(q, k, v, key_mask=torch.ones(1, 64, dtype=torch.bool))
    trial = trials()["paged_attention"][1]
    args = trial.make(PAGED[0], torch.device("cuda"), torch.Generator("cuda"))
    paged_attention(*args)
    with pytest.raises(KernelError, match="int32"):
        paged_attention(*args[:3], args[3].long(), args[4])


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_takes_float32_as_pytorchs_function_does(narrow):
    q, k, v = (drawn(2, n, 70, 64, dtype=torch.float32).requires_grad_() for n in (4, 2, 2))
    with torch.autocast("cuda", dtype=narrow):
        ours = attention(q, k, v, True)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        flat = decode_attention(q[:, :, :1].detach(), k.detach(), v.detach())
    assert ours.dtype == theirs.dtype == flat.dtype == narrow and close(ours, theirs)
    ours.float().sum().backward()
    assert q.grad.dtype == torch.float32 and q.grad.shape == q.shape


def test_decoding_writes_where_it_is_told():
    for of in (PAGED[0], PAGED[4]):
        args = trials()["paged_attention"][1].make(of, torch.device("cuda"), torch.Generator("cuda"))
        out = torch.full_like(args[0], float("nan"))
        found = paged_attention(*args, out=out)
        assert found is out and torch.equal(out, paged_attention(*args))
        with pytest.raises(KernelError, match="contiguous"):
            paged_attention(*args, out=out.float())
        with pytest.raises(KernelError, match="16 bytes"):
            paged_attention(*args, out=torch.empty(out.numel() + 1, device="cuda", dtype=out.dtype)[1:].view(out.shape))
    row, cache = drawn(2, 8, 1, 64), drawn(2, 2, 90, 64)
    out = torch.full_like(row, float("nan"))
    assert decode_attention(row, cache, cache, out=out) is out and torch.equal(out, decode_attention(row, cache, cache))


def test_the_registered_ops_pass_opcheck():
    ops = torch.ops.ridgeline_kernels
    q, k, v = (drawn(1, n, 40, 64).requires_grad_() for n in (2, 1, 1))
    settings = (True, 0.125, 0, None, None, 7, -1, 0.0, True)
    torch.library.opcheck(ops.attention.default, (q, k, v, *settings))
    for name, of in (("paged_attention", PAGED[0]), ("paged_attention", PAGED[4])):
        args = trials()[name][1].make(of, torch.device("cuda"), torch.Generator("cuda"))
        torch.library.opcheck(ops.paged_attention.default, (*args, 0.1))


def test_graphs_of_windows_sinks_and_uneven_sequences_replay_on_other_data():
    q, k, v = (drawn(2, n, 200, 64).requires_grad_() for n in (6, 2, 2))
    sinks, starts = drawn(6, dtype=torch.float32), torch.tensor([0, 60, 60, 200], device="cuda", dtype=torch.int32)

    def step():
        out = attention(q, k, v, True, window=(9, 0), lower_right=True, sinks=sinks)
        rows = [x[0].transpose(0, 1) for x in (q, k, v)]
        flat = varlen_attention(*rows, starts, starts, 140, 140, True)
        return *torch.autograd.grad(out, (q, k, v), torch.ones_like(out)), flat

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step(), step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(3):
        with torch.no_grad():
            for x in (q, k, v):
                x.copy_(drawn(*x.shape))
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, step(), strict=True))


def test_what_one_sequence_holds_never_reaches_another():
    q, k, v = (drawn(160, n, 64) for n in (4, 2, 2))
    starts = torch.tensor([0, 70, 160], device="cuda", dtype=torch.int32)
    meant = varlen_attention(q, k, v, starts, starts, 90, 90, True)
    k[70:], v[70:] = float("nan"), float("inf")
    assert torch.equal(varlen_attention(q, k, v, starts, starts, 90, 90, True)[:70], meant[:70])


def test_calls_without_gradients_side_by_side_are_right_although_their_sums_go_to_one_place():
    given = [[drawn(1, heads, 300, 128) for _ in range(3)] for heads in (3, 5, 8, 13)]
    meant = [attention(*(x.clone().requires_grad_() for x in one), True).detach() for one in given]
    streams, found = [torch.cuda.Stream() for _ in given], []
    torch.cuda.synchronize()
    with torch.no_grad():
        for _ in range(6):
            for stream, one in zip(streams, given, strict=True):
                with torch.cuda.stream(stream):
                    found.append(attention(*one, True))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = [attention(*one, True) for one in given]
        attention(*(drawn(2, 4, 200, 64) for _ in range(3)))
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, meant[i % len(given)]) for i, x in enumerate([*found, *recorded]))
