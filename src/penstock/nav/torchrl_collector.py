"""Rollouts from any TorchRL environment with NavRL's keys: plug-ins.

A plug-in is a batched `EnvBase`, one drone per environment. Axes of length 1 may stand anywhere
after the first, as upstream's extra axis of agents does:

    ("agents", "observation", "state")              [N, 8]
    ("agents", "observation", "lidar")              [N, 36, 4]
    ("agents", "observation", "dynamic_obstacle")   [N, 5, 10]
    ("agents", "observation", "direction")          [N, 3], to the target, horizontal
    ("agents", "reward") or "reward"                [N]
    "done", "terminated", perhaps "truncated"       [N]
    ("stats", ...), if there                        [N] each

It takes ("agents", "action_normalized"), from 0 to 1 in the goal frame, or ("agents", "action"), a
velocity in the world in m/s; [N, 3].
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

from penstock.core.extras import needs_torchrl
from penstock.core.writes import close_after
from penstock.errors import SaverClosed, UsageError
from penstock.nav.collect import EpisodeSums, Stopped
from penstock.nav.config import Config, as_omegaconf
from penstock.nav.networks import ACTIONS, Policy
from penstock.nav.ppo import Batch, require_finite
from penstock.nav.simulation.env import to_world
from penstock.nav.simulation.task import Settings
from penstock.ui.suggestions import did_you_mean

with needs_torchrl("an environment of TorchRL"):
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictModuleBase
    from torchrl.envs import EnvBase

Key = str | tuple[str, ...]

SHAPES: Final = Settings().shapes()
"""Observations as the policy gets them, whatever axes of length 1 the environment adds."""
STATS: Final = ("reach_goal", "collision", "return", "episode_len")
_SEEN: Final = ("agents", "observation")
_NORMALIZED: Final = ("agents", "action_normalized")
_VELOCITY: Final = ("agents", "action")
_LOG_PROB: Final = "penstock_log_prob"
_VALUE: Final = "penstock_value"


@dataclass(frozen=True)
class Plugin:
    """What was found out about an environment.

    Attributes:
        num_envs: Its drones.
        actions: Shape of each action it may be given, the number of drones included.
        reward: Key of the reward.
        stats: Statistics of episodes that it keeps, of those in `STATS`.
    """

    num_envs: int
    actions: Mapping[Key, tuple[int, ...]]
    reward: Key
    stats: tuple[str, ...]


def check_plugin(env: EnvBase) -> Plugin:
    """Look at the specs of an environment; it is neither reset nor stepped.

    Raises:
        UsageError: It cannot feed the learner: a key is missing or of another shape, or it is not
            a batch of environments.
    """
    if not isinstance(env, EnvBase):
        raise UsageError(f"a plug-in is a torchrl.envs.EnvBase, not a {type(env).__name__}")
    name = type(env).__name__
    if len(env.batch_size) != 1 or env.batch_size[0] < 1:
        raise UsageError(
            f"plug-in {name} has batch_size {list(env.batch_size)}; give a batch of environments, "
            "[N], such as torchrl.envs.SerialEnv makes of several"
        )
    count = int(env.batch_size[0])
    seen = _leaves(env.full_observation_spec)
    for part, shape in SHAPES.items():
        _check(name, "observation", (*_SEEN, part), seen, (count, *shape))
    rewards = _leaves(env.full_reward_spec)
    inside: Key = ("agents", "reward")
    reward = "reward" if "reward" in rewards and inside not in rewards else inside
    _check(name, "reward", reward, rewards, (count,))
    ends = _leaves(env.full_done_spec)
    for flag in ("done", "terminated", "truncated"):
        if flag in ends or flag != "truncated":
            _check(name, "flag", flag, ends, (count,))
    stats = (part for part in STATS if ("stats", part) in seen)
    return Plugin(
        num_envs=count,
        actions=_check_actions(name, _leaves(env.full_action_spec), count),
        reward=reward,
        stats=tuple(part for part in stats if math.prod(seen["stats", part].shape) == count),
    )


def _check_actions(name: str, wanted: Mapping[Key, Any], count: int) -> dict[Key, tuple[int, ...]]:
    known: tuple[Key, ...] = (_NORMALIZED, _VELOCITY)
    strange = [key for key in wanted if key not in known]
    if strange or not wanted:
        raise UsageError(
            f"plug-in {name} asks for {f'the action {strange[0]!r}' if strange else 'no action'}; "
            f"the policy gives {_NORMALIZED}, from 0 to 1, and {_VELOCITY}, in m/s"
        )
    for key in wanted:
        _check(name, "action", key, wanted, (count, ACTIONS))
    some = next(iter(wanted.values()))
    return {key: tuple(wanted.get(key, some).shape) for key in known}


def _leaves(spec: Any) -> dict[Key, Any]:
    return dict(spec.items(True, True))


def _check(
    name: str, kind: str, key: Key, known: Mapping[Key, Any], wanted: tuple[int, ...]
) -> None:
    """Look for a key, and at its shape; axes of length 1 do not matter, but for the first."""
    if key not in known:
        hint = did_you_mean(key, known) if known else "it has none"
        raise UsageError(f"plug-in {name} has no {kind} {key!r}; {hint}")
    given = list(known[key].shape)
    bare = [wanted[0], *(size for size in wanted[1:] if size != 1)]
    if given[:1] + [size for size in given[1:] if size != 1] != bare:
        raise UsageError(
            f"plug-in {name}: {key!r} has shape {given}; give {bare}, with any axes of length 1"
        )


class _TorchRLPolicy(TensorDictModuleBase):  # type: ignore[misc]
    """A policy as TorchRL calls it: it reads and writes the keys of an environment.

    Args:
        policy: What decides.
        plugin: What `check_plugin` found out.
        generator: Where the randomness comes from, on the device of the policy.
        limit: Largest speed per axis, m/s.
    """

    def __init__(
        self, policy: Policy, plugin: Plugin, generator: torch.Generator, limit: float
    ) -> None:
        super().__init__()
        self.in_keys = [(*_SEEN, part) for part in SHAPES]
        self.out_keys = [*plugin.actions, _LOG_PROB, _VALUE]
        self.policy = policy
        self._shapes = plugin.actions
        self._generator = generator
        self._limit = limit

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Decide for all drones; a `DataError` names an observation that is not finite."""
        seen = observations(tensordict)
        for part, value in seen.items():
            require_finite(f"observation {part} of the plug-in", value)
        action, log_prob, value = self.policy.act(seen, self._generator)
        toward = seen["direction"][:, 0, :2]
        length = toward.norm(dim=1, keepdim=True)
        ahead = toward.new_tensor([1.0, 0.0])  # of a target straight above
        axis = torch.where(length > 1e-6, toward / length.clamp(min=1e-6), ahead)
        velocity = to_world((2.0 * action - 1.0) * self._limit, axis)
        for key, chosen in ((_NORMALIZED, action), (_VELOCITY, velocity)):
            tensordict.set(key, chosen.reshape(self._shapes[key]))
        return tensordict.update({_LOG_PROB: log_prob, _VALUE: value})


