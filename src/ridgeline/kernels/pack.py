"""Kernels compiled ahead of time: a folder of cubins that loads without a compiler, made on any machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from ridgeline.errors import KernelError
from ridgeline.kernels.compiler import Compiled, Variant, compile_variant, source_hash, toolchain
from ridgeline.kernels.files import cache_folder, write_atomically

INDEX, CUBINS, FORMAT = "index.json", "cubins.bin", 1
Progress = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    """Nobody is watching."""


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
    folder: Path, variants: Iterable[Variant], *, jobs: int = 1, progress: Progress = _silent, direct: bool = False
) -> Pack:
    """Compile variants into a pack; the index is written last, so an interrupted run leaves the old one.

    ``direct`` adds the extension for direct calls, where there is a C++ compiler.
    """
    from ridgeline.kernels.call_cache import build as build_direct
    from ridgeline.kernels.launcher import build_native

    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(variants))
    entries: dict[str, Entry] = {}
    blob = bytearray()
    for variant, made in zip(wanted, compiled_all(wanted, jobs), strict=True):
        entries[variant.key()] = Entry(made.name, len(blob), len(made.cubin), made.num_warps, made.shared_bytes)
        blob += made.cubin
        progress(len(entries), len(wanted))
    launcher = build_native(folder)
    if direct:
        with suppress(KernelError):  # without a C++ compiler calls take the Python path
            build_direct(folder)
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


def compiled_all(variants: list[Variant], jobs: int) -> Iterator[Compiled]:
    """Every variant compiled, in order, by as many processes as asked for."""
    if jobs <= 1:
        yield from map(_compiled, variants)
        return
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap(_compiled, variants, chunksize=4)


def _compiled(variant: Variant) -> Compiled:
    import ridgeline.kernels  # noqa: F401  (declares the kernels)
    from ridgeline.kernels.launcher import kernel

    return compile_variant(kernel(variant.kernel).function, variant)


def _put(path: Path, content: bytes) -> None:
    made = path.with_suffix(f".{os.getpid()}.tmp")
    made.write_bytes(content)
    write_atomically(path, made)
