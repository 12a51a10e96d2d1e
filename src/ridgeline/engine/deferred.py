"""A remembered winner that is built when it is first called, not when it is remembered."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ridgeline.engine.drop_in import Plan
from ridgeline.engine.guards.check import Watch

Call = Callable[..., Any]


class Later:
    """A call that is made on first use; from then on its plan runs what was made.

    Whoever calls while it is being made waits for it.
    """

    def __init__(self, make: Callable[[], Call], model: Any, watch: Callable[[Any], Watch]) -> None:
        self._make, self._model, self._watch, self._lock = make, model, watch, threading.Lock()
        self.made: Call | None = None
        self.plan: Plan | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ready()(*args, **kwargs)

    def ready(self) -> Call:
        """What is called, made now if it was not."""
        with self._lock:
            if self.made is None:
                self.made = self._make()
                if self.plan is not None:
                    self.plan.call, self.plan.watch = self.made, self._watch(self._model)
        return self.made
