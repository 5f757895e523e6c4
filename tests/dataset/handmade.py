"""Small datasets written by hand, with numpy for the statistics: nothing of our writer is used."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.dataset import layout
from penstock.dataset.layout import AUTO_FEATURES, Feature, FileLimits, Spec

FPS, HEIGHT, WIDTH = 30, 64, 96
LENGTHS = (12, 7, 20)
TASKS = ("pick the cup", "place the cup")
TOP, SIDE, WRIST = "observation.images.top", "observation.images.side", "observation.images.wrist"
VISUAL = {"shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channels"]}
FEATURES = {
    "observation.state": Feature("float32", (7,), [*"abcdefg"]),
    "action": Feature("float32", (7,), {"motors": [*"abcdefg"]}),
    "matrix": Feature("float32", (2, 3)),
    "reward": Feature("float64", (1,)),
    "counter": Feature("int64", (1,)),
    "done": Feature("bool", (1,)),
    "note": Feature("string", (1,)),
    TOP: Feature("video", **VISUAL, info={"video.codec": "h264", "video.fps": FPS}),
    SIDE: Feature("video", **VISUAL, info={"video.codec": "h264", "video.fps": FPS}),
    WRIST: Feature("image", **VISUAL),
}


def picture(episode: int, k: int, camera: str) -> np.ndarray:
    """A smooth picture; its brightness tells the episode, the frame and the camera."""
    number = [TOP, SIDE, WRIST].index(camera)
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[..., 0] = 40 + 6 * k + x // 4
    image[..., 1] = 60 + 50 * episode + y // 4
    image[..., 2] = 30 + 70 * number + (x + y) // 8
    return image


def values(episode: int) -> dict[str, np.ndarray]:
    """The rows of one episode, without pictures."""
    length, k = LENGTHS[episode], np.arange(LENGTHS[episode])
    state = np.sin(np.arange(7) + k[:, None] / FPS + episode).astype(np.float32)
    start = sum(LENGTHS[:episode])
    return {
        "observation.state": state,
        "action": state * 2 + 1,
        "matrix": (np.arange(6).reshape(2, 3) + k[:, None, None] / FPS).astype(np.float32),
        "reward": k / 3,
        "counter": 100 * episode + k,
        "done": k % 5 == 4,
        "note": np.array([f"episode {episode}, frame {i}" for i in k], dtype=object),
        "timestamp": (k / FPS).astype(np.float32),
        "frame_index": k,
        "episode_index": np.full(length, episode),
        "index": start + k,
        "task_index": np.full(length, episode % 2),
    }


def png(image: np.ndarray) -> bytes:
    context = av.CodecContext.create("png", "w")
    context.width, context.height, context.pix_fmt = image.shape[1], image.shape[0], "rgb24"
    context.time_base = Fraction(1, 30)
    frame = av.VideoFrame.from_ndarray(image, format="rgb24")
    return b"".join(bytes(p) for p in [*context.encode(frame), *context.encode(None)])


def write_video(path: Path, images: list[np.ndarray], fps: int = FPS, codec="libx264") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=fps, options={"g": "2", "crf": "18"})
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for image in images:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


def statistics(name: str, rows: np.ndarray) -> dict[str, list]:
    """lerobot's form: per element; pictures per channel in [0, 1], as (3, 1, 1)."""
    feature = {**FEATURES, **AUTO_FEATURES}[name]
    if feature.is_picture:
        rows = rows.reshape(-1, 3) / 255
        shape, count = (3, 1, 1), len(rows) // (HEIGHT * WIDTH)
    else:
        rows, shape, count = rows.reshape(len(rows), *feature.shape), feature.shape, len(rows)
    whole = rows.astype(np.int64) if rows.dtype.kind == "i" else rows
    found = {
        "min": whole.min(0).reshape(shape).tolist(),
        "max": whole.max(0).reshape(shape).tolist(),
        "mean": rows.mean(0, dtype=np.float64).reshape(shape).tolist(),
        "std": rows.std(0, dtype=np.float64).reshape(shape).tolist(),
        "count": [count],
    }
    for q, share in layout.QUANTILES.items():
        found[q] = np.quantile(rows.astype(np.float64), share, axis=0).reshape(shape).tolist()
    return found


def make_dataset(root: Path, version: layout.Version = "v3.0", files=(0, 0, 1)) -> Path:
    """Write three episodes; in v3.0 `files` says which file each lies in."""
    names = {**FEATURES, **AUTO_FEATURES}
    stats_names = [name for name, feature in names.items() if feature.dtype != "string"]
    rows: list[dict[str, np.ndarray]] = []
    for episode, length in enumerate(LENGTHS):
        one = values(episode)
        for camera in (TOP, SIDE, WRIST):
            one[camera] = np.stack([picture(episode, k, camera) for k in range(length)])
        rows.append(one)
    stats = [{name: statistics(name, one[name]) for name in stats_names} for one in rows]
    spec = Spec(FEATURES, FPS, "tester", version, FileLimits())
    info = layout.info_json(spec, len(rows), sum(LENGTHS), len(TASKS))
    (root / "meta").mkdir(parents=True)
    (root / layout.INFO_PATH).write_text(json.dumps(info, indent=4))
    if version == "v2.1":
        _write_v21(root, rows, stats)
    else:
        _write_v30(root, rows, stats, files, stats_names)
    return root


