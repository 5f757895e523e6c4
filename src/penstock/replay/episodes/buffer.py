"""DictReplayBuffer: whole episodes in, batches of frames out, compressed where that pays."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

from penstock.core.interrupt import signals_postponed
from penstock.core.memory import whole_number
from penstock.errors import UsageError
from penstock.replay.episodes.schema import Settings, is_tensordict, nested, read_episode
from penstock.replay.episodes.store import (
    HOLDER,
    Addresses,
    Column,
    EpisodeStore,
    RecordWriter,
    load,
)
from penstock.replay.keys import Codecs, Key, KeyPath, as_key, as_path, known
from penstock.replay.priority import checked_priorities, importance_weights, whole_numbers
from penstock.replay.segments import Saved, save_blocks

if TYPE_CHECKING:
    from penstock.dataset.reader import Dataset
    from penstock.ui.progress import Mode

Ints = NDArray[np.int64]
Leaves = list[tuple[KeyPath, torch.Tensor]]


class DictReplayBuffer:
    """A replay buffer of episodes: nested dicts (or TensorDicts) with one frame per step and key.

    Episodes come and go whole. What a key looks like is fixed by the first episode, and so is its
    codec where "auto" chooses it: the smallest that reads fast, verified by a round trip, and none
    if it saves less than 10 %. Every method may be called from any thread.

    Args:
        max_size: Frames to hold; may be None if `max_bytes` is given.
        keys: What an episode holds: names, or tuples of names for nested keys.
        device: Where batches go.
        img_compressed: Compress every key that gains by it ("auto"); else store keys as they are.
        codecs: "auto", or a name of `penstock.replay.frames`, for all or by key; keys left out
            follow `img_compressed`.
        max_bytes: Bytes of episodes to hold, as stored, such as "2GB". Memory (`nbytes`) may be
            about a fifth more, for what was freed and not yet reused.
        eviction: "fifo" forgets the oldest episode first, "lru" the one whose last appearance in a
            batch is longest ago.
        next_keys: Keys of which a batch also holds the next frame, under ("next", key). It is found
            by index, not stored. ("next", "valid") is False where the episode ends: there the last
            frame stands in for its own successor.
        priority: The exponent alpha of prioritised sampling (True: 0.6); False draws all alike. A
            batch then has "index", the ids of its frames for `update_priority`, and "weight".
        seed: Makes the draws reproducible.
        spill_dir: A folder on a fast disk for what exceeds `max_bytes`, instead of evicting it.

    Example:
        buffer = DictReplayBuffer(100_000, ["obs", "action", "reward", "done"],
                                  img_compressed=True, next_keys=["obs"], seed=0)
        buffer.add({"obs": frames, "action": actions, "reward": rewards, "done": dones})
        batch = buffer.sample(256)
        batch["obs"], batch["next"]["obs"]
    """

    def __init__(
        self,
        max_size: int | None,
        keys: Iterable[Key],
        device: str | torch.device = "cpu",
        img_compressed: bool = False,
        *,
        codecs: Codecs | None = None,
        max_bytes: int | str | None = None,
        eviction: str = "fifo",
        next_keys: Iterable[Key] = (),
        priority: bool | float = False,
        seed: int | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        default = "auto" if img_compressed else "raw"
        settings = Settings.check(
            max_size, max_bytes, keys, codecs, default, eviction, next_keys, priority, spill_dir
        )
        self._begin(EpisodeStore(settings, spill_dir, np.random.default_rng(seed)), device)

    @classmethod
    def from_lerobot(
        cls,
        dataset: str | os.PathLike[str] | Dataset,
        keys: Iterable[str] | None = None,
        *,
        max_size: int | None = None,
        device: str | torch.device = "cpu",
        episodes: Iterable[int] | None = None,
        rename: Mapping[str, Key] | None = None,
        progress: Mode | None = None,
        **options: Any,
    ) -> DictReplayBuffer:
        """Fill a buffer from a LeRobot dataset; memory is what it holds and a window of frames.

        Pictures are RGB, uint8 [height, width, 3]; depth is mm, uint16 [height, width]. "reward" is
        next.reward; "done" is next.done or, without one, True on the last frame of each episode.

        Args:
            dataset: Its folder, or `penstock.lerobot.open` of it.
            keys: Features; by default all but texts and the columns of indices and times.
            max_size: By default all frames.
            device: Where batches go.
            episodes: Their numbers, in the order to add them; by default all.
            rename: Other keys for some features: {"observation.state": ("obs", "state")}.
            progress: "rich", "plain" or "quiet".
            options: As for a new buffer; `img_compressed` is True unless given.
        """
        from penstock.replay.episodes.lerobot import Source  # FFmpeg and parquet come with it

        source = Source.open(dataset, keys, episodes, rename)
        size = source.frames if max_size is None else max_size
        buffer = cls(size, source.paths, device, **{"img_compressed": True, **options})
        source.fill(buffer, progress)
        return buffer

    def _begin(
        self, store: EpisodeStore, device: str | torch.device, saved: Saved | None = None
    ) -> None:
        self._store = store
        self._device = torch.device(device)
        self._lock = threading.RLock()
        self._saving = threading.Lock()
        self._saved = saved

    def __len__(self) -> int:
        """Count the frames."""
        with self._lock:
            return self._store.index.frames

    @property
    def episodes(self) -> list[int]:
        """Ids of the episodes held, oldest first."""
        with self._lock:
            ids: list[int] = self._store.index.ids.tolist()
            return ids

    @property
    def nbytes(self) -> int:
        """Memory held: episodes, tables, and what was freed and not yet reused."""
        with self._lock:
            return self._store.nbytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the episodes as they are stored: what `max_bytes` limits."""
        return self._store.arena.live_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes that lie in `spill_dir`."""
        return self._store.arena.spilled_bytes

    @property
    def codecs(self) -> dict[Key, str]:
        """The codec of each key; empty before the first episode."""
        return {as_key(column.field.path): column.codec.id for column in self._store.columns}

    def add(self, episode: Any) -> int:
        """Add an episode, forgetting others to make room.

        Args:
            episode: A (nested) dict or a TensorDict with exactly the buffer's keys: arrays, tensors
                or lists of frames, all with the same first length. It is copied.

        Returns:
            The id of the episode, for `remove`.

        Raises:
            UsageError: It is ragged or empty, does not fit the keys or the first episode, or could
                not be held even alone; the buffer is unchanged.
        """
        # Before the codecs are settled nobody may come between.
        with nullcontext() if self._store.columns else self._lock:
            parts = self.episode()
            parts._encode(episode, copied=False)
            parts._commit()
            return parts.id

    def episode(self) -> EpisodeInParts:
        """Add an episode in parts, each encoded as it comes: it need not fit memory as it is.

        The buffer is unchanged until the block ends, and on an error. Codecs follow the first part.

        Example:
            with buffer.episode() as episode:
                for part in parts:  # each as for `add`
                    episode.extend(part)
        """
        return EpisodeInParts(self)

    def remove(self, episode_id: int) -> None:
        """Forget one episode."""
        with self._lock, signals_postponed():  # an interrupt must not leave it half forgotten
            store = self._store
            row = store.index.row_of(whole_number("episode_id", episode_id, 0))
            if row is None:
                raise UsageError(f"episode {episode_id} is not held; see the property episodes")
            store.remove(row)

    def sample(
        self,
        batch_size: int,
        *,
        sequence: int | None = None,
        pad: bool = False,
        n_step: int = 1,
        gamma: float = 0.99,
        reward_key: Key = "reward",
        done_key: Key = "done",
        beta: float = 0.4,
    ) -> Any:
        """Draw a batch, with replacement.

        Args:
            batch_size: How many frames, or windows.
            sequence: Draw windows of so many steps from within one episode: tensors are then
                [batch_size, sequence, ...]. All windows are drawn alike; with priorities a frame is
                drawn, and the window starts there or, near the end of an episode, as late as it
                can.
            pad: A window may start at any frame; beyond the end of its episode the last frame is
                repeated, and "mask" [batch_size, sequence] is False there.
            n_step: If above 1, `reward_key` becomes the sum of the next n rewards, the k-th times
                gamma ** k, stopping after a done or at the end of the episode; ("next", key) is the
                frame after those, and "discount" is gamma ** (steps summed), 0 after a done: the
                factor for the value of that frame. Where an episode ends without a done, the frame
                after it is not known: ("next", "valid") is False, as for single steps.
            gamma: Discount per step.
            reward_key: The reward of a step.
            done_key: Whether the episode is done after a step; one value per frame.
            beta: How far "weight" undoes the bias of priorities: 0 not at all, 1 fully.

        Returns:
            Tensors on the buffer's device, nested as the keys are: a dict, or a TensorDict if the
            first episode was one.
        """
        count = whole_number("batch_size", batch_size)
        if sequence is not None:
            sequence = whole_number("sequence", sequence)
        steps_ahead = whole_number("n_step", n_step)
        if not 0 <= gamma <= 1:
            raise UsageError(f"gamma is {gamma}; give a number from 0 to 1")
        if not 0 <= beta < math.inf:
            raise UsageError(f"beta is {beta}; give a number from 0, usually up to 1")
        if pad and sequence is None:
            raise UsageError("pad=True is about windows; give their length as sequence")
        for asked, made in ((pad, "mask"), (steps_ahead > 1, "discount")):
            if asked:
                self._store.settings.check_free(made)
        with self._lock:
            store = self._filled()
            ahead = None
            if steps_ahead > 1:
                keys = as_path(reward_key), as_path(done_key)
                ahead = NStep.check(store, steps_ahead, gamma, *keys)
            drawn = draw(store, count, sequence, pad)
            leaves = read(store, drawn.rows, drawn.steps, ahead)
            if pad:
                leaves.append((("mask",), torch.from_numpy(drawn.inside)))
            if store.priorities is not None:
                leaves += with_priorities(store, drawn, beta)
        return finished(leaves, drawn.rows.shape, self._device, store.as_tensordict)

    def sample_indices(self, batch_size: int) -> Ints:
        """Draw frames as `sample` does, and return only their ids, for `get`."""
        count = whole_number("batch_size", batch_size)
        with self._lock:
            store = self._filled()
            drawn = draw(store, count, None, False)
            return store.index.starts[drawn.rows] + drawn.steps

    def get(self, indices: ArrayLike) -> Any:
        """Return the frames with these ids, as `sample` would, in the order given.

        A frame's id counts all frames ever added. Draws nothing, and counts as no use for "lru".
        """
        ids = whole_numbers("a frame", indices)
        with self._lock:
            store = self._filled()
            rows, steps, alive = store.index.locate(ids)
            if not alive.all():
                raise UsageError(f"frame {ids[~alive][0]} is not held")
            leaves = read(store, rows, steps)
        return finished(leaves, ids.shape, self._device, store.as_tensordict)

    def _filled(self) -> EpisodeStore:
        if not len(self._store.index):
            raise UsageError("the buffer is empty; add an episode first")
        return self._store

    def update_priority(self, index: ArrayLike, priority: ArrayLike) -> None:
        """Set the priorities of frames; those forgotten meanwhile, and padding, are passed over.

        Args:
            index: The "index" of a batch.
            priority: As many numbers from 0, for example |TD error|; or one for all. If one is
                negative or not finite, nothing is changed.
        """
        if self._store.priorities is None:
            raise UsageError("this buffer has no priorities; make it with priority=0.6")
        ids, values = whole_numbers("a frame", index).reshape(-1), checked_priorities(priority)
        if values.size not in (1, ids.size):
            raise UsageError(f"{values.size} priorities for {ids.size} frames")
        with self._lock, signals_postponed():
            self._store.priorities.update(ids, np.broadcast_to(values, ids.shape))

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save everything, so that `load` gives an equal buffer with the same next draws.

        Only episodes that the folder does not hold yet are written; the folder changes in one step,
        so that a crash leaves the last save. Other threads may go on meanwhile.

        Args:
            folder: New, empty, or saved to before; an older save there is replaced, or stays if the
                disk refuses.
        """
        with self._saving:
            self._saved = save_blocks(self._store, self._lock, folder, HOLDER, self._saved)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        device: str | torch.device = "cpu",
        *,
        spill_dir: str | os.PathLike[str] | None = None,
    ) -> DictReplayBuffer:
        """Return the buffer that was saved, every byte verified; `spill_dir` as for a new one."""
        store, saved = load(folder, spill_dir)
        buffer = cls.__new__(cls)
        buffer._begin(store, device, saved)
        return buffer


