"""Every planted cause and healthy program, of whichever suite: each module enters its own."""

from __future__ import annotations

import again
import eighteenth
import eighth
import eleventh
import fifteenth
import fifth
import fourteenth
import fourth
import fresh
import healthy
import nineteenth
import ninth
import seventeenth
import seventh
import sixteenth
import sixth
import tenth
import third
import thirteenth
import trials
import twelfth
import twentieth
import twentyfifth
import twentyfirst
import twentyfourth
import twentysecond
import twentythird
from cases import CASES

__all__ = [
    "CASES", "again", "eighteenth", "eighth", "eleventh", "fifteenth", "fifth", "fourteenth", "fourth", "fresh",
    "healthy", "nineteenth", "ninth", "seventeenth", "seventh", "sixteenth", "sixth", "tenth", "third", "thirteenth",
    "trials", "twelfth", "twentieth", "twentyfifth", "twentyfirst", "twentyfourth", "twentysecond", "twentythird",
]  # fmt: skip