def _write_v30(root, rows, stats, files, stats_names) -> None:
    together = {
        name: statistics(name, np.concatenate([one[name] for one in rows])) for name in stats_names
    }
    (root / layout.V30.stats).write_text(json.dumps(together, indent=4))
    write_table(root / layout.V30.tasks, layout.tasks_table(TASKS))
    records = []
    for episode in range(len(rows)):
        file = files[episode]
        before = sum(LENGTHS[e] for e in range(episode) if files[e] == file)
        start = sum(LENGTHS[:episode])
        record = {
            "episode_index": episode,
            "tasks": [TASKS[episode % 2]],
            "length": LENGTHS[episode],
            "data/chunk_index": 0,
            "data/file_index": file,
            "dataset_from_index": start,
            "dataset_to_index": start + LENGTHS[episode],
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        for camera in (TOP, SIDE):
            record[f"videos/{camera}/chunk_index"] = 0
            record[f"videos/{camera}/file_index"] = file
            record[f"videos/{camera}/from_timestamp"] = before / FPS
            record[f"videos/{camera}/to_timestamp"] = (before + LENGTHS[episode]) / FPS
        for name, found in stats[episode].items():
            record |= {f"stats/{name}/{stat}": value for stat, value in found.items()}
        records.append(record)
    write_records(root, records)
    for file in sorted(set(files)):
        members = [one for episode, one in enumerate(rows) if files[episode] == file]
        write_rows(root / layout.V30.data_path(0, file), members, "v3.0")
        for camera in (TOP, SIDE):
            images = [image for one in members for image in one[camera]]
            write_video(root / layout.V30.video_path(camera, 0, file), images)


def _write_v21(root, rows, stats) -> None:
    def lines(name: str, objects: list[dict]) -> None:
        (root / name).write_text("".join(json.dumps(one) + "\n" for one in objects))

    lines(layout.V21.tasks, [{"task_index": i, "task": t} for i, t in enumerate(TASKS)])
    lines(
        layout.V21.episodes,
        [
            {"episode_index": e, "tasks": [TASKS[e % 2]], "length": length}
            for e, length in enumerate(LENGTHS)
        ],
    )
    basic = ("min", "max", "mean", "std", "count")
    lines(
        layout.V21.episode_stats,
        [
            {"episode_index": e, "stats": {n: {k: s[k] for k in basic} for n, s in one.items()}}
            for e, one in enumerate(stats)
        ],
    )
    for episode, one in enumerate(rows):
        write_rows(root / layout.V21.data_path(0, episode), [one], "v2.1")
        for camera in (TOP, SIDE):
            write_video(root / layout.V21.video_path(camera, 0, episode), list(one[camera]))


def write_table(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, write_page_checksum=True)


def write_records(root: Path, records: list[dict], file: int = 0) -> None:
    schema = layout.episodes_schema(FEATURES)
    write_table(root / layout.episodes_path(0, file), pa.Table.from_pylist(records, schema))


def rows_table(one: dict[str, np.ndarray], version: layout.Version) -> pa.Table:
    schema = layout.arrow_schema(FEATURES, version)
    columns = []
    for field in schema:
        value = one[field.name]
        if field.name == WRIST:
            value = [{"bytes": png(image), "path": f"{i}.png"} for i, image in enumerate(value)]
        columns.append(pa.array(value if isinstance(value, list) else value.tolist(), field.type))
    return pa.table(columns, schema=schema)


def write_rows(path: Path, members: list[dict[str, np.ndarray]], version: layout.Version) -> None:
    """One row group per episode, as lerobot does it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = layout.arrow_schema(FEATURES, version)
    with pq.ParquetWriter(path, schema, write_page_checksum=True) as writer:
        for one in members:
            writer.write_table(rows_table(one, version))


def to_npz(root: Path) -> bytes:
    """What tests/peers/check_dataset.py is to find in it."""
    found: dict[str, np.ndarray] = {"lengths": np.array(LENGTHS)}
    every = [values(episode) for episode in range(len(LENGTHS))]
    for name in every[0]:
        stacked = np.concatenate([one[name] for one in every])
        found[f"vec/{name}"] = stacked.astype(str) if name == "note" else stacked
    found["task"] = np.array([TASKS[e % 2] for e, n in enumerate(LENGTHS) for _ in range(n)])
    for camera in (TOP, SIDE, WRIST):
        found[f"mean/{camera}"] = np.stack(
            [
                picture(e, k, camera).mean((0, 1)) / 255
                for e, length in enumerate(LENGTHS)
                for k in range(length)
            ]
        )
    buffer = io.BytesIO()
    np.savez(buffer, **found)
    return buffer.getvalue()
