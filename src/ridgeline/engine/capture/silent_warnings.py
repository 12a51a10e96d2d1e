"""Looks at values that only end in a warning: left out while a call is recorded, as its replays leave them out anyway.

Models of transformers look for padding among the first and last tokens where no mask is given, to say so once. The host
waits for that, which no capture allows; told of a capture they leave it out, but then make masks in memory too, which
take attention off its fast kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

_WARNS = "warn_if_padding_and_no_attention_mask"
"""transformers' method that reads tokens, logs a sentence or does not, and returns nothing."""


def only_warns(error: BaseException | None) -> bool:
    """Whether the host had to wait inside of code that only warns."""
    while error is not None:
        if any(name == _WARNS for name in _functions(error.__traceback__)):
            return _home() is not None
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def hushed() -> Iterator[None]:
    """Inside, nobody looks for what would only be warned of."""
    home = _home()
    if home is None:
        yield
        return
    asked = vars(home)[_WARNS]
    setattr(home, _WARNS, _quiet)
    try:
        yield
    finally:
        setattr(home, _WARNS, asked)


def _quiet(self: Any, *args: Any, **kwargs: Any) -> None:
    """In the place of the method."""


def _home() -> Any:
    """The class that has the method; None where transformers is not loaded or has it no more."""
    found = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return found if found is not None and _WARNS in vars(found) else None


def _functions(traceback: TracebackType | None) -> Iterator[str]:
    while traceback is not None:
        yield traceback.tb_frame.f_code.co_name
        traceback = traceback.tb_next
