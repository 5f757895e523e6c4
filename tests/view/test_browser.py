"""The page in a real browser: it plays, seeks, marks and saves, and asks nobody else."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from harness import small_disk
from penstock.cli import main as penstock
from penstock.dataset.layout import INFO_PATH
from penstock.samples import read_number, write_sample
from penstock.view.marks import read_marks
from penstock.view.server import ViewServer
from penstock.view.show import open_viewer

HERE = Path(__file__).parent
hand = SimpleNamespace(**runpy.run_path(str(HERE.parent / "dataset" / "handmade.py")))
tool = SimpleNamespace(**runpy.run_path(str(HERE / "browser.py")))
Browser = tool.Browser
pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(300),
    pytest.mark.skipif(tool.find_chromium() is None, reason="NO CHROMIUM: the page is not tested"),
]
SHOWN = "performance.getEntriesByName('opened').length > 0"
WIDTH, HEIGHT = 160, 128
# The pixels that a camera shows, as text of one number per byte.
PIXELS = """(() => {
  const shown = document.querySelectorAll('.camera')[%d].querySelector('video, img');
  const canvas = document.createElement('canvas');
  [canvas.width, canvas.height] = [%d, %d];
  const pen = canvas.getContext('2d');
  pen.drawImage(shown, 0, 0, canvas.width, canvas.height);
  return Array.from(pen.getImageData(0, 0, canvas.width, canvas.height).data).join(',');
})()"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets of each codec, whose pictures carry their number, and their recording."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "bags").mkdir()
    size = {"width": WIDTH, "height": HEIGHT}
    for seed, name in enumerate("ab"):
        path = folder / f"bags/{name}.bag"
        write_sample(path, seconds=4, cameras=1, state_hz=60, seed=seed, **size)
    for codec in ("h264", "av1", "copy"):
        words = ["convert", str(folder / "bags"), str(folder / codec), "--codec", codec, "-q"]
        assert penstock(words) == 0
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@contextmanager
def page(
    browser: Browser, path: Path, *bags: Path, marks: Path | None = None
) -> Iterator[ViewServer]:
    """Show a page; nothing may be complained about, and nobody else asked."""
    file = None if marks is None else str(marks)
    viewer = open_viewer(str(path), [str(bag) for bag in bags] or None, file)
    with ViewServer(viewer) as server:
        browser.open("about:blank")
        browser.wait("location.href === 'about:blank'")
        browser.problems.clear()
        browser.asked.clear()
        browser.open(server.url)
        browser.wait(SHOWN)
        yield server
        problems, asked = [*browser.problems], {url.split("/")[2] for url in browser.asked}
        browser.open("about:blank")
        browser.wait("location.href === 'about:blank'")
    assert problems == []
    assert asked == {server.hosts[0]}


def number_shown(browser: Browser, camera: int = 0) -> int:
    text = browser.run(PIXELS % (camera, WIDTH, HEIGHT))
    pixels = np.array(text.split(","), np.uint8).reshape(HEIGHT, WIDTH, 4)
    return read_number(np.ascontiguousarray(pixels[..., :3]))


def is_still(browser: Browser) -> bool:
    """Whether nothing is on its way."""
    return browser.run(
        "[...document.querySelectorAll('video')].every((v) => !v.seeking && v.readyState >= 2)"
        " && window.penstock.player.cameras.every((c) => !c.busy && c.wanted !== undefined"
        " ? c.wanted === null : !c.busy)"
    )


def settle(browser: Browser) -> None:
    browser.until(lambda: is_still(browser), 20, "pictures")
    browser.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("codec", ["h264", "av1", "copy"])
def test_it_plays_and_seeks_to_the_frame(made: Path, browser: Browser, codec: str) -> None:
    with page(browser, made / codec):
        kind = "img" if codec == "copy" else "video"
        assert browser.run(f"document.querySelectorAll('.camera {kind}').length") == 1
        first = number_shown(browser)
        for frame in (1, 2, 3, 17, 60, 59, 5, 0):
            browser.run(f"window.penstock.player.seek({frame} / 30)")
            settle(browser)
            assert number_shown(browser) == first + frame
        browser.key("ArrowRight")
        browser.key("ArrowRight")
        browser.key("ArrowLeft")
        settle(browser)
        assert number_shown(browser) == first + 1
        browser.key(" ")
        browser.wait("window.penstock.player.t > 0.5")
        browser.key(" ")
        assert not browser.run("window.penstock.player.playing")
        settle(browser)
        frame = browser.run("window.penstock.player.frame")
        assert frame >= 15 and number_shown(browser) == first + frame
        browser.key("ArrowDown")  # the next episode, from the same file
        browser.wait("document.getElementById('title').textContent === 'Episode 1'")
        settle(browser)
        browser.until(lambda: number_shown(browser) == first, 10, "the first picture")


def test_a_key_counts_while_the_list_is_read_anew(made: Path, browser: Browser) -> None:
    """It is read anew whenever a mark is saved, and when the check has ended."""
    with page(browser, made / "copy"):
        browser.run(
            "void window.penstock.list.reload(), document.body.dispatchEvent("
            "new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true}))"
        )
        browser.wait("document.getElementById('title').textContent === 'Episode 1'")


