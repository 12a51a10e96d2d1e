"""Fewer bits on a GPU: kernels against their references, formats in recorded calls, and a search within its budget."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from torch import Tensor, nn

import ridgeline as rl
from ridgeline.bench.check import check_case
from ridgeline.engine.example_inputs import Inputs
from ridgeline.kernels import quantize_weight, quantized_linear, tuning
from ridgeline.kernels.contract import trials
from ridgeline.kernels.linear.config import Linear
from ridgeline.kernels.quantized_linear import reference
from ridgeline.optimizer.precision.formats import FORMATS
from ridgeline.optimizer.search.candidate import Candidate, build

NAMES = ("quantized_linear", "quantized_linear_gated")
if torch.cuda.is_available():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(("name", "of"), [(name, of) for name in NAMES for of in trials()[name][1].checks], ids=str)
def test_narrow_kernels_agree_with_their_references(name, of):
    for finding in check_case(name, of, torch.device("cuda"), 3):
        assert finding.ok, finding


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    "chosen",
    [Linear("tile", 16, 128, 1, 6), Linear("tile", 64, 128, 4, 4, 3), Linear("tile", 32, 128, 2, 4, 2)],
    ids=str,
)
def test_every_way_to_cut_a_narrow_product_gives_the_same_answer(bits, rows, chosen):
    x = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    weight, scale = quantize_weight(torch.randn(600, 1024, device="cuda") / 32, bits)
    meant = x.double() @ reference.restored(weight, scale, torch.float64).t()
    with tuning.forced("quantized_linear", chosen):
        found = quantized_linear(x, weight, scale)
    assert (found.double() - meant).norm() / meant.norm() < 4e-3


@pytest.mark.parametrize(("name", "dtype", "rows", "low", "high"), [
    ("tf32", torch.float32, 256, 5e-5, 8e-4), ("bf16", torch.float32, 256, 1e-3, 5e-3),
    ("fp8", torch.bfloat16, 256, 1e-2, 5e-2), ("fp8", torch.float32, 33, 1e-2, 5e-2),
    ("int8", torch.bfloat16, 4, 2e-3, 1.2e-2), ("int4", torch.float16, 1, 5e-2, 0.13),
])  # fmt: skip
def test_a_format_is_as_exact_as_its_bits(name, dtype, rows, low, high):
    x = torch.randn(rows, 1024, device="cuda").to(dtype)
    weight = (torch.randn(512, 1024, device="cuda") / 32).to(dtype)
    bias = torch.randn(512, device="cuda").to(dtype)
    found = FORMATS[name](x, FORMATS[name].make(weight), bias)
    meant = x.double() @ weight.double().t() + bias.double()
    assert found.dtype == dtype and low < float((found.double() - meant).norm() / meant.norm()) < high


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def _model(dtype: torch.dtype, num: int = 4, width: int = 2048) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(num))).cuda().to(dtype).eval()


def test_a_captured_call_follows_a_change_of_the_weights():
    model, x = _model(torch.bfloat16, 2), torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    plan = tuple((name, "int8") for name, module in model.named_modules() if isinstance(module, nn.Linear))
    candidate = Candidate(name="n", rewrites=("norm", "norm-call", "gate", "narrow"), narrow=plan, graphed=True)
    built = build(candidate, model, Inputs((x,)), "infer")
    with torch.no_grad():
        assert (built.call(x) - model(x)).norm() / model(x).norm() < 0.03
        model[1].down.weight.mul_(3.0)
        assert (built.call(x) - model(x)).norm() / model(x).norm() < 0.03


@pytest.mark.parametrize(("dtype", "rows", "budget"), [
    (torch.bfloat16, 1, 0.1), (torch.bfloat16, 8192, 0.06), (torch.float32, 2048, 0.01),
])  # fmt: skip
def test_a_search_within_an_error_budget_is_faster_and_inside_it(dtype, rows, budget):
    model, x = _model(dtype), torch.randn(rows, 2048, device="cuda", dtype=dtype)
    fast = rl.optimize(model, (x,), budget_s=20, error_budget=budget, use_cache=False)
    receipt = fast.receipt
    assert receipt.narrowed, receipt
    assert receipt.verdict["rms_frac"] <= budget and receipt.verdict["allowed_rms_frac"] >= budget
    with torch.no_grad():
        assert fast(x).isfinite().all()
    assert receipt.speedup > 1.1


def test_without_a_budget_nothing_is_narrowed():
    model, x = _model(torch.bfloat16, 2), torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    receipt = rl.optimize(model, (x,), budget_s=6, use_cache=False).receipt
    assert not receipt.narrowed and not any("fewer bits" in entry.name for entry in receipt.entries)
