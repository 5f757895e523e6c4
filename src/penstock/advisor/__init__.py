"""Whether to compress: measured on the user's own data and machine.

    sources.py    what the data is            sample.py arrays.py saved.py states.py recorded.py   a sample of it
    measure.py stored.py   each codec on each key      entropy.py   the bound      machine.py timing.py   speeds
    decide.py     A, B or C: a pure function  settings.py show.py   what to type, and why

Docs: docs/advise.md.
"""  # noqa: E501

from __future__ import annotations

from penstock.advisor.decide import Decision, decide
from penstock.advisor.model import CodecMeasure, KeyMeasure, Limits, Machine, Measurements
from penstock.advisor.sources import Advice, advise

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