def test_keys_mark_and_it_is_saved_at_once(made: Path, browser: Browser, tmp_path: Path) -> None:
    marks = tmp_path / "m.yaml"
    with page(browser, made / "h264", marks=marks):
        browser.key("x")
        browser.until(marks.is_file, 10, "the marks")
        browser.until(lambda: list(read_marks(marks).delete) == [0], 10, "a rejection")
        browser.wait("document.querySelector('.row.reject') !== null")
        browser.key("ArrowDown")
        browser.wait("document.getElementById('title').textContent === 'Episode 1'")
        for frame, key in ((10, "["), (40, "]"), (20, "c")):
            browser.run(f"window.penstock.player.seek({frame} / 30)")
            browser.key(key)
        browser.until(lambda: dict(read_marks(marks).split) == {1: [20]}, 10, "a cut")
        assert dict(read_marks(marks).trim) == {1: (10, 41)}
        for frame in (25, 29, 35, 35):
            browser.run(f"window.penstock.player.seek({frame} / 30)")
            browser.key("X")
        browser.until(lambda: dict(read_marks(marks).cut) == {1: [(25, 30), (35, 36)]}, 10, "cuts")
        browser.run("window.penstock.player.seek(26 / 30)")
        browser.key("X")
        browser.until(lambda: dict(read_marks(marks).cut) == {1: [(35, 36)]}, 10, "one taken back")
        browser.key("t")
        browser.wait("document.getElementById('relabel').open")
        browser.run("document.getElementById('new-task').value = 'fold <b>it</b>'")
        browser.run("document.getElementById('relabel').close('ok')")
        browser.until(lambda: read_marks(marks).relabel.get(1) == "fold <b>it</b>", 10, "a task")
        browser.wait("document.getElementById('task').textContent === 'fold <b>it</b>'")
        browser.key("k")
        browser.until(lambda: not read_marks(marks).relabel, 10, "keeping")


def test_names_with_markup_stay_text(browser: Browser, tmp_path: Path) -> None:
    evil = '<img src=x onerror="window.broken=1"><script>window.broken=1</script>'
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hand.make_dataset.__globals__, "TASKS", (evil, "place the cup"))
        root = hand.make_dataset(tmp_path / "a<b>&'\"set")
    with page(browser, root):
        assert browser.run("document.getElementById('task').textContent") == evil
        assert browser.run("document.getElementById('name').textContent") == root.name
        assert browser.run("window.broken") is None


def test_a_recording_and_both(made: Path, browser: Browser) -> None:
    bags = made / "bags"
    with page(browser, bags):
        first = number_shown(browser)
        browser.run("window.penstock.player.seek(1.0)")
        settle(browser)
        assert abs(number_shown(browser) - first - 30) <= 1
    with page(browser, made / "h264", bags):
        for frame in (0, 20, 45):
            browser.run(f"window.penstock.player.seek({frame} / 30)")
            settle(browser)
            assert number_shown(browser, 0) == number_shown(browser, 1)


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen(made: Path, browser: Browser, width: int, scheme: str) -> None:
    browser.scheme(scheme)
    browser.resize(width, 844, mobile=width < 500)
    try:
        with page(browser, made / "h264", made / "bags"):
            assert browser.run("document.documentElement.scrollWidth") <= width
            assert browser.run("document.querySelector('main').scrollWidth") <= width
            paper = browser.run("getComputedStyle(document.body).backgroundColor")
            bright = sum(map(int, paper[4:-1].split(",")))
            assert (bright > 380) == (scheme == "light")
            if width < 500:
                browser.run("document.getElementById('menu').click()")
                browser.wait("document.querySelectorAll('.row').length === 2")
                browser.run("document.querySelectorAll('.row')[1].click()")
                browser.wait("document.getElementById('title').textContent === 'Episode 1'")
    finally:
        browser.resize(1280, 900)
        browser.scheme("light")


def test_an_empty_dataset_says_so_and_its_buttons_do_nothing(
    browser: Browser, tmp_path: Path
) -> None:
    root = hand.make_dataset(tmp_path / "set")
    info = json.loads((root / INFO_PATH).read_text())
    info |= {"total_episodes": 0, "total_frames": 0, "total_tasks": 0, "splits": {}}
    for name in ("data", "videos", "meta"):
        shutil.rmtree(root / name)
    (root / "meta").mkdir()
    (root / INFO_PATH).write_text(json.dumps(info))
    with ViewServer(open_viewer(str(root), None, None)) as server:
        browser.problems.clear()
        browser.open(server.url)
        browser.wait("document.getElementById('title')?.textContent.startsWith('No ')")
        browser.run("document.querySelectorAll('main button').forEach((each) => each.click())")
        for key in ("ArrowRight", "ArrowDown", " ", "x", "m"):
            browser.key(key)
        browser.run("new Promise((done) => setTimeout(done, 100))")
        browser.open("about:blank")
    assert browser.problems == []


def test_a_screenshot(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.png"
    assert penstock(["view", str(made / "copy"), "--screenshot", str(target), "-q"]) == 0
    assert target.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and target.stat().st_size > 20_000


def test_a_screenshot_on_a_full_disk(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The browser leaves an empty file there, and says nothing."""
    with small_disk(tmp_path / "disk", "size=64k") as mounted:
        if not mounted:
            pytest.skip("no tmpfs can be mounted here")
        target = tmp_path / "disk" / "page.png"
        target.write_bytes(b"of before" * 7000)
        assert penstock(["view", str(made / "copy"), "--screenshot", str(target), "-q"]) == 2
        assert "could not write" in capsys.readouterr().err
        assert target.read_bytes() == b"of before" * 7000
        assert [path.name for path in target.parent.iterdir()] == ["page.png"]


def test_a_video_that_the_browser_cannot_play(made: Path, browser: Browser, tmp_path: Path) -> None:
    root = tmp_path / "set"
    shutil.copytree(made / "h264", root)
    with ViewServer(open_viewer(str(root), None, None)) as server:
        view = server.viewer.view(0)
        video = view.video(0)
        whole = video.read_bytes()
        video.write_bytes(whole.replace(b"avc1", b"xxx1"))
        browser.open(server.url)
        browser.wait("document.querySelectorAll('.camera img').length === 1")
        browser.open("about:blank")
