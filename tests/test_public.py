"""The public names: all there, and none of them paid for before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock
from penstock.errors import MissingExtra


@pytest.mark.parametrize("name", penstock.__all__)
def test_every_public_name_resolves(name):
    assert getattr(penstock, name) is not None
    assert name in dir(penstock)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = penstock.nonsense


def test_import_is_lazy():
    code = (
        "import sys, penstock\n"
        "print([m for m in ('torch', 'numpy', 'rich') if m in sys.modules])\n"
        "penstock.PerformanceMonitor, penstock.PenstockError\n"
        "print('torch' in sys.modules)"
    )
    assert _python(code).split("\n")[:2] == ["[]", "False"]


def test_missing_torch_names_the_extra():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import penstock\n"
        "try:\n"
        "    penstock.load_checkpoint\n"
        "except penstock.PenstockError as error:\n"
        "    print(type(error).__name__, error)"
    )
    said = _python(code)
    assert said.startswith(MissingExtra.__name__)
    assert 'pip install "penstock[torch]"' in said


def _python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