class EpisodeInParts:
    """An episode under way; made by `DictReplayBuffer.episode`, used by one thread.

    Attributes:
        id: Of the episode, for `DictReplayBuffer.remove`; -1 before the end of the block.
    """

    def __init__(self, buffer: DictReplayBuffer) -> None:
        self.id = -1
        self._buffer = buffer
        self._columns: list[Column] = []
        self._as_tensordict = False
        self._writers: list[RecordWriter] = []
        self._length = 0
        self._over = False

    def __len__(self) -> int:
        """Count the frames that came so far."""
        return self._length

    def extend(self, part: Any) -> None:
        """Add frames, as for `DictReplayBuffer.add`, to the end of the episode."""
        self._check_open()
        self._encode(part, copied=True)

    def _encode(self, part: Any, *, copied: bool) -> None:
        store = self._buffer._store
        fields, arrays, length = read_episode(part, store.settings.paths)
        if not self._columns:
            with self._buffer._lock:
                self._columns = store.columns
                if not self._columns:  # the first episode decides about the codecs
                    self._columns = list(map(Column.choose, fields, arrays, store.settings.codecs))
                    self._as_tensordict = is_tensordict(part)
            self._writers = [RecordWriter(column) for column in self._columns]
        for column, field in zip(self._columns, fields, strict=True):
            if column.field != field:
                raise UsageError(
                    f"the episode has {field}, the first one had {column.field}; "
                    "use a buffer of its own"
                )
        for writer, array in zip(self._writers, arrays, strict=True):
            writer.add(array, copied=copied)
        self._length += length
        store.check_fits(self._length, self._writers)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._writers, self._over = [], True

    def _check_open(self) -> None:
        if self._over:
            raise UsageError("this episode is in the buffer already, or given up; begin another")

    def _commit(self) -> None:
        if not self._columns:
            raise UsageError("the episode has no frames; extend it by at least one")
        with self._buffer._lock, signals_postponed():  # all of it is there, or nothing
            store = self._buffer._store
            first = not store.columns
            mine, theirs = ([one.config() for one in c] for c in (self._columns, store.columns))
            if not first and mine != theirs:
                raise UsageError(
                    "another thread added the first episode meanwhile, and it has other types, "
                    "shapes or codecs; add this one again"
                )
            self.id = store.put(self._length, self._writers)
            if first:
                store.columns, store.as_tensordict = self._columns, self._as_tensordict


