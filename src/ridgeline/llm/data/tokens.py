"""Token files: token ids in a flat file, read by memory map, described by a JSON file beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ridgeline.errors import InputError
from ridgeline.llm.model.tensor_file import write_text


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInfo:
    """What a token file holds. ``tokenizer`` is the SHA-256 of the tokenizer's file, empty where there was none."""

    num_tokens: int
    dtype: str
    vocab_size: int
    eos: int
    tokenizer: str = ""


class TokenFile:
    """Tokens of documents, each followed by ``info.eos``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        beside = self.path.with_name(self.path.name + ".json")
        try:
            self.info = TokenInfo(**json.loads(beside.read_text()))
        except FileNotFoundError:
            raise InputError(f"no description {beside}: write token files with `ridgeline llm tokenize`") from None
        except (json.JSONDecodeError, TypeError) as error:
            raise InputError(f"{beside} does not describe a token file: {error}") from None
        if self.info.dtype not in ("uint16", "uint32"):
            raise InputError(f"{beside}: tokens are uint16 or uint32, not {self.info.dtype!r}")
        wanted = self.info.num_tokens * np.dtype(self.info.dtype).itemsize
        if not self.path.exists() or self.path.stat().st_size != wanted:
            raise InputError(f"{self.path} is not the {wanted:,} bytes that {beside.name} describes: tokenize again")
        self.tokens = np.memmap(self.path, dtype=self.info.dtype, mode="r")


def write_token_file(
    path: str | Path, documents: Iterable[Sequence[int]], *, vocab_size: int, eos: int, tokenizer: str = ""
) -> TokenInfo:
    """Write documents one after the other, each with ``eos`` behind it."""
    path, dtype, total = Path(path), "uint16" if vocab_size <= 1 << 16 else "uint32", 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        for document in documents:
            ids = np.asarray([*document, eos])
            if ids.min() < 0 or ids.max() >= vocab_size:
                raise InputError(f"{path}: token {ids.max()} is not below the vocabulary's {vocab_size}")
            ids.astype(dtype).tofile(file)
            total += len(ids)
    info = TokenInfo(num_tokens=total, dtype=dtype, vocab_size=vocab_size, eos=eos, tokenizer=tokenizer)
    write_text(path.with_name(path.name + ".json"), json.dumps(asdict(info), indent=1))
    return info


def fingerprint(path: str | Path) -> str:
    """What a tokenizer is known by: the SHA-256 of its file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
