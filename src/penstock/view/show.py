"""Open what is there to be looked at; serve the page, or take a picture of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from penstock.bags.find import to_path
from penstock.core.files import storage_error
from penstock.core.interrupt import check_stop
from penstock.dataset.layout import INFO_PATH
from penstock.errors import UsageError
from penstock.inspect.dataset import is_dataset
from penstock.objects import ObjectPath, is_object
from penstock.view.datasets import DatasetSource
from penstock.view.marks import Marks
from penstock.view.model import Source, pick
from penstock.view.recordings import Recordings
from penstock.view.server import Viewer, ViewServer

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# What a whole picture ends with: on a full disk browsers write a part, and say nothing.
_PICTURE_ENDS = {".png": b"IEND\xaeB`\x82", ".jpg": b"\xff\xd9", ".jpeg": b"\xff\xd9"}
_SHOT_S = 60.0
_POLL_S = 0.1


def open_source(path: str, recordings: list[str] | None = None) -> Source:
    """Open a dataset or recordings, or a dataset beside its recordings.

    Raises:
        UsageError: There is nothing under a name.
        DataError: It is neither.
    """
    if not is_object(path) and not Path(path).exists():
        raise UsageError(f"there is no file or folder {path}")
    beside = Recordings([to_path(one) for one in recordings]) if recordings else None
    if is_object(path) and (ObjectPath(path) / INFO_PATH).is_file():
        return DatasetSource(ObjectPath(path), beside)
    if not is_object(path) and is_dataset(Path(path)):
        return DatasetSource(Path(path), beside)
    if beside is not None:
        raise UsageError(f"{path} is no dataset: --with shows recordings beside one")
    return Recordings([to_path(path)])


def open_viewer(
    path: str, recordings: list[str] | None, marks: str | None, episode: int = 0
) -> Viewer:
    """Open what is to be served, and the reviewer's marks.

    Raises:
        UsageError: There is nothing under a name, no such episode to begin with, or the marks are
            of another dataset.
    """
    source = open_source(path, recordings)
    try:
        if episode:
            pick(source.rows, episode, "episode")
        if not source.can_mark:
            if marks is not None:
                raise UsageError(f"{path} is no dataset: only episodes of one can be marked")
            return Viewer(source, None)
        # Those of a dataset in object storage are in the folder in which the command was given.
        root = Path(ObjectPath(path).name if is_object(path) else path).resolve()
        file = Path(marks) if marks else root.with_name(f"{root.name}.marks.yaml")
        _check_folder(file)
        return Viewer(source, Marks(file, [row.size for row in source.rows]))
    except BaseException:
        source.close()
        raise


def _check_folder(file: Path) -> None:
    if not file.resolve().parent.is_dir():
        raise UsageError(f"there is no folder for {file}")


def serve(viewer: Viewer, port: int, say: Callable[[str], None]) -> None:
    """Serve the page until a signal comes; `say` is told the address."""
    try:
        server = ViewServer(viewer, port)
    except (OSError, OverflowError) as error:
        viewer.close()
        raise UsageError(f"port {port} cannot be had ({error}): leave --port out") from error
    with server:
        say(server.url)
        with suppress(KeyboardInterrupt):
            while True:
                check_stop()
                time.sleep(_POLL_S)


def screenshot(
    opened: Callable[[], Viewer], target: Path, episode: int, width: int, dark: bool
) -> None:
    """Write a PNG of the page when all of it is drawn.

    Args:
        opened: Opens what to show, once a browser was found.
        target: The file.
        episode: Which to show.
        width: Of the page.
        dark: In dark colours.

    Raises:
        UsageError: There is no browser, or it failed. What was under this name is still there.
    """
    browser = next(filter(None, map(shutil.which, _BROWSERS)), None)
    if browser is None:
        raise UsageError("--screenshot needs Chromium or Chrome, and neither is on the PATH")
    _check_folder(target)
    # Beside it: a browser in a box of its own (snap) sees no other temporary folder.
    taken = target.with_name(f"{target.stem}.{os.getpid()}{target.suffix}").resolve()
    with ViewServer(opened()) as server, ExitStack() as after:
        after.callback(lambda: taken.unlink(missing_ok=True))
        words = [
            browser,
            "--headless=new",
            "--disable-gpu",
            "--no-first-run",
            "--hide-scrollbars",
            f"--window-size={width},{max(900, width * 3 // 4)}",
            f"--screenshot={taken}",
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # it refuses root otherwise
            f"{server.url}?shot=1#{episode}",
        ]
        try:
            subprocess.run(words, capture_output=True, timeout=_SHOT_S, check=False)  # noqa: S603
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{browser} did not take the picture: {error}") from error
        whole = _PICTURE_ENDS.get(target.suffix.lower(), b"")
        if not taken.is_file() or not (data := taken.read_bytes()) or not data.endswith(whole):
            raise UsageError(f"{browser} could not write {target}; is there room for it?")
        try:
            taken.replace(target)
        except OSError as error:
            raise storage_error("write", target, error) from error
