"""Products of a few rows without a GPU: the reference, what is refused, choices by shape, the compiler's facts."""

import pytest
import torch

pytest.importorskip("triton")

import torch.nn.functional as F

from ridgeline.engine.capture import cuda_graph as executor
from ridgeline.errors import KernelError
from ridgeline.kernels import launcher, linear, supports
from ridgeline.kernels.compiler import facts_of, triton_kernel
from ridgeline.kernels.linear import config


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def collected(rows, n, k, dtype=torch.bfloat16, early=False, **given):
    x, w = torch.empty(rows, k, dtype=dtype, device="meta"), torch.empty(n, k, dtype=dtype, device="meta")
    with launcher.collecting() as found, launcher.overlapped(early):
        linear(x, w, **given)
    return found


def facts(variant):
    return facts_of(launcher.kernel(variant.kernel).function, variant)


def test_it_is_a_linear_layer_with_norm_gate_and_sum():
    x, w, b, g, r = drawn(2, 3, 32), drawn(20, 32), drawn(20), drawn(32), drawn(2, 3, 10)
    torch.testing.assert_close(linear(x, w, b), F.linear(x, w, b))
    gate, up = F.linear(F.rms_norm(x, (32,), g, 1e-6), w, b).chunk(2, -1)
    found = linear(x, w, b, norm_weight=g, activation="silu", gated=True, residual=r)
    torch.testing.assert_close(found, F.silu(gate) * up + r)


@pytest.mark.parametrize(
    ("activation", "meant"),
    [("gelu", F.gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")), ("relu", F.relu), ("silu", F.silu)],
)
def test_activations_are_pytorchs(activation, meant):
    x, w = drawn(4, 16), drawn(8, 16)
    torch.testing.assert_close(linear(x, w, activation=activation), meant(x @ w.t()))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((drawn(17, 8), drawn(4, 8)), "at most 16"),
        ((drawn(2, 8), drawn(4, 9)), "do not multiply"),
        ((drawn(2, 8), drawn(8, 4).t()), "dense"),
        ((drawn(2, 8), drawn(4, 8).half()), "different types"),
        ((drawn(2, 8), drawn(4, 8), drawn(5)), "bias"),
        ((drawn(2, 8), drawn(4, 8), None, drawn(4)), "norm_weight"),
        ((drawn(2, 8), drawn(4, 8), None, None, drawn(2, 5)), "residual"),
        ((drawn(2, 8).double(), drawn(4, 8).double()), "float64"),
        ((drawn(2, 8), drawn(5, 8), None, None, None, 1e-6, 0.0, "silu", True), "even"),
    ],
)
def test_what_no_kernel_takes_is_said(args, words):
    assert words in supports("linear", *args).reason


def test_an_unknown_activation_is_named():
    with pytest.raises(KernelError, match="swish"):
        linear(drawn(2, 8), drawn(4, 8), activation="swish")


def test_one_row_reads_sixteen_bytes_a_thread_and_spills_nothing():
    for n, k in ((4096, 4096), (1024, 4096), (4096, 14336), (128256, 4096)):
        (variant,) = collected(1, n, k)
        made = facts(variant)
        assert variant.kernel == "linear_row" and made.num_spills == 0
        assert made.num("LDG.E.EF.128") > 0, "weights come 16 bytes at a time, not kept in the first cache"
        assert made.num("LDG.E.U16") == 0


def test_more_rows_go_to_the_tensor_cores_with_weights_straight_into_shared_memory():
    variant = collected(8, 28672, 4096)[0]
    made = facts(variant)
    assert variant.kernel == "linear_tile" and made.num_spills == 0
    assert made.num("HGMMA") > 0 and made.num("LDGSTS.E.BYPASS.128") > 0


def test_float32_never_goes_through_shorter_types():
    for rows in (1, 7, 16):
        (variant,) = collected(rows, 4096, 4096, torch.float32)
        made = facts(variant)
        assert variant.kernel == "linear_row" and made.num_spills == 0
        assert made.num("HMMA") == 0 and made.num("HGMMA") == 0


def test_few_outputs_share_the_sum_over_the_device_and_join_it_in_order():
    found = collected(8, 1024, 4096)
    assert [variant.kernel for variant in found] == ["linear_tile", "linear_join"]
    assert config.choose(8, 4096, 1024, 2, False, False, 132).shares == 8
    assert config.share_of(1000, config.Linear("tile", 64, 128, shares=3)) == 384


def test_a_kernel_starts_early_only_when_allowed_and_only_with_a_weight_that_gains_by_it():
    def waits(variant):
        return "griddepcontrol.wait" in triton_kernel(launcher.kernel(variant.kernel).function, variant).asm["ptx"]

    assert not waits(collected(1, 4096, 4096)[0])
    assert waits(collected(1, 4096, 4096, early=True)[0])
    assert not waits(collected(1, 128256, 4096, early=True)[0])
    assert all(waits(variant) for variant in collected(8, 1024, 4096, early=True))
    assert not any(waits(v) for v in collected(8, 8192, 4096, early=True, gated=True, activation="silu"))


def test_weights_are_asked_for_before_the_wait_and_inputs_after_it():
    (variant,) = collected(1, 4096, 4096, early=True)
    text = triton_kernel(launcher.kernel(variant.kernel).function, variant).asm["ptx"]
    before, after = text.split("griddepcontrol.wait", 1)
    assert "ld.global" in before and "st.global" not in before
    assert "st.global" in after


def test_permission_to_start_early_ends_with_its_context():
    assert not launcher.overlapping()
    with launcher.overlapped():
        assert launcher.overlapping()
        with launcher.overlapped(False):
            assert not launcher.overlapping()
    assert not launcher.overlapping() and not launcher.recording()


def test_what_gets_ready_for_a_recording_runs_as_it_will_be_recorded(monkeypatch):
    """A recorded model may be told that none is under way: kernels are not, or they would never start early."""
    with launcher.rehearsing():
        assert launcher.recording()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    with executor._answering(False):
        assert not torch.cuda.is_current_stream_capturing() and launcher.recording()


def test_a_norms_weight_is_shared_by_several_rows_of_a_product():
    assert config.choose(1, 4096, 6144, 2, False, False, 132).outputs == 1
    assert config.choose(1, 4096, 6144, 2, False, False, 132, normed=True).outputs == 4
    (variant,) = collected(1, 6144, 4096, norm_weight=torch.empty(4096, dtype=torch.bfloat16, device="meta"))
    assert dict(variant.constants)["BN"] == 4


def test_steps_fit_short_rows():
    chosen = config.choose(1, 48, 100, 2, False, False, 132)
    assert chosen.step == 256 and chosen.num_warps == 1
    assert config.choose(1, 4096, 28672, 2, False, False, 132).outputs == 1
    assert config.choose(1, 14336, 4096, 2, False, False, 132).outputs == 4
