"""Verdicts: right results pass, wrong ones do not, and NaN never does."""

import torch

from ridgeline.bench.verdict import error_of, judge

GENERATOR = torch.Generator().manual_seed(0)
MEANT = torch.randn(64, 64, generator=GENERATOR, dtype=torch.float64)
EAGER = MEANT.bfloat16()


def test_a_rounded_reference_passes():
    assert judge(MEANT.bfloat16(), EAGER, MEANT)


def test_twice_the_error_of_pytorch_passes_and_four_times_does_not():
    off = EAGER.double() - MEANT
    assert judge((MEANT + 1.9 * off).float(), EAGER, MEANT)
    assert not judge((MEANT + 4 * off).float(), EAGER, MEANT)


def test_zeros_fail():
    assert not judge(torch.zeros_like(EAGER), EAGER, MEANT)


def test_one_nan_fails_unless_it_belongs_there():
    wrong = EAGER.clone()
    wrong[3, 4] = float("nan")
    assert not judge(wrong, EAGER, MEANT)
    meant = MEANT.clone()
    meant[3, 4] = float("nan")
    assert judge(wrong, wrong, meant)


def test_an_infinity_of_the_other_sign_fails():
    meant, eager, wrong = MEANT.clone(), EAGER.clone(), EAGER.clone()
    meant[0, 0], eager[0, 0], wrong[0, 0] = float("inf"), float("inf"), float("-inf")
    assert judge(eager, eager, meant) and not judge(wrong, eager, meant)


def test_another_shape_is_an_infinite_error():
    assert error_of(EAGER[:3], MEANT).num_misplaced == MEANT.numel()


def test_the_verdict_prints_what_was_allowed():
    assert "allowed" in str(judge(EAGER, EAGER, MEANT))
