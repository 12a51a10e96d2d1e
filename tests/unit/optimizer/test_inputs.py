"""Copies keep aliasing and layout; fresh values are legal wherever the old ones were; state can be put back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from ridgeline.engine.example_inputs import Inputs, RandomState, State, fresh_values, leaves
from ridgeline.optimizer.backend import Report
from ridgeline.optimizer.search.candidate import Built, Candidate
from ridgeline.optimizer.search.judge import Prover, Subject
from ridgeline.optimizer.search.timing import Track


class Cache:
    """Grows by a tensor at every call, as a key-value cache does."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(2, 3)]
        self.length = 1


def test_a_copy_keeps_strides_and_shared_memory() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    given = Inputs((base.T, base[1:]), {"again": base.T})
    made = given.copied()
    assert made.args[0].stride() == (1, 4)
    made.args[0][0, 1] = -1.0
    assert made.args[1][0, 0] == -1.0, "views of one storage are views of one storage in the copy"
    assert base[1, 0] == 4.0, "the original is left alone"


def test_the_same_tensor_twice_is_the_same_tensor_twice_in_the_copy() -> None:
    x = torch.ones(3)
    made = Inputs((x, x)).copied()
    assert made.args[0] is made.args[1] and made.args[0] is not x


def test_reused_inputs_have_containers_of_their_own_around_the_same_tensors() -> None:
    cache = Cache()
    given = Inputs((), {"cache": cache})
    made = given.reused()
    made.kwargs["cache"].layers.append(torch.ones(1))
    assert len(cache.layers) == 1
    assert made.kwargs["cache"].layers[0] is cache.layers[0]


def test_fresh_indices_never_exceed_the_old_ones() -> None:
    ids = torch.tensor([[5, 90, 3], [1, 40, 7]])
    found = fresh_values(ids, 3)
    assert bool((found <= ids).all()) and bool((found >= 1).all())
    assert not torch.equal(
        fresh_values(torch.randint(1, 1000, (50,)), 1), fresh_values(torch.randint(1, 1000, (50,)), 2)
    )


@pytest.mark.parametrize("kept", [
    torch.tensor([1, 1, 0, 1]),
    torch.arange(10),
    torch.tensor([True, False]),
    torch.tensor([0.0, -torch.inf]),
    torch.tensor([[0, 4, 9, 30]], dtype=torch.int32),
    torch.tensor([30, 12, 9, 9]),
])  # fmt: skip
def test_flags_masks_and_sorted_integers_stay(kept: torch.Tensor) -> None:
    assert torch.equal(fresh_values(kept, 1), kept)


def test_fresh_floats_keep_their_sign_or_all_change_it() -> None:
    x = torch.randn(1000)
    same, flipped = fresh_values(x, 2000), fresh_values(x, 1000)
    assert torch.equal(same.sign(), x.sign()) and not torch.equal(same, x)
    assert torch.equal(flipped.sign(), -x.sign())
    positive = torch.rand(100) + 0.1
    assert bool((fresh_values(positive, 1000) > 0).all()), "what has one sign only keeps it"


def test_expanded_tensors_are_left_as_they_are() -> None:
    given = Inputs((torch.randn(1, 4).expand(3, 4),))
    assert torch.equal(given.fresh(1).args[0], given.args[0])


