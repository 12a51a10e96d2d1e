"""What an engine file holds, read with every check and written in one order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ridgeline.engine.file import tensors
from ridgeline.engine.file.container import MANIFEST, Container, to_json, write
from ridgeline.engine.file.program import DTYPES, OPSET, Program, shown
from ridgeline.errors import EngineError

FORMAT = 1
PROGRAM, WEIGHTS, RECEIPT, PROOF, PROOF_VALUES, TIMINGS, KERNELS, CUBINS = (
    "program.json", "weights.safetensors", "receipt.json", "proof.json", "proof.safetensors", "timings.json",
    "kernels/index.json", "kernels/cubins.bin",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Contents:
    """The parts of an engine.

    ``recipe`` makes derived weights (folded, side by side, narrow) of a checkpoint's tensors; ``checkpoint`` has name,
    dtype and shape of every tensor of the model's state, ``aliases`` the names that share one.
    """

    name: str
    signature: Mapping[str, Any]
    programs: tuple[Program, ...]
    weights: Mapping[str, Tensor]
    target: Mapping[str, Any]
    base: Program | None = None  # the model's own program, over the checkpoint's weights, where no profile is it
    recipe: Program | None = None
    checkpoint: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    padding: Mapping[str, Any] = field(default_factory=dict)
    receipt: Mapping[str, Any] = field(default_factory=dict)
    proof: Mapping[str, Any] = field(default_factory=dict)
    proof_values: Mapping[str, Tensor] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)
    cubins: bytes = b""
    digest: str = ""  # SHA-256 of the manifest, which names every member's

    def members(self) -> dict[str, Any]:
        """Buffers by member, the manifest among them."""
        made: dict[str, Any] = {
            PROGRAM: to_json(
                {
                    "programs": [program.to_json() for program in self.programs],
                    "base": self.base.to_json() if self.base else None,
                    "recipe": self.recipe.to_json() if self.recipe else None,
                }
            ),
            WEIGHTS: tensors.pack(self.weights),
            RECEIPT: to_json(self.receipt),
            PROOF: to_json(self.proof),
            TIMINGS: to_json(self.timings),
        }
        made |= {PROOF_VALUES: tensors.pack(self.proof_values)} if self.proof_values else {}
        made |= {KERNELS: to_json(self.kernels), CUBINS: self.cubins} if self.kernels else {}
        listed = {name: {"bytes": _size(data), "sha256": _sha256(data)} for name, data in made.items()}
        manifest = {
            "format": "ridge", "version": FORMAT, "opset": OPSET, "name": self.name, "signature": self.signature,
            "target": dict(self.target), "padding": self.padding, "members": listed,
            "checkpoint": {name: [dtype, list(shape)] for name, (dtype, shape) in self.checkpoint.items()},
            "aliases": dict(self.aliases), "constants": sorted(self.constants),
        }  # fmt: skip
        return {MANIFEST: to_json(manifest), **made}

    def save(self, path: str | os.PathLike[str]) -> Contents:
        """Write the file, and remember that this machine made it."""
        members = self.members()
        write(path, members)
        digest = hashlib.sha256(members[MANIFEST]).hexdigest()
        store = _store()
        try:
            store.mkdir(parents=True, exist_ok=True)
            (store / digest).touch()
        except OSError:
            pass  # without a store, the file is a stranger's here, too
        return replace(self, digest=digest)

    @property
    def made_here(self) -> bool:
        """Whether this machine wrote the file it was read from."""
        return bool(self.digest) and (_store() / self.digest).exists()


def _store() -> Path:
    """Where this machine keeps the digests of engines it made: ``RIDGELINE_ENGINES``, or the user's cache folder."""
    own, base = os.environ.get("RIDGELINE_ENGINES"), os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else (Path(base) if base else Path.home() / ".cache") / "ridgeline" / "engines"


def _size(data: Any) -> int:
    return sum(memoryview(part).nbytes for part in (data if isinstance(data, list) else [data]))


