"""How people write devices, counts and yes or no in tables of results, and what they mean by it."""

from __future__ import annotations

import re
from contextlib import suppress

from ridgeline.errors import HardwareError
from ridgeline.hardware import device
from ridgeline.validation.publications import publications

_SCALES = {"": 1, "k": 1 << 10, "m": 1 << 20}
_THINGS = r"(?:tokens?|gpus?|devices?|chips?|sequences?|layers?|heads?|x)"
_COUNT = re.compile(rf"[~≈]?\s*(\d[\d,_ ]*(?:\.\d+)?)\s*([km])?\s*{_THINGS}?")
_NO = ("no", "none", "false", "off", "0", "n", "n/a", "disabled", "without", "unfused")


def whole_number(text: str) -> int | None:
    """``'8k'`` → 8192, ``'1,024 GPUs'`` → 1024, ``'4.0'`` → 4; None for what is no count of things."""
    found = _COUNT.fullmatch(text.strip().lower())
    if found is None:
        return None
    value = float(re.sub(r"[,_ ]", "", found[1])) * _SCALES[found[2] or ""]
    return int(value) if value == int(value) else None


def is_no(text: str) -> bool:
    """Whether a cell denies: ``no``, ``False``, ``0``, ``none (…)``."""
    return re.split(r"[\s(,;:]", text.strip().lower(), maxsplit=1)[0] in _NO


def catalog_name(text: str, file: str) -> str | None:
    """The catalog's name of the device that a cell of ``file`` means: by its words, else as the catalog reads it."""
    found = publications("devices")["device"].choose({"text": text.lower().replace("_", "-"), "file": file})
    if found:
        return str(found["device"])
    for part in (text, re.sub(r"\(.*?\)", " ", text), *re.findall(r"\((.*?)\)", text)):
        with suppress(HardwareError):
            if part.strip() and "=" not in part:
                return device(part.strip()).name
    return None


def plain(text: str) -> str:
    """A name without what people disagree on: capitals, hyphens, underscores and blanks."""
    return re.sub(r"[\s_-]", "", text.lower())


_SIZES = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 1 << 10, "mb": 1 << 20, "gb": 1 << 30}


def byte_size(text: str) -> float | None:
    """``'32 MiB'`` → 33554432, ``'2,048'`` → 2048; messages are powers of two, whatever their unit is called."""
    found = re.fullmatch(r"([\d,_]+(?:\.\d+)?)\s*([kmg]?i?b?)(?:ytes)?", text.strip().lower())
    if found is None:
        return None
    unit = found[2] if found[2].endswith("b") or not found[2] else f"{found[2].removesuffix('i')}b"
    return float(re.sub(r"[,_]", "", found[1])) * _SIZES[unit or "b"]


_NARROW = (
    ("fp8", r"fp8|float8|e4m3"), ("int8", r"int8|w8a8"), ("tf32", r"tf32"), ("fp32", r"fp32|float32|single|full prec"),
    ("fp16", r"fp16|float16|half|bf16|bfloat16|\bamp\b|mixed"),
)  # fmt: skip


def number_format(text: str) -> str | None:
    """fp8, int8, tf32, fp32 or fp16 (also for bf16 and automatic mixed precision, which run as fast)."""
    lowered = text.lower()
    found = [name for name, pattern in _NARROW if re.search(pattern, lowered)]
    return found[0] if len(found) == 1 else None
