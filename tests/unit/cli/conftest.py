"""A terminal that runs a command line in this process and keeps what it printed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ridgeline.cli.app import run


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


class Terminal:
    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self.capsys, self.monkeypatch = capsys, monkeypatch

    def __call__(self, *argv: str, width: int = 80) -> Said:
        self.monkeypatch.setenv("COLUMNS", str(width))
        self.monkeypatch.setenv("NO_COLOR", "1")
        code = run(argv)
        printed = self.capsys.readouterr()
        return Said(code, printed.out, printed.err)


@pytest.fixture
def ridgeline(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    return Terminal(capsys, monkeypatch)
