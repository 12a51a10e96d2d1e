from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.basis import Basis, worst
from ridgeline.errors import InputError

bases = st.sampled_from(list(Basis))


def test_measured_is_best_and_assumed_is_worst():
    assert Basis.MEASURED < Basis.FITTED < Basis.DATASHEET < Basis.ASSUMED
    assert [str(b) for b in Basis] == ["measured", "fitted", "datasheet", "assumed"]


@given(st.lists(bases, min_size=1))
def test_a_sum_is_no_better_than_its_weakest_term(terms: list[Basis]):
    assert worst(terms) == max(terms)
    assert all(worst(terms) >= term for term in terms)


def test_nothing_combined_is_exact():
    assert worst([]) is Basis.MEASURED


@given(bases)
def test_a_basis_reads_back_from_its_name(basis: Basis):
    assert Basis.parse(f" {basis} ".title()) is basis


def test_an_unknown_basis_suggests_the_nearest():
    with pytest.raises(InputError, match="unknown basis 'mesured'; did you mean 'measured'"):
        Basis.parse("mesured")
