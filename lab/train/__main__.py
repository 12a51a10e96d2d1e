"""``python -m lab.train race|loss|price``: training on this machine's device, and what it should cost."""

from lab.driver import run

run(__package__)
