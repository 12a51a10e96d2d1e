"""Every Python example in the README and the guide runs, in order, as a reader would type it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *(page for room in ("guide", "tutorials", "reference") for page in sorted((ROOT / "docs" / room).rglob("*.md"))),
]
_FENCE = re.compile(r"^```python(?P<words>[^\n]*)\n(?P<code>.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\((?!https?://|#|mailto:)(?P<to>[^)#\s]+)")


@dataclass(frozen=True, slots=True)
class Example:
    """A fenced block; words after ``python`` say what it needs: ``gpu`` or ``no-run`` (only parsed)."""

    page: Path
    line: int
    words: frozenset[str]
    code: str

    def compiled(self) -> Any:
        padded = "\n" * self.line + self.code  # so that a traceback points into the page
        return compile(padded, str(self.page), "exec")


def examples(page: Path) -> Iterator[Example]:
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Example(page, line, frozenset(match["words"].split()), match["code"])


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if any(examples(p))], ids=_name)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "example"}
    for example in examples(page):
        code = example.compiled()
        if not example.words & {"no-run", "gpu"}:
            exec(code, namespace)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [p for p in PAGES if any("gpu" in e.words for e in examples(p))], ids=_name)
def test_examples_run_on_a_gpu(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "example"}
    for example in examples(page):
        if "no-run" not in example.words:
            exec(example.compiled(), namespace)


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs").rglob("*.md"))], ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    broken = [m["to"] for m in _LINK.finditer(page.read_text(encoding="utf-8")) if not (page.parent / m["to"]).exists()]
    assert not broken, f"{_name(page)} links to {broken}"
