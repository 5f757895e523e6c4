"""The world: boxes that stand on the ground, found by cell, and obstacles that move."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import MissingExtra, UsageError

try:
    from penstock.core.kernels.native import compiled
except ModuleNotFoundError as error:
    raise MissingExtra("numba", "rl") from error

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Rectangle = tuple[int, int, int, int, int]  # x0, x1, y0, y1 in pixels, height in decimetres

HALF_M = 20.0  # the obstacle field
TOP_M = 4.5  # highest place of a moving obstacle
GROUND_M = 25.0  # ground, and cells, reach this far
CELLS = 50  # per axis, of 1 m
GROUPS = 8  # kinds of moving obstacles
REDRAW_S = 2.0  # time between new speeds

_PIXELS = 399  # usable ones of 0.1 m, inside an empty rim of one
_STRIDE = 4
_SIDES = (4, 8)
_BATCH = 64
_LOOKED_AT = 8  # of these at a time
_MOST = 3000  # placed boxes; beyond that only the overlaps grow
_AHEAD = 4096  # random numbers of a world's obstacles that are drawn ahead, at least
_KEPT = ("position", "velocity", "goal", "origin", "steps")  # of obstacles, in a state
_TRIES = 20_000  # candidates per box; upstream gives up after 100,000 and takes any


@dataclass(frozen=True)
class World:
    """One static map.

    Attributes:
        seed: What it was made from.
        num_obstacles: Boxes that were placed.
        boxes: x0, x1, y0, y1, height in metres, [n, 5]: disjoint, so that n may be larger than
            `num_obstacles` where boxes overlap (of two, the later one's height counts).
    """

    seed: int
    num_obstacles: int
    boxes: Floats

    @classmethod
    def generate(cls, seed: int, num_obstacles: int) -> World:
        """Make the map of a seed; a `UsageError` if boxes do not fit with gaps between them."""
        if num_obstacles > _MOST:
            raise UsageError(
                f"num_obstacles={num_obstacles} do not fit into 40 x 40 m; give at most {_MOST}"
            )
        rng = np.random.default_rng(seed)
        placed = np.zeros((num_obstacles, 2), np.int64)
        rectangles: list[Rectangle] = []
        for number in range(num_obstacles):
            box = _place(rng, placed[:number])
            if box is None:
                raise UsageError(
                    f"num_obstacles={num_obstacles}: box {number + 1} of map {seed} found no "
                    f"place in {_TRIES} tries; give fewer"
                )
            placed[number] = box[0], box[2]
            rectangles = [
                part
                for old in rectangles
                for part in (_cut(old, box) if _overlap(old, box) else (old,))
            ]
            rectangles.append(box)
        boxes = np.array(rectangles, np.float64).reshape(-1, 5)
        boxes *= 0.1
        boxes[:, :4] += 0.1 - HALF_M
        return cls(int(seed), num_obstacles, boxes.astype(np.float32))

    def cells(self, range_m: float) -> tuple[Ints, Ints]:
        """List, for each cell of 1 m, the boxes that a lidar inside it may reach.

        Returns:
            Where the list of each cell begins, [CELLS * CELLS + 1], x major; and the boxes.
        """
        low = np.arange(CELLS, dtype=np.float32) - GROUND_M
        reach = range_m + 0.01  # margin: float32 positions at the border of a cell

        first, last = self.boxes[:, 0:4:2].T, self.boxes[:, 1:4:2].T  # of x and of y
        gap = np.maximum(first[:, None] - (low + 1)[:, None], low[:, None] - last[:, None])
        dx, dy = np.maximum(gap, 0)
        near = dx[:, None] ** 2 + dy[None] ** 2 <= reach**2
        near = near.reshape(CELLS * CELLS, -1)
        starts = np.zeros(CELLS * CELLS + 1, np.int32)
        np.cumsum(near.sum(1), out=starts[1:])
        return starts, np.nonzero(near)[1].astype(np.int32)


def _place(rng: np.random.Generator, placed: NDArray[np.int64]) -> Rectangle | None:
    """Draw boxes until one keeps its distance from all others."""
    side_draw = rng.integers(0, 2, 2)
    width, length = _SIDES[side_draw[0]], _SIDES[side_draw[1]]
    height = _height(rng)
    steps = -(-_PIXELS // _STRIDE)
    for _ in range(-(-_TRIES // _BATCH)):
        corners = rng.integers(0, steps, (_BATCH, 2)) * _STRIDE
        x = np.minimum(corners[:, 0], _PIXELS - width)
        y = np.minimum(corners[:, 1], _PIXELS - length)
        for some in range(0, _BATCH, _LOOKED_AT):  # mostly one of the first fits
            part = slice(some, some + _LOOKED_AT)
            dx = np.abs(placed[None, :, 0] - x[part, None]) - width
            dy = np.abs(placed[None, :, 1] - y[part, None]) - length
            gap2 = dx * dx + dy * dy
            bad = ~((dx < 0) & (dy < 0)) & (gap2 >= 4) & (gap2 <= 100)
            good = np.flatnonzero(~bad.any(1))
            if good.size:
                left, low = int(x[some + good[0]]), int(y[some + good[0]])
                return left, left + width, low, low + length, height
    return None


def _height(rng: np.random.Generator) -> int:
    """Draw a height in decimetres."""
    kind, place = rng.random(2)
    for share, low, high in ((0.10, 10, 15), (0.15, 15, 20), (0.20, 20, 40)):
        if kind < share:
            return int(low + (high - low) * place)
        kind -= share
    return int(40 + 20 * place)


def _overlap(one: Rectangle, two: Rectangle) -> bool:
    return one[0] < two[1] and two[0] < one[1] and one[2] < two[3] and two[2] < one[3]


def _cut(old: Rectangle, new: Rectangle) -> list[Rectangle]:
    """Return what is left of a rectangle under a newer one that overlaps, as disjoint ones."""
    x0, x1, y0, y1, height = old
    a0, a1, b0, b1, _ = new
    left, right = max(x0, a0), min(x1, a1)
    parts = [(x0, left, y0, y1), (right, x1, y0, y1), (left, right, y0, b0), (left, right, b1, y1)]
    return [(*part, height) for part in parts if part[0] < part[1] and part[2] < part[3]]


class Maps:
    """The static maps of all worlds behind each other, as the back ends want them.

    `boxes` are of all worlds, [n, 5]; `starts` says where the list of each cell begins in
    `members`, which are numbers of boxes; [worlds * CELLS * CELLS + 1].
    """

    def __init__(self, worlds: list[World], range_m: float) -> None:
        self._range_m = range_m
        self.worlds = list(worlds)
        self._cells = [world.cells(range_m) for world in worlds]
        self._join()

    def replace(self, number: int, world: World) -> None:
        """Put another map in the place of one."""
        self.worlds[number], self._cells[number] = world, world.cells(self._range_m)
        self._join()

    def _join(self) -> None:
        self.boxes = np.concatenate([world.boxes for world in self.worlds])
        starts, members = [np.zeros(1, np.int32)], []
        box = entry = 0
        for world, (begin, inside) in zip(self.worlds, self._cells, strict=True):
            starts.append(begin[1:] + np.int32(entry))
            members.append(inside + np.int32(box))
            box += len(world.boxes)
            entry += inside.size
        self.starts = np.concatenate(starts)
        self.members = np.concatenate(members)


class Obstacles:
    """The moving obstacles of all worlds.

    Numbered so that any first multiple of 8 has equally many of each kind: kinds 0 to 3 are cuboids
    that float, kinds 4 to 7 are cylinders from the ground to 5 m. They are seen by no lidar and
    never reset.

    There is a seed per world, on which alone its obstacles depend; `count` is per world, a multiple
    of 8.
    """

    def __init__(self, seeds: list[int], count: int, period_s: float) -> None:
        self.count = count
        self.period_s = period_s
        kind = np.arange(count) % GROUPS
        self.width = (0.25 * (1 + kind % 4)).astype(np.float32)
        self.tall = kind >= GROUPS // 2
        self.height = np.where(self.tall, 5.0, 1.0).astype(np.float32)
        worlds, shape = len(seeds), (len(seeds), count, 3)
        self.position = np.zeros(shape, np.float32)
        self.velocity = np.zeros(shape, np.float32)
        self.goal = np.zeros(shape, np.float32)
        self.origin = np.zeros(shape, np.float32)
        self.flat = np.zeros((worlds, 2, count), np.float32)  # x and y, for the sensor
        self.steps = np.zeros(worlds, np.int64)
        self._redraw_every = max(1, int(REDRAW_S / period_s))
        # Each world's own stream of random numbers, some of them drawn ahead: `_rngs` are at the
        # beginning of `_ahead`, of which `_used` are used.
        self._rngs = [np.random.default_rng(0) for _ in seeds]
        self._ahead = np.zeros((worlds, _AHEAD + 4 * count))
        self._used = np.zeros(worlds, np.int64)
        own = {name: getattr(self, name) for name in (*_KEPT, "flat", "tall")}
        self._arrays = _Arrays(**own, draws=self._ahead, cursor=self._used)
        for world, seed in enumerate(seeds):
            self.renew(world, seed)

    def renew(self, world: int, seed: int) -> None:
        """Begin again in one world, from another seed."""
        rng = np.random.default_rng([seed, 1])
        self.origin[world] = self._origins(rng)
        self.position[world] = self.goal[world] = self.origin[world]
        self.velocity[world] = 0
        self.steps[world] = 0
        self._draw_from(world, rng)
        self._flatten()

    def _flatten(self) -> None:
        np.copyto(self.flat, self.position[:, :, :2].transpose(0, 2, 1))

    def _draw_from(self, world: int, rng: np.random.Generator) -> None:
        """Draw ahead; the generator stays at the beginning of what is drawn."""
        self._rngs[world] = unpack_rng(pack_rng(rng))
        self._ahead[world] = rng.random(self._ahead.shape[1])
        self._used[world] = 0

    def _rng(self, world: int) -> np.random.Generator:
        """Return a generator that goes on where a world's stream is now."""
        rng = unpack_rng(pack_rng(self._rngs[world]))
        bits: Any = rng.bit_generator
        if self._used[world]:
            bits.advance(int(self._used[world]))  # a double is one step of it
        return rng

    def _origins(self, rng: np.random.Generator) -> Floats:
        places = np.zeros((self.count, 3), np.float32)
        spacing = 2 * np.sqrt(HALF_M * HALF_M / max(self.count, 1))
        for number in range(self.count):
            limit, good = spacing, np.zeros(0, np.int64)
            while not good.size:
                tries = rng.uniform(-HALF_M, HALF_M, (_BATCH, 2))
                way = places[None, :number, :2] - tries[:, None]
                good = np.flatnonzero(((way * way).sum(2) > limit * limit).all(1))
                limit *= 0.8  # upstream by the clock, which no seed could repeat
            places[number, :2] = tries[good[0]]
            places[number, 2] = 2.5 if self.tall[number] else rng.uniform(0, TOP_M)
        return places

    def advance(self) -> None:
        """Move all obstacles by one step."""
        if not self.count:
            return
        for world in np.flatnonzero(self._used > _AHEAD).tolist():  # a step may take 4 of each
            self._draw_from(world, self._rng(world))
        _advance(self._arrays, self._redraw_every, self.period_s)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all that changes."""
        rngs = [pack_rng(self._rng(world)) for world in range(len(self.steps))]
        return {name: getattr(self, name).copy() for name in _KEPT} | {"rngs": np.stack(rngs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; a `UsageError` if it is of other numbers."""
        mine, other = self.position.shape, np.shape(state["position"])
        if mine != other:
            raise UsageError(
                f"obstacles.position of the state is {list(other)}, the simulator's is "
                f"{list(mine)}; give the settings it was saved with"
            )
        for name in _KEPT:
            getattr(self, name)[...] = np.asarray(state[name])
        for world, words in enumerate(np.asarray(state["rngs"])):
            self._draw_from(world, unpack_rng(words))
        self._flatten()


class _Arrays(NamedTuple):
    """What `_advance` reads and writes: `cursor` of the uniform numbers of each world are used."""

    position: Any
    velocity: Any
    goal: Any
    origin: Any
    steps: Any
    flat: Any
    tall: Any
    draws: Any
    cursor: Any


@compiled
def _advance(arrays: _Arrays, redraw_every: int, period_s: float) -> None:
    """Move the obstacles of all worlds by one step."""
    position, velocity, goal, origin, steps, flat, tall, draws, cursor = arrays
    worlds, count = position.shape[:2]
    for w in range(worlds):
        at = cursor[w]
        begins = steps[w] == 0
        for j in range(count):
            way2 = 0.0
            for axis in range(3):
                way = np.float64(goal[w, j, axis]) - position[w, j, axis]
                way2 += way * way
            if begins or way2 < 0.5 * 0.5:
                for axis in range(3):
                    # Upstream lets z begin at -5 but span 9 only.
                    span = 9.0 if axis == 2 else 10.0
                    wish = origin[w, j, axis] - 5.0 + span * draws[w, at]
                    low, high = (0.0, TOP_M) if axis == 2 else (-HALF_M, HALF_M)
                    goal[w, j, axis] = min(max(wish, low), high)
                    at += 1
                if tall[j]:
                    goal[w, j, 2] = 2.5
        if steps[w] % redraw_every == 0:
            for j in range(count):
                way2 = 0.0
                for axis in range(3):
                    way = np.float64(goal[w, j, axis]) - position[w, j, axis]
                    way2 += way * way
                speed = (0.5 + draws[w, at]) / max(math.sqrt(way2), 1e-6)
                at += 1
                for axis in range(3):
                    way = np.float64(goal[w, j, axis]) - position[w, j, axis]
                    velocity[w, j, axis] = way * speed
        cursor[w] = at
        for j in range(count):
            for axis in range(3):
                position[w, j, axis] += np.float32(velocity[w, j, axis] * np.float32(period_s))
            flat[w, 0, j], flat[w, 1, j] = position[w, j, 0], position[w, j, 1]
        steps[w] += 1


def pack_rng(rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the state of a PCG64 generator as 6 words, which any file can hold."""
    state: Any = rng.bit_generator.state
    halves = [*divmod(state["state"]["state"], 2**64), *divmod(state["state"]["inc"], 2**64)]
    words = [*halves, state["has_uint32"], state["uinteger"]]
    return np.array(words, np.uint64).view(np.int64)


def unpack_rng(words: NDArray[np.int64]) -> np.random.Generator:
    """Undo `pack_rng`."""
    plain = [int(word) for word in np.ascontiguousarray(words, np.int64).view(np.uint64)]
    rng = np.random.default_rng(0)
    rng.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": plain[0] << 64 | plain[1], "inc": plain[2] << 64 | plain[3]},
        "has_uint32": plain[4],
        "uinteger": plain[5],
    }
    return rng
