"""Parts of a step on their own: losses, precision, optimizers, and what is predicted of a step."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from ridgeline.llm.model.config import ModelConfig
from ridgeline.llm.model.loss import cross_entropy_sum
from ridgeline.llm.train.optimizer import Muon, learning_rate, orthogonal, round_at_random
from ridgeline.llm.train.precision import Fp8Linear
from ridgeline.llm.train.report import flops_per_token, forecast
from ridgeline.llm.train.settings import OptimizerSettings

LLAMA_1B: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_the_fused_loss_and_its_gradients_are_those_of_logits(softcap: float, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(23, 8, dtype=torch.float64), torch.randn(40, 8, dtype=torch.float64)
    target = torch.randint(0, 40, (23,))
    target[::5] = -100
    grads = []
    for fused in (True, False):
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        if fused:
            loss = cross_entropy_sum(a, b, target, softcap)[0]
        else:
            logits = a @ b.t()
            logits = (logits / softcap).tanh() * softcap if softcap else logits
            loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
        (3 * loss).backward()
        grads.append((loss.detach(), a.grad, b.grad))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_an_fp8_layer_and_its_gradients_are_within_the_format_s_rounding() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(64, 48)
    narrow = torch.nn.Linear(64, 48)
    narrow.load_state_dict(plain.state_dict())
    narrow.__class__ = Fp8Linear
    x, found = torch.randn(32, 64), {}
    for name, layer in (("plain", plain), ("narrow", narrow)):
        given = x.clone().requires_grad_()
        y = layer(given)
        (y * torch.linspace(-1, 1, 48)).sum().backward()
        found[name] = y.detach(), given.grad, layer.weight.grad
    for ours, theirs in zip(found["narrow"], found["plain"], strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        assert 1e-4 < error < 0.08  # three bits of e4m3, two of e5m2


def test_random_rounding_is_right_in_the_mean_and_exact_where_it_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.full((20000,), 1.0 + 2.0**-9)  # a quarter of the way to the next bfloat16
    rounded = round_at_random(x, generator)
    assert set(rounded.float().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float(rounded.float().mean()) == pytest.approx(float(x[0]), abs=2e-4)
    exact = torch.tensor([-3.0, 0.0, 0.5]).bfloat16().float()
    assert torch.equal(round_at_random(exact, generator).float(), exact)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (3, 24, 16)])
def test_muon_s_updates_are_nearly_orthogonal(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert float(values.min()) > 0.6
    assert float(values.max()) < 1.3


def test_muon_finds_a_matrix() -> None:
    torch.manual_seed(0)
    wanted, p = torch.randn(12, 20), torch.nn.Parameter(torch.zeros(12, 20))
    optimizer = Muon([p], lr=0.05)
    for _ in range(200):
        loss = (p - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 0.05


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_schedules_warm_up_and_end_where_they_are_told_to(schedule: str) -> None:
    of = OptimizerSettings(schedule=schedule, warmup=10, final=0.1)
    shares = [learning_rate(step, 100, of) for step in range(101)]
    assert shares[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert shares[10] == pytest.approx(1.0)
    assert shares[100] == pytest.approx(1.0 if schedule == "constant" else 0.1)
    assert max(shares) <= 1.0


def test_flops_of_a_token_are_six_a_weight_and_causal_attention() -> None:
    config = ModelConfig.from_hf(LLAMA_1B)
    weights = 16 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192) + 128256 * 2048
    attention = 16 * 3 * 2 * 32 * (64 + 64) * 1024  # half of 2,048 keys
    assert flops_per_token(config, 2048) == 6 * weights + attention


def test_a_step_is_predicted_with_less_memory_and_more_time_the_more_is_recomputed() -> None:
    pytest.importorskip("triton")
    from ridgeline.hardware import device
    from ridgeline.llm.train.recompute import set_recompute

    config, found = ModelConfig.from_hf(LLAMA_1B), []
    for mode in ("none", "selective", "full"):
        found.append(forecast(config, 2048, 2, 1, device("h200"), torch.bfloat16, mode,
                              change=lambda part, mode=mode: set_recompute(part, mode)))  # fmt: skip
    assert found[0].step_s < found[1].step_s < found[2].step_s
    assert found[0].peak_bytes > found[1].peak_bytes > found[2].peak_bytes
    floor_s = flops_per_token(config, 2048) * 4096 / 989e12
    assert floor_s < found[0].step_s < 4 * floor_s
    assert found[0].peak_bytes > 1.2e9 * (2 + 2 + 12)  # weights, gradients, moments and masters
