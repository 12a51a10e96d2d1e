"""Embedding bags, dot interaction and cross layer on the host: PyTorch's semantics, fused steps, errors."""

import pytest
import torch
from torch.nn import functional as F

from ridgeline import kernels
from ridgeline.errors import KernelError


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embedding_bag_has_the_semantics_of_pytorch(mode, padding):
    weight = drawn(12, 8).requires_grad_()
    indices, offsets = torch.tensor([1, 2, 2, 11, 0, 5, 2]), torch.tensor([0, 3, 3, 5])
    for given in (
        {"input": indices, "offsets": offsets},
        {"input": indices[:6].view(2, 3)},
        {"input": indices, "offsets": torch.tensor([0, 4, 7]), "include_last_offset": True},
    ):
        found = kernels.embedding_bag(weight=weight, mode=mode, padding_idx=padding, **given)
        meant = F.embedding_bag(weight=weight, mode=mode, padding_idx=padding, **given)
        torch.testing.assert_close(found, meant)
        grad = drawn(*meant.shape, seed=3)
        ours, theirs = (torch.autograd.grad(y, weight, grad)[0] for y in (found, meant))
        torch.testing.assert_close(ours, theirs)


def test_weights_of_samples_have_gradients():
    weight, factors = drawn(12, 8).requires_grad_(), drawn(5, seed=1).requires_grad_()
    given = (torch.tensor([1, 2, 2, 11, 0]), weight, torch.tensor([0, 3]))
    found = kernels.embedding_bag(*given, mode="sum", per_sample_weights=factors)
    meant = F.embedding_bag(*given, mode="sum", per_sample_weights=factors)
    ours, theirs = (torch.autograd.grad(y.sum(), (weight, factors)) for y in (found, meant))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_what_only_pytorch_does_is_refused():
    weight, indices, offsets = drawn(4, 2), torch.tensor([0, 1]), torch.tensor([0])
    for options in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        with pytest.raises(KernelError, match="alone"):
            kernels.embedding_bag(indices, weight, offsets, **options)
    with pytest.raises(KernelError, match="mode is one of"):
        kernels.embedding_bag(indices, weight, offsets, mode="max")
    with pytest.raises(KernelError, match="needs offsets"):
        kernels.embedding_bag(indices, weight)
    with pytest.raises(KernelError, match="mode='sum'"):
        kernels.embedding_bag(indices, weight, offsets, per_sample_weights=drawn(2))


def bags(seed, rows, batch=6):
    generator = torch.Generator().manual_seed(seed)
    per = [torch.randint(0, n, (batch * 3,), generator=generator) for n in rows]
    return per, torch.arange(0, len(rows) * batch * 3 + 1, 3), torch.randn(batch, len(rows) * 8, generator=generator)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_a_fused_step_is_the_optimizers_step_on_the_summed_gradient(optimizer):
    rows = (9, 4)
    ours = kernels.EmbeddingBags(rows, 8, optimizer=optimizer, lr=0.1)
    tables = [torch.nn.Parameter(part.clone()) for part in ours.weight.split(list(rows))]
    sums = [torch.zeros(n, 1) for n in rows]
    theirs = {"sgd": torch.optim.SGD, "adam": torch.optim.SparseAdam}.get(optimizer, torch.optim.SGD)(tables, lr=0.1)
    for seed in range(3):
        per, offsets, grad = bags(seed, rows)
        out = ours(torch.cat(per), offsets)
        starts = torch.arange(0, 18, 3)
        sparse = optimizer == "adam"
        found = [F.embedding_bag(i, w, starts, mode="sum", sparse=sparse) for i, w in zip(per, tables, strict=True)]
        torch.testing.assert_close(out, torch.cat(found, 1))
        out.backward(grad)
        torch.cat(found, 1).backward(grad)
        if optimizer == "rowwise_adagrad":
            for table, total in zip(tables, sums, strict=True):
                total += table.grad.square().mean(1, keepdim=True)
                table.grad /= total.sqrt() + 1e-8
        theirs.step()
        theirs.zero_grad()
    torch.testing.assert_close(ours.weight, torch.cat(tables), rtol=1e-4, atol=1e-5)


def test_tables_without_an_optimizer_are_a_parameter_and_in_eval_nothing_moves():
    plain = kernels.EmbeddingBags((5, 5), 8, optimizer=None)
    per, offsets, grad = bags(1, (5, 5))
    plain(torch.cat(per), offsets).backward(grad)
    assert plain.weight.grad is not None and plain.weight.grad.shape == (10, 8)
    fused = kernels.EmbeddingBags((5, 5), 8).eval()
    assert not fused(torch.cat(per), offsets).requires_grad
    with pytest.raises(KernelError, match="did you mean"):
        kernels.EmbeddingBags((5,), 8, optimizer="adm")


def test_tables_of_codes_stay_near_what_they_were():
    module = kernels.EmbeddingBags((50, 20), 8, mode="mean")
    per, offsets, _ = bags(2, (50, 20))
    before = module.eval()(torch.cat(per), offsets)
    after = module.quantize()(torch.cat(per), offsets)
    assert module.weight.dtype == torch.uint8
    torch.testing.assert_close(after, before, rtol=0, atol=8**-0.5 / 255)