def _sha256(data: Any) -> str:
    made = hashlib.sha256()
    for part in data if isinstance(data, list) else [data]:
        made.update(part)
    return made.hexdigest()


def read(path: str | os.PathLike[str], check: bool = True) -> Contents:
    """Read a file; with ``check``, every member has to have the digest that the manifest says."""
    container = Container.open(path)
    where = container.path
    manifest = container.json(MANIFEST)
    _check_manifest(manifest, where)
    for name, entry in manifest["members"].items():
        member = container.member(name)
        if len(member) != entry["bytes"] or (check and hashlib.sha256(member).hexdigest() != entry["sha256"]):
            raise EngineError(f"{where}: {name} is not what the manifest says (size or SHA-256): the file is damaged "
                              "or was changed; build it again, or copy it again")  # fmt: skip
    if extra := set(container.places) - set(manifest["members"]) - {MANIFEST}:
        raise EngineError(f"{where} has members that its manifest does not name: {', '.join(sorted(extra)[:3])}")
    weights = tensors.unpack(container.member(WEIGHTS), f"{where}: {WEIGHTS}")
    found = container.json(PROGRAM)
    if not isinstance(found, dict) or not isinstance(found.get("programs"), list) or not found["programs"]:
        raise EngineError(f"{where}: {PROGRAM} has no programs")
    names = frozenset(weights)
    programs = tuple(Program.from_json(p, names, f"{where}: program {i}") for i, p in enumerate(found["programs"]))
    known = frozenset(manifest["checkpoint"]) | names
    base, recipe = (
        None if found.get(key) is None else Program.from_json(found[key], known, f"{where}: {key}")
        for key in ("base", "recipe")
    )
    _check_signature(manifest["signature"], programs, where)
    optional = {name: container.json(name) if name in container else {} for name in (RECEIPT, PROOF, TIMINGS, KERNELS)}
    for name, value in optional.items():
        if not isinstance(value, dict):
            raise EngineError(f"{where}: {name} is no object")
    _check_reports(optional, where)
    values = tensors.unpack(container.member(PROOF_VALUES), PROOF_VALUES) if PROOF_VALUES in container else {}
    return Contents(
        name=manifest["name"], signature=manifest["signature"], programs=programs, weights=weights,
        target=manifest["target"], padding=manifest["padding"], aliases=manifest["aliases"],
        base=base, recipe=recipe,
        checkpoint={name: (dtype, tuple(shape)) for name, (dtype, shape) in manifest["checkpoint"].items()},
        constants=frozenset(manifest["constants"]), receipt=optional[RECEIPT], proof=optional[PROOF],
        proof_values=values, timings=optional[TIMINGS], kernels=optional[KERNELS],
        cubins=bytes(container.member(CUBINS)) if CUBINS in container else b"",
        digest=hashlib.sha256(container.member(MANIFEST)).hexdigest(),
    )  # fmt: skip


def _check_manifest(found: Any, where: str) -> None:
    """Everything in the manifest has the type it is read as."""
    if not isinstance(found, dict) or found.get("format") != "ridge":
        raise EngineError(f"{where}: {MANIFEST} is not an engine's")
    for key, newest in (("version", FORMAT), ("opset", OPSET)):
        number = found.get(key)
        if type(number) is not int or not 1 <= number <= newest:
            raise EngineError(f"{where} has {key} {shown(number)}, and this Ridgeline reads up to {newest}: install a "
                              "newer one")  # fmt: skip
    kinds = {"name": str, "signature": dict, "target": dict, "padding": dict, "members": dict, "checkpoint": dict,
             "aliases": dict, "constants": list}  # fmt: skip
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind):
            raise EngineError(f"{where}: {MANIFEST} has no {key}")
    for name, entry in found["members"].items():
        if (
            not isinstance(entry, dict)
            or type(entry.get("bytes")) is not int
            or not isinstance(entry.get("sha256"), str)
        ):
            raise EngineError(f"{where}: {MANIFEST} says no size and SHA-256 of {shown(name)}")
    for name, entry in found["checkpoint"].items():
        pair = isinstance(entry, list) and len(entry) == 2 and entry[0] in DTYPES and isinstance(entry[1], list)
        if not pair or not all(type(n) is int and n >= 0 for n in entry[1]):
            raise EngineError(f"{where}: {MANIFEST} has no dtype and shape of {shown(name)}")
    if not all(isinstance(name, str) for name in (*found["aliases"].values(), *found["constants"])):
        raise EngineError(f"{where}: {MANIFEST} has an alias or a constant without a name")


