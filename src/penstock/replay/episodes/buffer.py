"""DictReplayBuffer: whole episodes in, batches of frames out, compressed where that pays."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Self

from penstock.core.memory import whole_number
from penstock.errors import UsageError
from penstock.replay.episodes import batches
from penstock.replay.episodes.schema import Settings, is_tensordict, read_episode
from penstock.replay.episodes.store import HOLDER, Column, EpisodeStore, RecordWriter, load
from penstock.replay.keys import Codecs, Key, as_key, as_path
from penstock.replay.priority import whole_numbers
from penstock.replay.segments import Saved, save_blocks

if TYPE_CHECKING:
    from penstock.dataset.reader import Dataset
    from penstock.ui.progress import Mode

Ints = NDArray[np.int64]


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
            max_size: As for a new buffer; by default all frames.
            device: Where batches go.
            episodes: Their numbers, in the order to add them; by default all.
            rename: Other keys for some features: {"observation.state": ("obs", "state")}.
            progress: "rich", "plain" or "quiet".
            options: As for a new buffer; `img_compressed` is True unless given.

        Raises:
            UsageError: There is no such feature or episode, or an option is wrong.
            DataError: There is no dataset, or it is damaged.
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
        with self._lock:
            return self._store.arena.live_bytes

    @property
    def spilled_bytes(self) -> int:
        """Bytes that lie in `spill_dir`."""
        with self._lock:
            return self._store.arena.spilled_bytes

    @property
    def codecs(self) -> dict[Key, str]:
        """The codec of each key; empty before the first episode."""
        with self._lock:
            columns = self._store.columns
        return {as_key(column.field.path): column.codec.id for column in columns}

    def add(self, episode: Any) -> int:
        """Add an episode, forgetting others to make room.

        Args:
            episode: A (nested) dict or a TensorDict with exactly the buffer's keys: arrays, tensors
                or lists of frames, all with the same first length. It is copied.

        Returns:
            The id of the episode, for `remove`.

        Raises:
            UsageError: The episode is ragged or empty, lacks a key or has one too many, differs in
                shape or type from the first one, or could not be held even alone; the buffer is
                unchanged.
        """
        with self._lock:
            if not self._store.columns:  # the codecs are not settled: nobody may come between
                return self._add(episode)
        return self._add(episode)

    def _add(self, episode: Any) -> int:
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
        with self._lock:
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

        Raises:
            UsageError: The buffer is empty, no episode is as long as `sequence`, or an argument is
                not as above.
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
                ahead = batches.NStep.check(store, steps_ahead, gamma, *keys)
            drawn = batches.draw(store, count, sequence, pad)
            leaves = batches.read(store, drawn.rows, drawn.steps, ahead)
            if pad:
                leaves.append((("mask",), torch.from_numpy(drawn.inside)))
            if store.priorities is not None:
                leaves += batches.with_priorities(store, drawn, beta)
        return batches.finished(leaves, drawn.rows.shape, self._device, store.as_tensordict)

    def sample_indices(self, batch_size: int) -> Ints:
        """Draw frames as `sample` does, and return only their ids, for `get`."""
        count = whole_number("batch_size", batch_size)
        with self._lock:
            store = self._filled()
            drawn = batches.draw(store, count, None, False)
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
            leaves = batches.read(store, rows, steps)
        return batches.finished(leaves, ids.shape, self._device, store.as_tensordict)

    def _filled(self) -> EpisodeStore:
        if not len(self._store.index):
            raise UsageError("the buffer is empty; add an episode first")
        return self._store

    def update_priority(self, index: ArrayLike, priority: ArrayLike) -> None:
        """Set the priorities of frames; those forgotten meanwhile, and padding, are passed over.

        Args:
            index: The "index" of a batch.
            priority: As many numbers from 0, for example |TD error|; or one for all.

        Raises:
            UsageError: The buffer has no priorities, or one is negative or not finite; nothing is
                changed.
        """
        if self._store.priorities is None:
            raise UsageError("this buffer has no priorities; make it with priority=0.6")
        ids = whole_numbers("a frame", index).reshape(-1)
        given = priority.detach().cpu() if isinstance(priority, torch.Tensor) else priority
        values = np.asarray(given, np.float64).reshape(-1)
        if values.size == 1:
            values = np.repeat(values, ids.size)
        if values.size != ids.size:
            raise UsageError(f"{values.size} priorities for {ids.size} frames")
        with self._lock:
            self._store.priorities.update(ids, values)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Save everything, so that `load` gives an equal buffer with the same next draws.

        Only episodes that the folder does not hold yet are written; the folder changes in one step,
        so that a crash leaves the last save. Other threads may go on meanwhile.

        Args:
            folder: New, empty, or saved to before; an older save there is replaced.

        Raises:
            StorageError: The disk refuses; the last save in the folder stays.
            UsageError: The folder holds something else.
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
        """Return the buffer that was saved, every byte verified.

        Args:
            folder: Given to `save`.
            device: Where batches go.
            spill_dir: As for a new buffer.

        Raises:
            CorruptFile: The folder is damaged.
            UnknownFormat: It holds no saved buffer.
        """
        store, saved = load(folder, spill_dir)
        buffer = cls.__new__(cls)
        buffer._begin(store, device, saved)
        return buffer


class EpisodeInParts:
    """An episode under way; made by `DictReplayBuffer.episode`, used by one thread.

    Attributes:
        id: Of the episode, for `DictReplayBuffer.remove`; -1 before the end of the block.

    Args:
        buffer: Gets the episode.
    """

    def __init__(self, buffer: DictReplayBuffer) -> None:
        self.id = -1
        self._buffer = buffer
        self._columns: list[Column] = []
        self._as_tensordict = False
        self._writers: list[RecordWriter] = []
        self._length = 0

    def __len__(self) -> int:
        """Count the frames that came so far."""
        return self._length

    def extend(self, part: Any) -> None:
        """Add frames to the end of the episode.

        Args:
            part: As for `DictReplayBuffer.add`; it is copied.
        """
        if self.id >= 0:
            raise UsageError("this episode is in the buffer already; begin another")
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
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._commit()
        self._writers = []

    def _commit(self) -> None:
        if not self._columns:
            raise UsageError("the episode has no frames; extend it by at least one")
        with self._buffer._lock:
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
