"""Where the tour plays: it prints every command and every piece of Python, and then runs it."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PenstockError, UsageError

T = TypeVar("T")

_MARKER = ".penstock-demo"
_LOOK_S = 0.1
_INDENT = "   "


class Stage:
    """The folder of the tour, and what was said so far.

    Args:
        out: The folder to make; one that an earlier tour made is cleared of what that left.
        props: What a tour leaves there, and may clear.
        silent: Print nothing.

    Attributes:
        home: The folder.
        lines: What was said.

    Raises:
        UsageError: The folder exists, and is not that of a tour.
    """

    def __init__(
        self, out: str | os.PathLike[str], props: tuple[str, ...], silent: bool = False
    ) -> None:
        self._silent = silent
        self.home = Path(out)
        self.lines: list[str] = []
        self._steps = 0
        self._begin_s = time.monotonic()
        home = self.home
        if home.exists() and not home.is_dir():
            raise UsageError(f"{home} is a file; choose another --out")
        if home.exists() and any(home.iterdir()) and not (home / _MARKER).is_file():
            raise UsageError(f"{home} exists and was not made by the demo; choose another --out")
        home.mkdir(parents=True, exist_ok=True)
        (home / _MARKER).touch()
        for prop in props:
            if (home / prop).is_dir():
                shutil.rmtree(home / prop)
            else:
                (home / prop).unlink(missing_ok=True)

    @property
    def seconds(self) -> float:
        """Since the tour began."""
        return time.monotonic() - self._begin_s

    def say(self, text: str) -> None:
        """Print, and remember."""
        self.lines.append(text)
        if not self._silent:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()

    def step(self, title: str) -> None:
        """Begin the next step."""
        self._steps += 1
        self.say(f"\n{self._steps}. {title}   [{self.seconds:.0f} s]")

    def tell(self, text: str) -> None:
        """Print what a step found, indented."""
        self.say(textwrap.indent(text.rstrip("\n"), _INDENT))

    def run(self, *words: object, code: int = 0) -> None:
        """Run `penstock words`, and print what it prints; its progress goes to the terminal."""
        self.tell(self._run(words, code, f"$ {_shell(words)}"))

    def run_json(self, *words: object, to: str) -> Any:
        """Run `penstock words --json`, keep what it prints in a file, and return it."""
        words = (*words, "--json")
        path = self.home / to
        printed = self._run(words, 0, f"$ {_shell(words)} > {shlex.quote(str(path))}")
        path.write_text(printed)
        return json.loads(printed)

    def interrupt(self, *words: object, when: Callable[[], bool]) -> None:
        """Run `penstock words`, and press Ctrl-C, so to speak, as soon as it is time.

        On a slow or paused machine it may have ended by then, which is well, too.
        """
        self.tell(f"$ {_shell(words)}")
        # A shell starts what is to run in the background with Ctrl-C ignored, children included.
        deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        number = signal.SIGTERM if deaf else signal.SIGINT
        with _penstock(words) as child:
            try:
                while child.poll() is None and not when():
                    time.sleep(_LOOK_S)
                self.tell("kill -TERM" if deaf else "^C")
                child.send_signal(number)
                printed, _ = child.communicate()
            except BaseException:
                child.kill()
                raise
        self.tell(printed)
        _check(words, child.returncode, 128 + number, 0)

    def python(self, function: Callable[..., T], *arguments: object) -> T:
        """Print the source of a function and the call, then make it."""
        self.tell(inspect.getsource(function))
        values = ", ".join(repr(argument) for argument in arguments)
        self.tell(f">>> {function.__name__}({values})")
        return function(*arguments)

    def _run(self, words: tuple[object, ...], code: int, shown: str) -> str:
        self.tell(shown)
        with _penstock(words) as child:
            try:
                printed, _ = child.communicate()
            except BaseException:
                child.kill()
                raise
        _check(words, child.returncode, code)
        return printed


def _penstock(words: tuple[object, ...]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603


def _shell(words: tuple[object, ...]) -> str:
    return " ".join(["penstock", *(shlex.quote(str(word)) for word in words)])


def _check(words: tuple[object, ...], code: int, *expected: int) -> None:
    if code not in expected:
        raise PenstockError(f"{_shell(words)} ended with code {code} instead of {expected[0]}")
