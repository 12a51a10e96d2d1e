"""Kernels compiled ahead of time: a folder of cubins that loads without a compiler, made on any machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ridgeline.errors import KernelError
from ridgeline.kernels.compiler import Compiled, Variant, compile_variant, source_hash, toolchain
from ridgeline.kernels.files import cache_folder, write_atomically

INDEX, CUBINS, FORMAT = "index.json", "cubins.bin", 1


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a cubin lies in the pack, and what a launch of it needs."""

    name: str
    offset: int
    size: int
    num_warps: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Pack:
    """A pack on disk, its index read; cubins are read when first asked for."""

    folder: Path
    entries: dict[str, Entry]
    launcher: Path | None

    def find(self, variant: Variant) -> Compiled | None:
        entry = self.entries.get(variant.key())
        if entry is None:
            return None
        with (self.folder / CUBINS).open("rb") as file:
            file.seek(entry.offset)
            cubin = file.read(entry.size)
        return Compiled(entry.name, cubin, entry.num_warps, entry.shared_bytes)


def pack_folder() -> Path:
    """``RIDGELINE_KERNEL_PACK``, or a folder beside the cache."""
    own = os.environ.get("RIDGELINE_KERNEL_PACK")
    return Path(own) if own else cache_folder() / "pack"


def find(variant: Variant) -> Compiled | None:
    """The variant's cubin from the pack in use, or None."""
    packed = opened(pack_folder())
    return packed.find(variant) if packed else None


def launcher_path() -> Path | None:
    packed = opened(pack_folder())
    return packed.launcher if packed else None


@cache
def opened(folder: Path) -> Pack | None:
    """The pack in a folder; None where there is none, or where it was made by another compiler or from other source."""
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        found = json.loads(index.read_text())
        entries = {key: Entry(**value) for key, value in found["entries"].items()}
        current = found["format"] == FORMAT and found["toolchain"] == toolchain() and found["source"] == source_hash()
        launcher = folder / found["launcher"] if found.get("launcher") else None
    except (ValueError, KeyError, TypeError) as error:
        raise KernelError(f"{index} is no kernel pack ({error}): make it again with `ridgeline kernels pack`") from None
    return Pack(folder, entries, launcher if launcher and launcher.exists() else None) if current else None


def write(
    folder: Path,
    variants: Iterable[Variant],
    function_of: Callable[[str], Any],
    build_launcher: Callable[[Path], Path],
    progress: Callable[[Variant], None] = lambda variant: None,
) -> Pack:
    """Compile variants into a pack; the index is written last, so an interrupted run leaves the old one."""
    folder.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Entry] = {}
    blob = bytearray()
    for variant in dict.fromkeys(variants):
        made = compile_variant(function_of(variant.kernel), variant)
        entries[variant.key()] = Entry(made.name, len(blob), len(made.cubin), made.num_warps, made.shared_bytes)
        blob += made.cubin
        progress(variant)
    launcher = build_launcher(folder)
    _put(folder / CUBINS, bytes(blob))
    document = {
        "format": FORMAT,
        "toolchain": toolchain(),
        "source": source_hash(),
        "launcher": launcher.name,
        "entries": {key: asdict(entry) for key, entry in entries.items()},
    }
    _put(folder / INDEX, json.dumps(document, indent=1).encode())
    opened.cache_clear()
    return Pack(folder, entries, launcher)


def _put(path: Path, content: bytes) -> None:
    made = path.with_suffix(f".{os.getpid()}.tmp")
    made.write_bytes(content)
    write_atomically(path, made)
