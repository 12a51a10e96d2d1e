"""Builds the wheel, says its size, and runs the README's first command from it in an empty environment.

    python -m lab.wheel [--limit-mb 5]

Fails above the limit, if the wheel holds recordings or tests, or if the command does not answer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

from lab import ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mb", type=float, default=5.0)
    limit_mb = parser.parse_args().limit_mb
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        size_mb = wheel.stat().st_size / 1e6
        print(f"{wheel.name}: {size_mb:.2f} MB, at most {limit_mb:g} allowed")
        stray = [name for name in zipfile.ZipFile(wheel).namelist() if "recordings/" in name or "tests/" in name]
        if size_mb > limit_mb or stray:
            sys.exit(f"the wheel is too large, or holds what nobody installs it for: {stray[:5]}")
        place = Path(folder) / "venv"
        venv.create(place, with_pip=False)
        installed = [*pip, "--python", str(place / "bin" / "python"), "install", "--no-compile"]
        pins = ROOT / "requirements" / "core.txt"
        subprocess.run([*installed, "-r", str(pins)], check=True)
        subprocess.run([*installed, "--no-deps", str(wheel)], check=True)
        command = [str(place / "bin" / "ridgeline"), "predict", "llama3-8b", "--on", "h200"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder).stdout
        if "ms" not in answer:
            sys.exit(f"ridgeline predict said: {answer[:500]!r}")
        print("ridgeline predict llama3-8b --on h200 answers from it")


if __name__ == "__main__":
    main()