def test_dot_interaction_is_the_lower_triangle_beside_the_dense_vector():
    dense, sparse = drawn(2, 3), drawn(2, 2, 3, seed=1)
    out = kernels.dot_interaction(dense, sparse)
    x = torch.cat((dense.unsqueeze(1), sparse), 1)
    pairs = [(x[:, i] * x[:, j]).sum(1) for i, j in ((1, 0), (2, 0), (2, 1))]
    torch.testing.assert_close(out, torch.cat((dense, torch.stack(pairs, 1)), 1))
    assert "not [B, D] and [B, T, D]" in str(kernels.supports("dot_interaction", dense, sparse[:1]))


@pytest.mark.parametrize("rank", [0, 4])
def test_gradients_of_the_cross_layer_are_autograds(rank):
    x0, x = (drawn(5, 12, seed=s).requires_grad_() for s in (1, 2))
    bias = drawn(12, seed=3).requires_grad_()
    weight = drawn(12, rank or 12, seed=4).requires_grad_()
    down = drawn(rank, 12, seed=5).requires_grad_() if rank else None
    meant = x0 * F.linear(x if down is None else F.linear(x, down), weight, bias) + x
    found = kernels.cross_layer(x0, x, weight, bias, down)
    torch.testing.assert_close(found, meant)
    leaves = [t for t in (x0, x, weight, bias, down) if t is not None]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), leaves) for y in (found, meant)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_frozen_parts_of_the_cross_layer_cost_no_products():
    x0, x, weight = drawn(5, 12), drawn(5, 12, seed=1), drawn(12, 12, seed=2).requires_grad_()
    (dw,) = torch.autograd.grad(kernels.cross_layer(x0, x, weight).sum(), weight)
    torch.testing.assert_close(dw, x0.T @ x)


def test_a_recommenders_parts_compile_into_one_graph():
    def model(dense, weight, indices, offsets, starts, cross):
        sparse = kernels.embedding_bags(weight, indices, offsets, starts).view(dense.shape[0], -1, dense.shape[1])
        x = kernels.dot_interaction(dense, sparse)
        return kernels.cross_layer(x, x, cross)

    per, offsets, _ = bags(3, (9, 9))
    dense, weight, cross = drawn(6, 8).requires_grad_(), drawn(18, 8, seed=1).requires_grad_(), drawn(11, 11, seed=2)
    args = (dense, weight, torch.cat(per), offsets, torch.tensor([0, 9]), cross)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*args), model(*args))
    found, meant = (torch.autograd.grad(call(*args).sum(), (dense, weight)) for call in (compiled, model))
    torch.testing.assert_close(found, meant, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dim", "length", "bags"), [(64, 50, 465), (384, 8, 426), (32, 100, 100), (1000, 70, 3)])
def test_few_bags_have_a_program_each_and_sums_that_its_threads_have_registers_for(dim, length, bags):
    from ridgeline.kernels.embedding_bag import config

    chosen = config.forward(dim, 2, length, bags)
    wide = min(1 << (dim - 1).bit_length(), chosen.columns or dim * 2)
    assert chosen.bags == 1 and chosen.ahead * wide <= 64 * 32 * chosen.num_warps
    assert chosen.late or chosen.ahead >= length
    assert config.forward(dim, 2, length, 1 << 20) == config.many(dim, 2, length)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [128, 192, 200, 256, 384])
def test_programs_share_the_columns_of_few_wide_bags(dim, itemsize):
    from ridgeline.kernels.embedding_bag import config

    for length in (8, 20, 50):
        chosen = config.forward(dim, itemsize, length, 500)
        assert 64 <= chosen.columns <= 128 and chosen.num_warps <= 2, "what meets across warps costs more than programs"
        assert chosen.ahead * chosen.columns <= 32 * 32 * chosen.num_warps


def test_short_bags_share_programs_however_few_they_are():
    from ridgeline.kernels.embedding_bag import config

    assert config.forward(128, 2, 3, 532) == config.many(128, 2, 3)
    assert config.forward(48, 4, 1, 3295) == config.many(48, 4, 1)


def test_rows_are_put_in_order_by_what_so_many_are_worth():
    from ridgeline.kernels.embedding_bag import config

    assert not config.order(8192, 1000).bits and config.order(8193, 1000).bits
    assert not config.order(20_000, 1000).share and config.order(40_000, 1000).share
    assert config.order(3_000_000, 60_000).block and not config.order(3_000_000, 70_000).block
    assert not config.order(20_000, 1 << 24).block


@pytest.mark.parametrize("weighted", [False, True])
def test_the_order_of_rows_is_an_op_that_compilers_see(weighted):
    from ridgeline.kernels.contract import primitive

    per, offsets, _ = bags(3, (9, 9))
    weight, indices, starts = drawn(18, 8), torch.cat(per), torch.tensor([0, 9])
    factors = drawn(indices.numel()) if weighted else None
    order = primitive("embedding_order")
    torch.library.opcheck(order.op, (weight, indices, offsets, starts, factors, 2, False))
    keys, told, bag, shares = order(weight, indices, offsets, starts, factors, 2, False)
    rows = indices + torch.repeat_interleave(starts, torch.tensor([p.numel() for p in per]))
    assert torch.equal(keys.long(), rows.sort().values)
    places = rows.sort(stable=True).indices
    assert torch.equal(told.long(), places if weighted else bag[places].long()) and shares.numel() == (
        indices.numel() if weighted else 0
    )
