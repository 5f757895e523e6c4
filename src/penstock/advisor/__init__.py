"""Whether to compress: measured on the user's own data and machine.

    sources.py    what the data is     arrays.py checkpoints.py saved.py recorded.py   its values
    sample.py     a piece of everywhere
    measure.py    what each codec makes of each key, how fast; the machine
    decide.py     the records; A, B or C: a pure function     show.py   why, and what to type

Docs: docs/advise.md.
"""

from __future__ import annotations

from penstock.advisor.decide import (
    CodecMeasure,
    Decision,
    KeyMeasure,
    Limits,
    Machine,
    Measurements,
    decide,
)
from penstock.advisor.show import Advice
from penstock.advisor.sources import advise

__all__ = [
    "Advice",
    "CodecMeasure",
    "Decision",
    "KeyMeasure",
    "Limits",
    "Machine",
    "Measurements",
    "advise",
    "decide",
]