class Draw(NamedTuple):
    """Frames that were drawn, row by row of the batch.

    The first three have the shape [batch] or [batch, sequence]; `drawn` are the steps [batch] that
    were drawn as such, which a window may have been moved back from.
    """

    rows: Ints
    steps: Ints
    inside: NDArray[np.bool_]
    drawn: Ints


class NStep(NamedTuple):
    """How far to sum rewards: so many steps, discounted; the numbers of the keys."""

    steps: int
    gamma: float
    reward: int
    done: int

    @classmethod
    def check(
        cls, store: EpisodeStore, count: int, gamma: float, reward_path: KeyPath, done_path: KeyPath
    ) -> NStep:
        """Find the keys, and refuse those that cannot be summed."""
        paths = [column.field.path for column in store.columns]
        reward, done = known(reward_path, paths, "reward_key"), known(done_path, paths, "done_key")
        reward_field, done_field = store.columns[reward].field, store.columns[done].field
        if math.prod(done_field.shape) != 1:
            raise UsageError(f"done_key is {done_field}; it must be one value per frame")
        if reward_field.dtype.startswith("complex"):
            raise UsageError(f"reward_key is {reward_field}; it must be a real number")
        return cls(count, gamma, reward, done)


def draw(store: EpisodeStore, count: int, sequence: int | None, pad: bool) -> Draw:
    """Draw frames or windows, all alike or by their priorities, and note that they were used."""
    index, rng = store.index, store.rng
    least = sequence if sequence is not None and not pad else None  # frames that must follow
    if least is not None and least > (longest := int(index.lengths.max())):
        raise UsageError(
            f"sequence={least} is longer than every episode (the longest has {longest} "
            "frames); use a shorter one, or pad=True"
        )
    if store.priorities is not None:
        good = None if least is None else index.lengths >= least
        rows, drawn = store.priorities.draw(count, rng, good)
    elif least is not None:
        sums = np.concatenate([[0], np.cumsum(np.maximum(index.lengths - least + 1, 0))])
        at = rng.integers(0, sums[-1], count)
        rows = sums.searchsorted(at, side="right") - 1
        drawn = at - sums[rows]
    else:
        rows, drawn = index.find(rng.integers(0, index.frames, count))
    store.clock += 1
    store.used[rows] = store.clock
    if sequence is None:
        return Draw(rows, drawn, np.ones(count, np.bool_), drawn)
    lengths = index.lengths[rows]
    first = drawn if least is None else np.minimum(drawn, lengths - least)
    steps = first[:, np.newaxis] + np.arange(sequence)
    last = lengths[:, np.newaxis] - 1
    rows = np.broadcast_to(rows[:, np.newaxis], steps.shape)
    return Draw(rows, np.minimum(steps, last), steps <= last, drawn)


