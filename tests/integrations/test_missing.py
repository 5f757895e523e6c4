"""The integrations without the libraries that they integrate with (tests/peers has these)."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_the_error_says_what_to_install(library):
    code = f"import sys; sys.modules[{library!r}] = None; import penstock.integrations.{library}"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    ).stderr.splitlines()[-1]
    assert said.endswith(f'{library} is not installed: pip install "penstock[{library}]"')
