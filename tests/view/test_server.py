"""The viewer's server: what it shows is what is there, and nobody else gets it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest

from penstock.bags import open_bag
from penstock.cli import main as penstock
from penstock.dataset.layout import INFO_PATH
from penstock.dataset.reader import Dataset
from penstock.errors import DataError, UsageError
from penstock.media.images import ImageDecoder, to_rgb
from penstock.samples import write_sample
from penstock.view.server import ViewServer
from penstock.view.show import open_source, open_viewer

HERE = Path(__file__).parent
hand = SimpleNamespace(**runpy.run_path(str(HERE.parent / "dataset" / "handmade.py")))
Visitor = runpy.run_path(str(HERE / "looking.py"))["Visitor"]


def serve(path: Path, *bags: Path) -> ViewServer:
    return ViewServer(open_viewer(str(path), [str(bag) for bag in bags] or None, None))


def pixels(jpeg: bytes) -> np.ndarray:
    return to_rgb(ImageDecoder().jpeg(jpeg)).astype(np.float64)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hand.make_dataset(tmp_path_factory.mktemp("view") / "set")


@pytest.fixture(scope="module")
def visitor(dataset: Path) -> Iterator[Visitor]:
    with serve(dataset) as server:
        yield Visitor(server)


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bags")
    write_sample(
        folder / "take.bag",
        seconds=3,
        cameras=1,
        width=64,
        height=48,
        depth=True,
        state_hz=50,
        trouble=["drop_frames"],
    )
    return folder / "take.bag"


# ------------------------------------------------------------------ what is shown


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_an_episode_is_shown_as_it_is(tmp_path: Path, version: str) -> None:
    root = hand.make_dataset(tmp_path / "set", version)
    with serve(root) as server:
        visitor = Visitor(server)
        about = visitor.get("api/about")
        assert about["episodes"] == 3 and about["kind"].endswith(version)
        episode = visitor.get("api/episode/2")
        assert episode["frames"] == hand.LENGTHS[2] and episode["task"] == hand.TASKS[0]
        modes = {camera["name"]: camera["mode"] for camera in episode["cameras"]}
        assert modes == {hand.TOP: "video", hand.SIDE: "video", hand.WRIST: "frames"}
        names = [curve["name"] for curve in episode["curves"]]
        assert names[:2] == ["observation.state", "action"]
        assert episode["curves"][1]["under"] == 0
        for number, name in enumerate(names):
            _, t_s, values = visitor.curve(f"curve/2/{number}")
            expected = np.asarray(hand.values(2)[name], np.float32).reshape(hand.LENGTHS[2], -1)
            assert np.array_equal(values, expected)
            assert np.allclose(t_s, np.arange(hand.LENGTHS[2]) / hand.FPS)
        assert visitor.curve("curve/2/0")[0] == [*"abcdefg"]


def test_a_frame_is_the_picture(visitor: Visitor) -> None:
    cameras = [camera["name"] for camera in visitor.get("api/episode/1")["cameras"]]
    for number, name in enumerate(cameras):
        status, headers, data = visitor.ask(f"frame/1/{number}/5?width=640")
        assert status == 200 and headers["Content-Type"] == "image/jpeg"
        shown = pixels(data)
        expected = hand.picture(1, 5, name).astype(np.float64)
        assert shown.shape == expected.shape
        assert np.abs(shown - expected).mean() < 8


def test_a_video_is_sent_by_ranges(visitor: Visitor, dataset: Path) -> None:
    file = dataset / Dataset(dataset).episode(1).videos[hand.TOP].file
    whole = file.read_bytes()
    size = len(whole)
    status, headers, data = visitor.ask("video/1/0")
    assert (status, data) == (200, whole) and headers["Accept-Ranges"] == "bytes"
    for text, first, stop in [
        ("bytes=0-", 0, size),
        ("bytes=10-19", 10, 20),
        ("bytes=-7", size - 7, size),
        (f"bytes=5-{10**17}", 5, size),
        (f"bytes=-{10**17}", 0, size),
    ]:
        status, headers, data = visitor.ask("video/1/0", headers={"Range": text})
        assert (status, data) == (206, whole[first:stop])
        assert headers["Content-Range"] == f"bytes {first}-{stop - 1}/{size}"
    status, _, data = visitor.ask("video/1/0", headers={"Range": f"bytes={size}-"})
    assert (status, data) == (416, b"")
    for text in ("bytes=1-2,4-5", "bytes=x-", "lines=1-2", "bytes=9-" + "9" * 400):
        status, _, data = visitor.ask("video/1/0", headers={"Range": text})
        assert (status, data) in [(200, whole), (416, b"")]


def test_a_large_video_comes_in_parts(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set")
    file = root / Dataset(root).episode(0).videos[hand.TOP].file
    with file.open("ab") as out:
        out.write(bytes(9 << 20))
    with serve(root) as server:
        status, headers, data = Visitor(server).ask("video/0/0", headers={"Range": "bytes=0-"})
    assert status == 206 and len(data) <= 512 << 10
    assert headers["Content-Range"].endswith(f"/{file.stat().st_size}")


def test_a_recording(bag: Path) -> None:
    with serve(bag) as server:
        visitor = Visitor(server)
        assert visitor.get("api/about")["can_mark"] is False
        episode = visitor.get("api/episode/0")
        kinds = {c["name"]: c["depth_mm"] is not None for c in episode["cameras"]}
        assert len(kinds) == 2 and sum(kinds.values()) == 1
        for number, camera in enumerate(episode["cameras"]):
            status, _, data = visitor.ask(f"frame/0/{number}/{camera['count'] - 1}")
            assert status == 200 and pixels(data).shape == (48, 64, 3)
            _, _, times = visitor.ask(f"times/0/{number}")
            assert len(np.frombuffer(times, "<f8")) == camera["count"]
        names = [curve["name"] for curve in episode["curves"]]
        labels, t_s, values = visitor.curve(
            f"curve/0/{names.index('/sensors_data_raw joint_data.joint_q')}"
        )
        assert len(labels) == 28 and np.isfinite(values).all() and np.all(np.diff(t_s) >= 0)
        kinds = {kind for _, kind, _ in visitor.get("api/events/0")}
        assert "dropped" in kinds
        assert visitor.post("api/mark/0", {"reject": True})[0] == 404


def test_a_dataset_beside_its_recording(bag: Path, tmp_path: Path) -> None:
    assert penstock(["convert", str(bag), str(tmp_path / "set"), "-q"]) == 0
    with serve(tmp_path / "set", bag) as server:
        visitor = Visitor(server)
        episode = visitor.get("api/episode/0")
        origins = [camera["origin"] for camera in episode["cameras"]]
        assert set(origins) == {"dataset", "recording"}
        first = origins.index("recording")
        times = np.frombuffer(visitor.ask(f"times/0/{first}")[2], "<f8")
        assert abs(times - 0).min() < 0.05  # a picture was recorded when the episode begins
        at = int(np.abs(times - 1.0).argmin())
        recorded, made = (
            pixels(visitor.ask(path)[2]) for path in (f"frame/0/{first}/{at}", "frame/0/0/30")
        )
        assert np.abs(recorded - made).mean() < 12
        curves = {curve["name"]: n for n, curve in enumerate(episode["curves"])}
        _, t_s, _ = visitor.curve(f"curve/0/{curves['/sensors_data_raw joint_data.joint_q']}")
        assert t_s[0] >= -0.1 and t_s[-1] <= episode["seconds"] + 0.1


def test_repeated_pictures_and_wrong_times_are_marked(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        usual = hand.values
        globals_of = hand.make_dataset.__globals__

        def late(episode: int) -> dict[str, np.ndarray]:
            found = usual(episode)
            found["timestamp"] = found["timestamp"].copy()
            found["timestamp"][4] += 0.02
            return found

        picture = hand.picture

        def again(episode: int, k: int, camera: str) -> np.ndarray:
            return picture(episode, 6 if k == 7 else k, camera)

        patch.setitem(globals_of, "values", late)
        patch.setitem(globals_of, "picture", again)
        root = hand.make_dataset(tmp_path / "set")
    view = open_source(str(root)).open(2)
    found = {(event.kind, round(event.t_s * hand.FPS)) for event in view.events()}
    assert ("late", 4) in found
    assert ("repeated", 7) in found
    assert ("repeated", 9) not in found


# ------------------------------------------------------------------ the list


def test_the_list_filters_and_sorts(visitor: Visitor) -> None:
    def numbers(query: str) -> list[int]:
        return [row["index"] for row in visitor.get(f"api/episodes?{query}")["rows"]]

    assert numbers("") == [0, 1, 2]
    assert numbers("order=length") == [1, 0, 2]
    assert numbers("order=length&down=1") == [2, 0, 1]
    assert numbers("text=PLACE") == [1]
    assert numbers("text=2") == [2]
    assert numbers("first=1&count=1") == [1]
    assert numbers("which=rejected") == []
    assert visitor.ask("api/episodes?order=__class__")[0] == 404
    assert len(numbers("count=999999999")) == 3


# ------------------------------------------------------------------ who is kept out

ANYWHERE = ["", "api/about", "api/episode/0", "video/0/0", "frame/0/0/0", "app.js"]


@pytest.mark.parametrize("path", ANYWHERE)
def test_without_the_token_nothing_is_given(visitor: Visitor, path: str) -> None:
    for base in ("/", "/x/", f"/{'a' * 32}/", f"{visitor.base[:-2]}/", "//", f"/%00{path}/"):
        status, _, data = visitor.ask(base + path, raw=True)
        assert status == 403 and b"token" not in data and visitor.server.token.encode() not in data


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1:1"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ],
    ids=str,
)
def test_other_origins_are_refused(visitor: Visitor, headers: dict[str, str]) -> None:
    for path in ANYWHERE:
        assert visitor.ask(path, headers=headers)[0] == 403
    sent = {"Content-Type": "application/json", **headers}
    assert visitor.ask("api/mark/0", "POST", b'{"reject": true}', sent)[0] == 403
    assert visitor.get("api/episode/0")["mark"]["reject"] is False


def test_two_hosts_are_refused(visitor: Visitor) -> None:
    with socket.create_connection(visitor.server.server_address) as line:
        host = visitor.server.hosts[0]
        text = f"GET {visitor.base} HTTP/1.1\r\nHost: {host}\r\nHost: evil.example\r\n\r\n"
        line.sendall(text.encode())
        assert b" 403 " in line.recv(100)


@pytest.mark.parametrize(
    "path",
    [
        "../../../../etc/passwd",
        "..%2f..%2fetc%2fpasswd",
        "video/../../../etc/passwd",
        "video/0/..%2f..%2fmeta%2finfo.json",
        "page/../server.py",
        "server.py",
        "__init__.py",
        "meta/info.json",
        "frame/0/0/-1",
        "frame/0/0/9999999",
        "frame/0/0/1e9",
        "frame/0/0/" + "9" * 40,
        "frame/0/99/0",
        "frame/99/0/0",
        "curve/0/99",
        "times/0/99",
        "api/episode/٣",
        "api/episode/0x0",
        "video/0/2",  # pictures in parquet: no video
        "api/../",
        "app.js/",
    ],
)
def test_paths_lead_nowhere(visitor: Visitor, path: str) -> None:
    status, _, data = visitor.ask(quote(path, safe="/%.."))
    assert status == 404 and "error" in json.loads(data)


def test_every_answer_forbids_what_is_from_elsewhere(visitor: Visitor) -> None:
    for path in [*ANYWHERE, "nowhere"]:
        _, headers, _ = visitor.ask(path)
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'") and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Access-Control-Allow-Origin" not in headers


def test_the_page_names_no_other_machine() -> None:
    folder = HERE.parent.parent / "src" / "penstock" / "view" / "page"
    for file in folder.iterdir():
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("// ", "") or "http" not in text, file


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (b'{"reject": true}', {"Content-Type": "text/plain"}, 400),
        (b"{", {"Content-Type": "application/json"}, 400),
        (b"[" * 60000, {"Content-Type": "application/json"}, 400),
        (b"[]", {"Content-Type": "application/json"}, 400),
        (b"x" * (1 << 20), {"Content-Type": "application/json"}, 413),
        (b'{"reject": 1}', {"Content-Type": "application/json"}, 404),
        (b'{"trim": [5, 2]}', {"Content-Type": "application/json"}, 404),
        (b'{"trim": [0, 99999]}', {"Content-Type": "application/json"}, 404),
        (b'{"split": ["a"]}', {"Content-Type": "application/json"}, 404),
        (b'{"task": ""}', {"Content-Type": "application/json"}, 404),
        (b'{"__class__": 1}', {"Content-Type": "application/json"}, 404),
    ],
    ids=lambda value: str(value)[:24],
)
def test_bad_marks_are_refused(
    visitor: Visitor, body: bytes, headers: dict[str, str], code: int
) -> None:
    try:
        status, _, _ = visitor.ask("api/mark/0", "POST", body, headers)
    except (BrokenPipeError, ConnectionResetError):
        status = 413  # it hung up before all was sent
    assert status == code
    assert not visitor.server.viewer.marks.path.exists()


def test_a_link_out_of_the_dataset_is_not_followed(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set")
    file = root / Dataset(root).episode(0).videos[hand.TOP].file
    secret = tmp_path / "secret.mp4"
    os.rename(file, secret)
    file.symlink_to(secret)
    with serve(root) as server:
        visitor = Visitor(server)
        status, _, data = visitor.ask("video/0/0")
        assert status in (404, 422) and secret.read_bytes()[:64] not in data
        assert visitor.ask("frame/0/0/0")[0] in (404, 422)
        assert visitor.ask("frame/0/1/0")[0] == 200  # the others are shown


def test_what_is_damaged_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    root = hand.make_dataset(tmp_path / "set")
    file = root / Dataset(root).episode(0).videos[hand.TOP].file
    file.write_bytes(b"no video at all")
    with serve(root) as server:
        visitor = Visitor(server)
        assert visitor.get("api/episode/0")["notes"]
        assert visitor.ask("frame/0/0/0")[0] == 422
        assert visitor.ask("frame/0/1/0")[0] == 200


def test_names_with_markup_are_only_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(hand.make_dataset.__globals__, "TASKS", (evil, "place the cup"))
        root = hand.make_dataset(tmp_path / "set")
    info = json.loads((root / INFO_PATH).read_text())
    info["robot_type"] = evil
    (root / INFO_PATH).write_text(json.dumps(info))
    with serve(root) as server:
        _, headers, data = Visitor(server).ask("api/episode/0")
        assert headers["Content-Type"] == "application/json" and json.loads(data)["task"] == evil


def test_many_connections_do_not_stop_it(visitor: Visitor) -> None:
    lines = [socket.create_connection(visitor.server.server_address) for _ in range(200)]
    try:
        lines[0].settimeout(10)
    finally:
        for line in lines:
            line.close()
    for _ in range(100):
        try:
            if visitor.ask("api/about")[0] == 200:
                return
        except OSError:
            continue
    pytest.fail("the server does not answer any more")


# ------------------------------------------------------------------ what cannot be opened


def test_what_is_nothing_is_said(tmp_path: Path, bag: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        open_viewer(str(tmp_path / "nowhere"), None, None)
    with pytest.raises(DataError):
        open_viewer(str(tmp_path), None, None)
    with pytest.raises(UsageError, match="--with"):
        open_viewer(str(bag), [str(bag)], None)
    with pytest.raises(UsageError, match="marked"):
        open_viewer(str(bag), None, "marks.yaml")


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--port", "99999999"], "port"),
        (["--port", "taken"], "port"),
        (["--episode", "77"], "77"),
        (["--marks", "nowhere/marks.yaml"], "folder"),
        (["--screenshot", "nowhere/page.png"], "folder"),
    ],
)
def test_what_cannot_be_shown_is_said_at_once(dataset: Path, capsys, words, what) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [str(taken.getsockname()[1]) if word == "taken" else word for word in words]
        assert penstock(["view", str(dataset), "--no-browser", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and what in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_nothing_is_left(dataset: Path, tmp_path: Path, number: int) -> None:
    words = [sys.executable, "-m", "penstock", "view", str(dataset), "--no-browser"]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        # A shell in the background lets its programs ignore SIGINT: not what is tested here.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and "127.0.0.1" in process.stdout.readline()
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_no_browser_is_said(dataset: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert penstock(["view", str(dataset), "--screenshot", "x.png"]) == 2
    assert "Chromium" in capsys.readouterr().err


def test_no_torch_is_imported(dataset: Path) -> None:
    code = (
        "import sys\n"
        "from penstock.view.server import ViewServer\n"
        "from penstock.view.show import open_viewer\n"
        f"with ViewServer(open_viewer({str(dataset)!r}, None, None)) as server:\n"
        "    server.viewer.view(0).picture(0, 0, 320)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------ for other viewers


def test_an_episode_for_foxglove(dataset: Path, tmp_path: Path) -> None:
    target = tmp_path / "take.mcap"
    assert penstock(["view", str(dataset), "--episode", "1", "--foxglove", str(target), "-q"]) == 0
    with open_bag(target) as bag:
        assert bag.topics[f"/{hand.TOP}"].count == hand.LENGTHS[1]
        decoder = bag.decoder(f"/{hand.TOP}")
        shown = [
            pixels(bytes(decoder.image(message.data).data))
            for message in bag.read([f"/{hand.TOP}"])
        ]
        for k, picture in enumerate(shown):
            assert np.abs(picture - hand.picture(1, k, hand.TOP)).mean() < 8
        state = bag.decoder("/observation.state")
        found = [state.vector(m.data, "c")[0] for m in bag.read(["/observation.state"])]
        assert np.allclose(found, hand.values(1)["observation.state"][:, 2])


def test_an_episode_for_rerun(dataset: Path, tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="needs rerun-sdk: pip install penstock[rerun]")
    target = tmp_path / "take.rrd"
    assert penstock(["view", str(dataset), "--rerun", str(target), "-q"]) == 0
    assert target.stat().st_size > 10_000 and list(tmp_path.iterdir()) == [target]
