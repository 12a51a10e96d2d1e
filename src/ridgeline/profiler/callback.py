"""A recording driven by somebody else's training loop: Hugging Face's Trainer, Lightning, or anything like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ridgeline.profiler.recorder import Run


class StepCallback:
    """Begins with training, counts its steps and ends with it; every other event is ignored.

    Pass it in ``callbacks=[…]`` of a Trainer; the result is ``callback.run.trace``.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._open = False

    def on_train_begin(self, *event: Any, model: Any = None, **more: Any) -> None:
        """The Trainer names its model; Lightning hands over itself and its module."""
        if model is None and len(event) == 2:
            model = event[1]
        if model is not None and not self.run.models:
            self.run.models = [model]
        self.run.__enter__()
        self._open = True

    def on_step_end(self, *event: Any, **more: Any) -> None:
        if self._open:
            self.run.step()

    def on_train_end(self, *event: Any, **more: Any) -> None:
        if self._open:
            self._open = False
            self.run.__exit__(None, None, None)

    # Lightning's names for the same moments.
    on_train_start = on_train_begin
    on_train_batch_end = on_step_end

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Events of later versions exist and do nothing."""
        if name.startswith(("on_", "setup", "teardown")):
            return lambda *event, **more: None
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