def read(store: EpisodeStore, rows: Ints, steps: Ints, n_step: NStep | None = None) -> Leaves:
    """Gather every key of frames, and the frames after them."""
    shape = rows.shape
    rows, steps = rows.reshape(-1), steps.reshape(-1)
    records, lengths = store.arena.addresses(store.locations[:, rows]), store.index.lengths[rows]
    leaves: Leaves = []
    after = steps + 1
    if n_step is not None:
        leaves, taken = _sum_rewards(store, records, steps, lengths, n_step, shape)
        after = steps + taken
    made = {path for path, _ in leaves}
    following = store.settings.next_paths
    if following:
        leaves.append((("next", "valid"), torch.from_numpy((after < lengths).reshape(shape))))
        after = np.concatenate([steps, np.minimum(after, lengths - 1)])
    for number, column in enumerate(store.columns):
        path, here = column.field.path, records[number]
        if path in following:
            # One call for both: they lie behind one another, and nothing is in both.
            data = store.gather(number, np.tile(here, 2), after)
            leaves.append((("next", *path), column.field.tensor(data[len(here) :], shape)))
        elif path not in made:
            data = store.gather(number, here, steps)
        if path not in made:
            leaves.append((path, column.field.tensor(data[: len(here)], shape)))
    return leaves