def observations(tensordict: TensorDictBase) -> dict[str, Tensor]:
    """Return the observations of a TensorDict [..., N] in the shapes of `SHAPES`, float32."""
    batch = tensordict.batch_size
    return {
        part: tensordict.get((*_SEEN, part)).reshape(*batch, *shape).float()
        for part, shape in SHAPES.items()
    }


class TorchRLCollector:
    """Flies any environment, by TorchRL's own collector: a `penstock.nav.collect.Collector`.

    `close` closes the environment, too. A batch is the caller's: the next one does not overwrite
    it. Actions are drawn from a generator of its own. The environment's own state cannot be saved:
    a resumed run goes on with the same weights and random numbers, and with new episodes.

    Args:
        env: The environment: see the head of this module.
        policy: What flies; its weights are those of the moment, there is no copy.
        steps: Steps per batch.
        seed: Of the environment, and of the actions.
        action_limit: Largest speed per axis, m/s.

    Raises:
        UsageError: The environment cannot feed the learner, or an argument makes no sense.

    Example:
        with TorchRLCollector(env, policy, steps=32) as collector:
            ppo.update(collector.collect(), generator)
    """

    def __init__(
        self, env: EnvBase, policy: Policy, steps: int, seed: int = 0, action_limit: float = 2.0
    ) -> None:
        if type(steps) is not int or steps < 1:
            raise UsageError(f"steps is {steps!r}; give a whole number, at least 1")
        if not (math.isfinite(action_limit) and action_limit > 0):
            raise UsageError(f"action_limit is {action_limit!r}; give a number above 0, in m/s")
        self.plugin = check_plugin(env)
        self.env = env
        self.policy = policy
        self.steps = steps
        self._device = policy.device
        self._generator = torch.Generator(self._device).manual_seed(seed)
        self._seed = seed
        self._collected = 0
        self._module = _TorchRLPolicy(policy, self.plugin, self._generator, action_limit)
        self._collector: Any = None
        self._batches: Iterator[Any] | None = None
        self._facts: dict[str, float] = {}
        self._closed = False

    @classmethod
    def from_config(cls, config: Config, policy: Policy, seed: int) -> Self:
        """Make the environment that the settings name. A class that asks for a `cfg` gets all.

        Raises:
            UsageError: As for the class and `make_plugin`.
        """
        assert config.plugin is not None
        arguments = dict(config.plugin_arguments)
        if "cfg" not in arguments and _asks_for_cfg(config.plugin):
            arguments["cfg"] = as_omegaconf(config)
        env = make_plugin(config.plugin, arguments)
        made = cls(env, policy, config.steps, seed, config.settings.action_limit)
        rows = config.steps * made.plugin.num_envs
        if rows % config.ppo.minibatches:
            raise UsageError(
                f"algo.minibatches={config.ppo.minibatches} does not divide the {rows} frames of "
                f"{type(env).__name__} ({config.steps} steps x {made.plugin.num_envs} environments)"
            )
        return made

    def collect(self, dynamic_active: int = 0, disturbed: float = 1.0) -> Batch:
        """Fly; the environment has its own obstacles and disturbances.

        Returns:
            A batch whose facts are the environment's statistics, of the last batch in which
            episodes ended.

        Raises:
            SaverClosed: The collector was closed.
        """
        del dynamic_active, disturbed
        if self._closed:
            raise SaverClosed("this collector was closed; make a new one, with a new environment")
        if self._batches is None:
            self._start()
        assert self._batches is not None
        data = next(self._batches, None)
        if data is None:
            raise Stopped
        self._collected += 1
        return self._batch(data)

    def _start(self) -> None:
        """Seed and reset the environment."""
        self.env.set_seed(self._seed + self._collected)
        drawn = self._generator.get_state()
        self._collector = _make_collector(
            self.env,
            self._module,
            frames_per_batch=self.steps * self.plugin.num_envs,
            # The very device of the weights: for any other, TorchRL would fly with a copy of them.
            policy_device=self._device,
            env_device=self.env.device,
            storing_device=self._device,
        )
        # A collector tries the policy first to see what it writes.
        self._generator.set_state(drawn)
        self._batches = iter(self._collector)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the random numbers of the actions."""
        state = {"generator": self._generator.get_state()}
        return [state | {"batches": torch.tensor(self._collected)}]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with them."""
        self._generator.set_state(states[0]["generator"])
        self._collected = int(states[0]["batches"])

    def close(self) -> None:
        """End collection and close the environment; may be called twice."""
        if not self._closed and self._collector is not None:
            self._collector.shutdown(close_env=False)
        self._closed = True
        if not self.env.is_closed:
            self.env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after(self.close, error)

    def _batch(self, data: TensorDictBase) -> Batch:
        """Turn TorchRL's [N, T] into [T, N], in memory of its own."""
        shape = (self.steps, self.plugin.num_envs)
        rows = data.transpose(0, 1)
        after = rows.get("next")
        terminated = after.get("terminated").reshape(shape)
        ended = after.get("done").reshape(shape) | terminated
        if (cut := after.get("truncated", None)) is not None:
            ended = ended | cut.reshape(shape)
        truncated = ended & ~terminated
        self._count(after, ended)
        final = torch.zeros(shape, device=self._device)
        if truncated.any():
            final[truncated] = self.policy.value(observations(after[truncated]))
        last = torch.zeros(shape[1], device=self._device)
        flying = ~ended[-1]  # of the others nothing is carried over
        if flying.any():
            last[flying] = self.policy.value(observations(after[-1][flying]))
        reward = _owned(after.get(self.plugin.reward).reshape(shape).float())
        sums = EpisodeSums()
        sums.add_reward(reward)
        # TorchRL writes the next batch into the same memory.
        return Batch(
            obs={part: _owned(value) for part, value in observations(rows).items()},
            action=_owned(rows.get(_NORMALIZED).reshape(*shape, ACTIONS)),
            log_prob=_owned(rows.get(_LOG_PROB)),
            value=_owned(rows.get(_VALUE)),
            reward=reward,
            terminated=_owned(terminated),
            truncated=truncated,
            final_value=final,
            last_value=last,
            episodes=sums.sums,
            facts=dict(self._facts),
        )

    def _count(self, after: TensorDictBase, ended: Tensor) -> None:
        """Take the means of `STATS` over the episodes that ended, if any did."""
        count = float(ended.sum())
        if not count:
            return
        self._facts = {"stats/episodes": count}
        for name in self.plugin.stats:
            values = after.get(("stats", name)).reshape(ended.shape)
            self._facts[f"stats/{name}"] = float(values[ended].double().mean())
        if "stats/reach_goal" in self._facts:
            self._facts["train/success"] = self._facts["stats/reach_goal"]


