"""Sites by hand: a node with the types it touches, without a graph around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ridgeline.cost.work import Site, site_of
from ridgeline.graph import Node, TensorType, tensor

Like = TensorType | tuple[int, ...]


def _type(like: Like, dtype: str) -> TensorType:
    return like if isinstance(like, TensorType) else tensor(like, dtype)


@pytest.fixture
def site() -> Callable[..., Site]:
    """``site("matmul", ins, outs, **attrs)``: shapes are of ``dtype``, types are taken as they are."""

    def make(
        op: str,
        ins: Sequence[Like] = (),
        outs: Sequence[Like] = (),
        *,
        dtype: str = "bf16",
        held_bytes: Sequence[float] | None = None,
        where: str = "net.layer",
        **attrs: Any,
    ) -> Site:
        in_types, out_types = [_type(t, dtype) for t in ins], [_type(t, dtype) for t in outs]
        touched = [float(t.num_bytes) for t in in_types] if held_bytes is None else held_bytes
        return site_of(Node(op, (), (), attrs, module=where), in_types, out_types, touched)

    return make