def _check_reports(found: dict[str, Any], where: str) -> None:
    """Receipt, proof and kernels have the types they are read as."""

    def fail(what: str) -> EngineError:
        return EngineError(f"{where}: {what} is not readable")

    notes = found[RECEIPT].get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise fail(RECEIPT)
    proof = found[PROOF]
    cases = proof.get("cases", [])
    if not isinstance(cases, list) or not isinstance(proof.get("reference", ""), str):
        raise fail(PROOF)
    number = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (proof.get("error_budget") is None or number(proof["error_budget"])):
        raise fail(PROOF)
    for case in cases:
        parts = (
            isinstance(case, dict) and isinstance(case.get("inputs"), list) and isinstance(case.get("outputs"), list)
        )
        if not parts or not all(isinstance(entry, dict) for entry in (*case["inputs"], *case["outputs"])):
            raise fail(PROOF)
        for entry in case["inputs"]:
            shape, seed = entry.get("shape"), entry.get("seed")
            sizes = isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 40 for n in shape)
            wants = {"normal": ("mean", "std"), "integers": ("low", "high"), "stored": ()}.get(str(entry.get("kind")))
            if not sizes or entry.get("dtype") not in DTYPES or type(seed) is not int or wants is None:
                raise fail(PROOF)
            if not all(number(entry.get(name)) for name in wants):
                raise fail(PROOF)
        for entry in case["outputs"]:
            names = isinstance(entry.get("name"), str) and isinstance(entry.get("values"), str)
            if not names or not number(entry.get("rms")) or not number(entry.get("allowed_rms")):
                raise fail(PROOF)
    kernels = found[KERNELS].get("kernels", [])
    if not isinstance(kernels, list) or not all(isinstance(entry, dict) for entry in kernels):
        raise fail(KERNELS)


def _check_signature(found: dict[str, Any], programs: tuple[Program, ...], where: str) -> None:
    """The structure of calls hands over each input of every program once."""
    num = {len(program.inputs) for program in programs}
    numbers: list[int] = []

    def walk(item: Any, depth: int) -> None:
        if not isinstance(item, dict) or len(item) != 1 or depth > 16:
            raise EngineError(f"{where}: the signature is not readable")
        kind, inner = next(iter(item.items()))
        if kind == "input" and type(inner) is int:
            numbers.append(inner)
        elif kind == "list" and isinstance(inner, list):
            for each in inner:
                walk(each, depth + 1)
        elif kind == "dict" and isinstance(inner, dict):
            for each in inner.values():
                walk(each, depth + 1)
        elif kind != "constant":
            raise EngineError(f"{where}: the signature is not readable")

    names, args, kwargs = found.get("names"), found.get("args"), found.get("kwargs")
    if not isinstance(names, list) or not isinstance(args, list) or not isinstance(kwargs, dict):
        raise EngineError(f"{where}: the signature is not readable")
    if len(names) != len(args) or not all(isinstance(name, str) for name in names):
        raise EngineError(f"{where}: the signature is not readable")
    for item in (*args, *kwargs.values()):
        walk(item, 0)
    if len(num) != 1 or sorted(numbers) != list(range(num.pop())):
        raise EngineError(f"{where}: the signature does not hand over each input once")
