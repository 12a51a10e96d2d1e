"""Whether anything a model reads besides its inputs has changed since it was recorded, in microseconds.

A recording holds addresses and forgets Python. So what Python would have looked at is watched: parameters and buffers
(which object, which address), attributes of modules and of the objects they hold, lists, hooks, the names that the
model's code reads of its own and of other modules, and the functions and classes that ran, in whose place others may be
put. Dictionaries are compared by the version number the interpreter keeps of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter, getitem, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ridgeline.engine.guards.code_reads import CODE, cell_content
from ridgeline.engine.guards.collect import Collection
from ridgeline.engine.guards.dict_version import stillness, version
from ridgeline.engine.guards.entries import HOOKS, INNER, NameGuard, Probe, are_harmless, dict_differences, hook_name
from ridgeline.engine.guards.native import address, form, glance
from ridgeline.engine.guards.values import GONE, MAX_COMPARED_ITEMS, is_addressable, is_alike, looks_equal, raw
from ridgeline.engine.replay.static_inputs import extent, view_of

_contents = attrgetter("cell_contents")
_WRITES = attrgetter("_version")


class Watch(Collection):
    """The state of a model besides its inputs, and whether it is still the same."""

    def hold_host_to(self, device_type: str) -> None:
        """Watches also what tensors hold that are not on the recording's device: Python may have read them."""
        apart = [t for t in self._tensors if t.device.type != device_type]
        self._elsewhere = [t for t in apart if not t.is_inference()]
        self._contents_of = list(map(_WRITES, self._elsewhere))
        for tensor in apart if device_type != "cpu" else ():
            low, high = extent(tensor)
            # numpy and ``.data`` leave the version of a tensor as it is
            if tensor.device.type == "cpu" and 0 < high - low < 64 * MAX_COMPARED_ITEMS:
                memory = view_of(tensor.detach(), torch.uint8, low, (high - low,), (1,)).numpy()
                read, path = memory.tobytes, self.tensors[id(tensor)][0]
                self._probes.append(Probe(path, memory, read, read(), "was written to"))
        self._remember()

    def _remember(self) -> None:
        """Lines the watched things up for the quick comparison."""
        self._handles = RemovableHandle.next_id  # every hook that is registered anywhere takes the next number
        self._held = [*(entry.held for entry in self._dicts), *(space.held for space in self._spaces.values())]
        self._versions = list(map(version, self._held))
        self._still = -1
        if stillness.counts:  # those that are not compared by their version have to be asked for it once to be counted
            deque(map(version, chain(self._empties, self._counted)), maxlen=0)
        self._count = sum(map(len, self._counted))
        self._contents = [value for *_, value in self._cells]
        self._just_cells = [cell for _, cell, _ in self._cells]
        placed = () if self._shared_weights else self.tensors.values()
        self._tensors = [tensor for _, tensor in placed if is_addressable(tensor)]
        self._addresses, self._forms = list(map(address, self._tensors)), list(map(form, self._tensors))
        self._glances()

    def _glances(self) -> None:
        """All that one look can tell: tensors, names, lists and probes. Deques and cells are few, and apart."""
        short = [(held, was) for _, held, was in self._lists if len(was) < MAX_COMPARED_ITEMS]
        listed = [(held, i, value) for held, was in short for i, value in enumerate(was)]
        named = [*listed, *((name.holder, name.key, name.value) for name in self._names)]
        rare = [row for row in named if isinstance(row[0], deque)]
        columns: list[list[Any]] = [[row[i] for row in rare] for i in range(3)]
        self._holders, self._keys, self._values = columns
        self._deques = [held for _, held, _ in self._lists if not isinstance(held, list)]
        self._deques_size = sum(map(len, self._deques))
        lists = [held for _, held, _ in self._lists if isinstance(held, list)]
        asks = [(probe.value if probe.read() is probe.value else probe.read, probe.was) for probe in self._probes]
        kinds: list[Any] = [(module, type, cls) for _, module, cls in self._kinds]
        kinds += [(value, vars, held) for _, value, held in self._dict_of]
        self.glance = glance(self._tensors, names=[*(row for row in named if not isinstance(row[0], deque)), *kinds],
                             lists=lists, asks=asks)  # fmt: skip

    def same(self) -> bool:
        """Whether nothing has changed since this watch was made or last refreshed."""
        if self._quick():
            return True
        if self.changes():
            return False
        self._refresh()
        return True

    def _quick(self) -> bool:
        now = stillness.now()
        if not self._looked_over(now == self._still):
            return False
        self._still = now
        return True

    def _looked_over(self, still: bool) -> bool:
        """One look at everything; at no dictionary if none that is watched has changed since the last."""
        try:
            return ((RemovableHandle.next_id == self._handles or not any(self._unhooked))
                    and (still or (not any(self._empties) and list(map(version, self._held)) == self._versions
                                   and sum(map(len, self._counted)) == self._count))
                    and (not self._deques or sum(map(len, self._deques)) == self._deques_size)
                    and (not self._holders or all(map(is_, map(getitem, self._holders, self._keys), self._values)))
                    and (not self._just_cells or all(map(is_, map(_contents, self._just_cells), self._contents)))
                    and (not self._elsewhere or list(map(_WRITES, self._elsewhere)) == self._contents_of)
                    and self.glance.same())  # fmt: skip
        except (LookupError, ValueError):
            return False

    def still(self, number: int) -> bool:
        """Whether nothing has changed, told at a glance: no dictionary since this number was counted, nor the rest."""
        return number == self._still and self._looked_over(True)

    @property
    def counted(self) -> int:
        """The number of the last look that found no dictionary changed."""
        return self._still

    def addressed(self) -> bool:
        """Whether every tensor is where it was, of the form it had, and names stand for what they stood for."""
        return self.glance.same()

    def changes(self) -> list[str]:
        """What has changed, by name; equal plain values are no change, nor are hooks that only collect."""
        added = (held for held in chain(self._unhooked, self._empties) if held and not are_harmless(held))
        found = [self._addition(held) for held in added]
        for entry in self._dicts:
            found += dict_differences(entry)
        for space in self._spaces.values():
            found += space.replaced()
        found += [f"{path} is a {type(part).__name__} now" for path, part, cls in self._kinds if type(part) is not cls]
        found += [f"{path} has other attributes" for path, value, held in self._dict_of if vars(value) is not held]
        found += ["a linear layer was given an attribute"] if self._attributed() else []
        for path, held, was in self._lists:
            if len(held) != len(was) or not all(map(is_alike, held, was)):
                found.append(f"{path} changed")
        found += [f"{name.path} changed" for name in self._names
                  if name.key not in name.holder or not is_alike(name.holder[name.key], name.value)]  # fmt: skip
        found += [f"{probe.path} {probe.said}" for probe in self._probes if probe.read() != probe.was]
        found += [f"{path} changed" for path, cell, value in self._cells if not is_alike(cell.cell_contents, value)]
        names = {id(tensor): path for path, tensor in self.tensors.values()}
        found += [f"{names[id(t)]} was written to" for t, was in zip(self._elsewhere, self._contents_of)
                  if t._version != was]  # fmt: skip
        found += [f"{names[id(t)]} moved to other memory" for t, was in zip(self._tensors, self._addresses)
                  if address(t) != was]  # fmt: skip
        found += [f"{names[id(t)]} has another type, size or stride" for t, was in zip(self._tensors, self._forms)
                  if form(t) != was]  # fmt: skip
        return list(dict.fromkeys(found))

    def replaced(self) -> list[str]:
        """Functions and classes in whose place others were put, and names that were not there: what guards of compiled
        code do not all look at."""
        names = [name for name in self._names if isinstance(name.value, CODE)]
        return [*chain.from_iterable(space.replaced() for space in self._spaces.values()),
                *(f"{name.path} changed" for name in names if name.holder.get(name.key) is not name.value),
                *(f"{ask.path} changed" for ask in self._probes if ask.was is False and ask.read())]  # fmt: skip

    def rebound(self) -> list[tuple[str, dict[Any, Any], Any, Tensor]]:
        """Names that stood for a tensor and stand for another: their path, where they are held, and the first."""
        found = [(entry, key) for entry in self._dicts for key, was in entry.was.items()
                 if isinstance(was, Tensor) and isinstance(now := entry.held.get(key), Tensor) and now is not was
                 and key not in entry.derived]  # fmt: skip
        return [(f"{entry.owner}.{key}", entry.held, key, entry.was[key]) for entry, key in found]

    def made(self) -> list[tuple[str, dict[Any, Any], str]]:
        """Weights that hooks of PyTorch's make before every call: their path, and where they are held."""
        return [(f"{entry.owner}.{key}", entry.held, key) for entry in self._dicts for key in entry.derived]

    def accept(self, noted: Mapping[int, set[Any]]) -> None:
        """Names that every call binds anew are no changes from now on."""
        for entry in self._dicts:
            entry.derived |= noted.get(id(entry.held), set())

    def rebind(self, held: dict[Any, Any], key: Any) -> None:
        """One name as it was when this watch was made."""
        for entry in self._dicts:
            if entry.held is held:
                held.update({key: entry.was[key]}) if key in entry.was else held.pop(key, None)

    def detach(self) -> None:
        """What calls have bound since is kept without what led to it."""
        for entry in self._dicts:
            for key, value in raw(entry.held).items():
                if isinstance(value, Tensor) and value.grad_fn is not None and entry.was.get(key) is not value:
                    entry.held[key] = value.detach()

    def stamp(self, boxes: Iterable[dict[Any, Any]]) -> None:
        """Has seen that these dictionaries changed, and how."""
        mine = {id(box) for box in boxes}
        for i, held in enumerate(self._held):
            if id(held) in mine:
                self._versions[i] = version(held)

    def beyond_guards(self) -> bool:
        """Whether something changed that guards of compiled code may take for the same: the sign of a zero, an order,
        variables of functions, whatever has to be asked."""
        pairs = [(entry.held.get(key), value) for entry in self._dicts for key, value in entry.was.items()]
        pairs += [pair for _, held, was in self._lists for pair in zip(held, was)]
        pairs += [(name.holder.get(name.key), name.value) for name in self._names]
        return (any(value is not seen and looks_equal(value, seen) for value, seen in pairs)
                or any(each.ordered and not each.in_order() for each in self._dicts)
                or any(probe.read() != probe.was for probe in self._probes)
                or any(not is_alike(cell_content(cell), value) for _, cell, value in self._cells)
                or any(type(part) is not cls for _, part, cls in self._kinds)
                or any(vars(value) is not held for _, value, held in self._dict_of))  # fmt: skip

    def toggled(self) -> list[str]:
        """Switches of layers and weights that stand otherwise: no result hangs on them, but a call may change them."""
        return [f"{switch.path} changed" for switch in self._switches if switch.read() != switch.was]

    def _attributed(self) -> bool:
        return sum(map(len, self._counted)) != self._count

    def _addition(self, held: dict[Any, Any]) -> str:
        owner = self._owners.get(id(held), "")
        if owner.rpartition(".")[2] in INNER:
            return f"{owner}.{next(iter(held))} is new"
        return f"a hook was added ({hook_name(held)})"

    def _spill(self) -> None:
        """Names of what changed and was none of them are looked at one by one from now on: it may change every time."""
        for (place, space), was in zip(list(self._spaces.items()), self._versions[len(self._dicts) :]):
            if version(space.held) != was:
                self._names += [NameGuard(f"{space.owner}.{key}", space.held, key, value, space.cls)
                                for key, value in space.was.items() if value is not GONE]  # fmt: skip
                del self._spaces[place]

    def _refresh(self) -> None:
        self._spill()
        self._unhooked = [hooks for hooks in self._unhooked if not hooks]
        for entry in self._dicts:
            entry.was = self._entry(entry.owner, entry.held).was
        self._lists = [(path, held, list(held)) for path, held, _ in self._lists]
        for name in self._names:
            name.value = name.holder[name.key]
        self._cells = [(path, cell, cell.cell_contents) for path, cell, _ in self._cells]
        self._remember()

    def restore(self) -> None:
        """Puts every watched dictionary, list and name back to what it held; tensors keep their contents."""
        for entry in self._dicts:
            noted = self._noted.get(id(entry.held), ())
            for key in [key for key in entry.held if key not in entry.was and key not in noted]:
                del entry.held[key]
            lost = {key: value for key, value in entry.was.items()
                    if entry.held.get(key, GONE) is not value and key not in noted}  # fmt: skip
            entry.held.update(lost)
            if entry.ordered and not entry.in_order():
                kept = {key: entry.held[key] for key in (*entry.was, *entry.held) if key in entry.held}
                entry.held.clear()
                entry.held.update(kept)
        for _, held, was in self._lists:
            if len(held) != len(was) or not all(map(is_, held, was)):
                held.clear()
                held.extend(was)
        for name in self._names:
            if name.holder.get(name.key, GONE) is not name.value:
                if name.owner is None:
                    name.holder[name.key] = name.value
                else:
                    setattr(name.owner, name.key, name.value)
        for _, cell, value in self._cells:
            cell.cell_contents = value
        for _, value, held in self._dict_of:
            if vars(value) is not held:
                value.__dict__ = held
        for _, module, cls in self._kinds:
            if type(module) is not cls:
                module.__class__ = cls
        for probe in self._probes:
            probe.restore()
        for switch in self._switches:
            if switch.read() != switch.was:
                switch.restore()

    def hooks(self) -> list[str]:
        """Hooks that a replay would not call."""
        entries = [entry.held for entry in self._dicts if entry.owner.rpartition(".")[2] in HOOKS]
        return [hook_name(hooks) for hooks in chain(self._unhooked, entries) if hooks and not are_harmless(hooks)]

    def buffers(self) -> list[Tensor]:
        """The tensors held that are not parameters: those a call may write to."""
        return [tensor for tensor in self._tensors if not isinstance(tensor, nn.Parameter)]