class Spoken(nn.Module):
    """Masks made of lengths, of which the longest has to be the batch's, and as many marks as there are pictures."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        if int((ids == 9).sum()) != x.shape[0]:
            raise ValueError("pictures and their places do not match")
        return x.masked_fill(~places[..., None], 0.0).sum((1, 2))


def _spoken() -> tuple[nn.Module, Inputs]:
    return Spoken().eval(), Inputs((torch.randn(4, 12, 3), torch.tensor([3, 12, 9, 4])),
                                   {"ids": torch.tensor([[9, 3, 9, 2], [9, 4, 1, 9]])})  # fmt: skip


def test_what_a_call_does_not_take_keeps_its_integers() -> None:
    model, given = _spoken()
    fresh = given.fresh(8)
    with pytest.raises((RuntimeError, ValueError)):
        model(*fresh.args, **fresh.kwargs)
    found, made = given.taken(8, lambda inputs: model(*inputs.args, **inputs.kwargs))
    assert torch.equal(found.args[1], given.args[1]) and torch.equal(found.kwargs["ids"], given.kwargs["ids"])
    assert not torch.equal(found.args[0], given.args[0]) and torch.equal(made, model(*found.args, **found.kwargs))


def test_what_a_call_takes_is_fresh_all_over() -> None:
    given = Inputs((torch.randn(4, 3), torch.tensor([30, 2, 17])))
    found, _ = given.taken(3, lambda inputs: None)
    assert torch.equal(found.args[1], given.fresh(3).args[1]) and not torch.equal(found.args[1], given.args[1])


def test_what_takes_nothing_else_is_judged_on_what_it_was_given() -> None:
    given = Inputs((torch.tensor([1.0, 2.0]),))

    def call(inputs: Inputs) -> None:
        if inputs.args[0].tolist() != [1.0, 2.0]:
            raise ValueError("other numbers")

    assert torch.equal(given.taken(1, call)[0].args[0], given.args[0])


def test_a_search_copes_with_integers_that_are_bound_by_more_than_their_size() -> None:
    """One whose fresh lengths did not fit was given up, and the model returned as it was."""
    model, given = _spoken()
    track = Track(model, given, "infer", None, torch.device("cpu"))
    track.settle(model)
    assert len(track.copies) == 3
    prover = Prover(Subject(model, given, "infer", track.loss, track.state))
    assert len(prover.cases) == 2 and prover.judge(model)
    assert not prover.judge(lambda x, lengths, ids: 1.5 * model(x, lengths, ids))


def test_leaves_are_found_in_objects_and_in_order() -> None:
    found = [path for path, _ in leaves(({"a": torch.ones(1), "b": [torch.ones(2)]}, Cache()))]
    assert found == ["0.a", "0.b.0", "1.layers.0"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen += 1
        return x + torch.rand(1)


def test_buffers_plain_values_and_random_numbers_are_put_back() -> None:
    model = Counting()
    state = State(model)
    first = model(torch.zeros(1))
    assert [name for name, _ in state.changed()] == ["state Counting.seen"]
    state.rebinds = bool(state.watch.changes())
    state.restore()
    assert model.calls == 0 and float(model.seen) == 0.0 and not state.changed()
    assert torch.equal(model(torch.zeros(1)), first), "the same random numbers again"


def test_drawing_a_number_is_noticed() -> None:
    before = RandomState()
    assert not before.moved()
    torch.rand(1)
    assert before.moved()
    before.restore()
    assert not before.moved()


class _Slow(nn.Module):
    """A copy of a layer that follows it at every call, as momentum contrast has one."""

    def __init__(self, by_data: bool) -> None:
        super().__init__()
        self.quick, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.by_data = by_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for mine, other in zip(self.slow.parameters(), self.quick.parameters(), strict=True):
                (mine.data if self.by_data else mine).lerp_(other, 0.1)
        return (self.quick(x) * self.slow(x)).sum()


@pytest.mark.parametrize("by_data", [False, True])
def test_parameters_that_calls_write_to_are_put_back(by_data: bool) -> None:
    model = _Slow(by_data)
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    track = Track(model, Inputs((torch.randn(2, 4),)), "train", None, torch.device("cpu"))
    track.settle(model)
    assert track.mutates and {name for name, *_ in track.state.tensors} == {"slow.weight", "slow.bias"}
    track.race({"eager": Built(Candidate(name="eager"), model, Report())}, 0.01)
    track.hand_back()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    again = State(model)  # whoever looks next knows them
    model(torch.randn(2, 4))
    assert [name for name, _ in again.changed()] == ["state slow.weight", "state slow.bias"]
    again.restore()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