def _owned(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _make_collector(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():  # TorchRL warns of parts of its own that it will remove
        warnings.simplefilter("ignore", DeprecationWarning)
        from torchrl import collectors
    kind = getattr(collectors, "Collector", None) or collectors.SyncDataCollector  # its old name
    if "auto_register_policy_transforms" in inspect.signature(kind).parameters:
        options["auto_register_policy_transforms"] = False  # the policy has no memory
    return kind(*args, **options, total_frames=-1, return_same_td=True, trust_policy=True)


def make_plugin(target: str, config: Mapping[str, Any]) -> EnvBase:
    """Make an environment from its name. This imports and runs code of that name.

    Args:
        target: "module.Class". It must come from the command line or from a file of the user's
            own, never from a checkpoint or another file that somebody may have sent.
        config: Keywords of the class; "_target_" is left out.

    Raises:
        UsageError: There is no such module or class, it is not an environment, or it does not take
            these keywords.
    """
    parts = target.split(".") if isinstance(target, str) else []
    if len(parts) < 2 or not all(map(str.isidentifier, parts)):
        raise UsageError(f"plug-in {target!r} is not a name such as 'my_package.envs.MyEnv'")
    where = ".".join(parts[:-1])
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        missing = error.name or where
        its_own = f"{where}.".startswith(f"{missing}.")
        what = f"there is no module {missing!r}" if its_own else f"its module needs {missing!r}"
        raise UsageError(
            f"plug-in {target}: {what}; install it, or name its folder in PYTHONPATH"
        ) from error
    kind = getattr(module, parts[-1], None)
    if kind is None:
        known = [name for name, item in vars(module).items() if _is_env(item)]
        hint = did_you_mean(parts[-1], known) if known else "the module has no environments"
        raise UsageError(f"plug-in {target}: {where} has no {parts[-1]!r}; {hint}")
    if not _is_env(kind):  # before it is called: nothing but environments is
        raise UsageError(f"plug-in {target} is not a class of torchrl.envs.EnvBase; name one")
    try:
        return kind(**{key: value for key, value in config.items() if key != "_target_"})
    except TypeError as error:
        reason = " ".join(str(error).split())
        known = [*inspect.signature(kind.__init__).parameters][1:]
        raise UsageError(
            f"plug-in {target} could not be made: {reason}; it takes {', '.join(known) or 'none'}"
        ) from error


def _is_env(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, EnvBase)


def _asks_for_cfg(target: str) -> bool:
    module, _, name = target.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
        return "cfg" in inspect.signature(kind.__init__).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return False  # make_plugin says what is wrong