def _sum_rewards(
    store: EpisodeStore,
    records: Addresses,
    steps: Ints,
    lengths: Ints,
    n_step: NStep,
    shape: tuple[int, ...],
) -> tuple[Leaves, Ints]:
    """Sum the rewards of n steps, or fewer where the episode ends; return how many were taken."""
    every = steps[:, np.newaxis] + np.arange(n_step.steps)
    inside = every < lengths[:, np.newaxis]
    every = np.minimum(every, lengths[:, np.newaxis] - 1)

    def several(number: int) -> torch.Tensor:
        data = store.gather(number, np.repeat(records[number], n_step.steps), every.reshape(-1))
        return store.columns[number].field.tensor(data, every.shape)

    done = (several(n_step.done) != 0).numpy().reshape(every.shape)
    alive = inside.copy()
    alive[:, 1:] &= ~np.logical_or.accumulate(done[:, :-1], axis=1)
    taken, ended = alive.sum(axis=1), (alive & done).any(axis=1)
    rewards = several(n_step.reward)
    wide = (*every.shape, *[1] * (rewards.ndim - 2))
    # Not a product with 0: what lies beyond the end of an episode may be infinite.
    kept = np.where(alive.reshape(wide), rewards.double().numpy(), 0.0)
    factors = np.broadcast_to(n_step.gamma ** np.arange(n_step.steps), every.shape)
    summed = torch.from_numpy((kept * factors.reshape(wide)).sum(axis=1))
    kind = rewards.dtype if rewards.is_floating_point() else torch.float32
    field = store.columns[n_step.reward].field
    discount = np.where(ended, 0.0, n_step.gamma**taken).astype(np.float32)
    leaves = [
        (field.path, summed.to(kind).view(*shape, *field.shape)),
        (("discount",), torch.from_numpy(discount.reshape(shape))),
    ]
    return leaves, taken


def finished(
    leaves: Leaves, shape: tuple[int, ...], device: torch.device, as_tensordict: bool
) -> Any:
    """Bring the tensors of a batch to the device, and nest them."""
    if device.type == "cuda":  # through torch's own pinned memory: it knows when that is free
        leaves = [(path, t.pin_memory().to(device, non_blocking=True)) for path, t in leaves]
    elif device.type != "cpu":
        leaves = [(path, tensor.to(device)) for path, tensor in leaves]
    batch = nested(leaves)
    if as_tensordict:
        from tensordict import TensorDict

        return TensorDict(batch, batch_size=list(shape))
    return batch


def with_priorities(store: EpisodeStore, drawn: Draw, beta: float) -> Leaves:
    """Return the ids of a batch's frames, -1 for padding, and the weights of its draws."""
    assert store.priorities is not None
    tree = store.priorities.tree
    first = drawn.rows.reshape(len(drawn.drawn), -1)[:, 0]
    entries = store.priorities.offsets[first] + drawn.drawn
    weight = importance_weights(tree.get(entries), tree.min, beta).astype(np.float32)
    ids = np.where(drawn.inside, store.index.starts[drawn.rows] + drawn.steps, -1)
    spread = np.repeat(weight, ids.size // len(weight)).reshape(ids.shape)
    return [(("index",), torch.from_numpy(ids)), (("weight",), torch.from_numpy(spread))]
