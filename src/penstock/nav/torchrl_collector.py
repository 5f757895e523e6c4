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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import Self

from penstock.core.extras import needs_torchrl
from penstock.core.writes import close_after
from penstock.errors import SaverClosed, UsageError
from penstock.nav.collect import EpisodeSums, Rollout
from penstock.nav.config import Config, as_omegaconf
from penstock.nav.networks import ACTIONS, Act, Policy
from penstock.nav.ppo import Batch, require_finite
from penstock.nav.simulation.env import to_world
from penstock.nav.simulation.task import Settings
from penstock.ui.suggestions import did_you_mean

with needs_torchrl("an environment of TorchRL"):
    from tensordict import TensorDictBase
    from torchrl.envs import EnvBase

Key = str | tuple[str, ...]

SHAPES: Final = Settings().shapes()
"""Observations as the policy gets them, whatever axes of length 1 the environment adds."""
STATS: Final = ("reach_goal", "collision", "return", "episode_len")
_SEEN: Final = ("agents", "observation")
_NORMALIZED: Final = ("agents", "action_normalized")
_VELOCITY: Final = ("agents", "action")


@dataclass(frozen=True)
class Plugin:
    """What was found out about an environment."""

    num_envs: int
    actions: Mapping[Key, tuple[int, ...]]
    """Shape of each action it may be given, the number of drones included."""
    reward: Key
    stats: tuple[str, ...]
    """Statistics of episodes that it keeps, of those in `STATS`."""


def check_plugin(env: EnvBase) -> Plugin:
    """Look at the specs of an environment; it is neither reset nor stepped.

    One that cannot feed the learner is refused: a key is missing or of another shape, or it is not
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
    actions, known = _leaves(env.full_action_spec), (_NORMALIZED, _VELOCITY)
    strange = [f"the action {key!r}" for key in actions if key not in known]
    if strange or not actions:
        raise UsageError(
            f"plug-in {name} asks for {(strange or ['no action'])[0]}; the policy gives "
            f"{_NORMALIZED}, from 0 to 1, and {_VELOCITY}, in m/s"
        )
    for key in actions:
        _check(name, "action", key, actions, (count, ACTIONS))
    some = next(iter(actions.values()))
    sized = (part for part in STATS if ("stats", part) in seen)
    return Plugin(
        num_envs=count,
        actions={key: tuple(actions.get(key, some).shape) for key in known},
        reward=reward,
        stats=tuple(part for part in sized if math.prod(seen["stats", part].shape) == count),
    )


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


def observations(tensordict: TensorDictBase, device: torch.device) -> dict[str, Tensor]:
    """Return the observations of a TensorDict [N] in the shapes of `SHAPES`, float32."""
    return {
        part: tensordict.get((*_SEEN, part)).reshape(-1, *shape).to(device, torch.float32)
        for part, shape in SHAPES.items()
    }


class TorchRLCollector:
    """Flies any environment: a `penstock.nav.collect.Collector`.

    `close` closes the environment, too. A batch is the caller's: the next one does not overwrite
    it. Actions are drawn from a generator of its own. The environment's own state cannot be saved:
    a resumed run goes on with the same weights and random numbers, and with new episodes.

    Args:
        env: The environment: see the head of this module.
        policy: What flies; its weights are those of the moment, there is no copy.
        steps: Steps per batch.
        seed: Of the environment, and of the actions.
        action_limit: Largest speed per axis, m/s.

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
        self._limit = action_limit
        self._generator = torch.Generator(policy.device).manual_seed(seed)
        self._seed = seed
        self._collected = 0
        self._now: TensorDictBase | None = None
        self._facts: dict[str, float] = {}
        self._closed = False

    @classmethod
    def from_config(cls, config: Config, policy: Policy, seed: int) -> Self:
        """Make the environment that the settings name. A class that asks for a `cfg` gets all."""
        assert config.plugin is not None
        env = make_plugin(config.plugin, config.plugin_arguments, as_omegaconf(config))
        made = cls(env, policy, config.steps, seed, config.settings.action_limit)
        config.ppo.check_rows(config.steps, made.plugin.num_envs)
        return made

    @torch.no_grad()
    def collect(self, dynamic_active: int = 0, disturbed: float = 1.0) -> Batch:
        """Fly; the environment has its own obstacles and disturbances.

        The batch's facts are its statistics, of the last batch in which episodes ended.
        """
        del dynamic_active, disturbed
        if self._closed:
            raise SaverClosed("this collector was closed; make a new one, with a new environment")
        if self._now is None:
            self.env.set_seed(self._seed + self._collected)
            self._now = self.env.reset()
        count, device = self.plugin.num_envs, self.policy.device
        rollout = Rollout(SHAPES, self.steps, count)
        finals: list[dict[str, Tensor]] = []
        stats: dict[str, list[Tensor]] = {name: [] for name in self.plugin.stats}
        for step in range(self.steps):
            rollout.keep(self._act(self._now, rollout, step), step, slice(0, count))
            stepped, self._now = self.env.step_and_maybe_reset(self._now)
            after = stepped["next"]
            terminated = after["terminated"].reshape(count)
            ended = after["done"].reshape(count) | terminated
            if (cut := after.get("truncated", None)) is not None:
                ended = ended | cut.reshape(count)
            rollout.reward[step] = after[self.plugin.reward].reshape(count)
            rollout.terminated[step] = terminated
            rollout.truncated[step] = truncated = ended & ~terminated
            if truncated.any():
                finals.append(observations(after[truncated], device))
            for name, values in stats.items():
                values.append(after["stats", name].reshape(count)[ended])
        self._collected += 1
        ended = rollout.terminated | rollout.truncated
        if number := float(ended.sum()):
            self._facts = {"stats/episodes": number}
            for name, values in stats.items():
                self._facts[f"stats/{name}"] = mean = float(torch.cat(values).double().mean())
                if name == "reach_goal":
                    self._facts["train/success"] = mean
        if finals:
            together = {part: torch.cat([each[part] for each in finals]) for part in SHAPES}
            rollout.final_value[rollout.truncated] = self.policy.value(together).cpu()
        last = torch.zeros(count, device=device)
        flying = ~ended[-1]  # of the others nothing is carried over
        if flying.any():
            last[flying] = self.policy.value(observations(self._now[flying], device))
        sums = EpisodeSums()
        sums.add_reward(rollout.reward)
        batch = rollout.batch(last, sums, device)
        batch.facts = dict(self._facts)
        return batch

    def _act(self, now: TensorDictBase, rollout: Rollout, step: int) -> Act:
        """Decide for all drones, and hand the environment the actions that it may ask for."""
        seen = observations(now, self.policy.device)
        for part, value in seen.items():
            require_finite(f"observation {part} of the plug-in", value)
            rollout.obs[part][step] = value
        act = self.policy.act(seen, self._generator)
        toward = seen["direction"][:, 0, :2]
        length = toward.norm(dim=1, keepdim=True)
        ahead = toward.new_tensor([1.0, 0.0])  # of a target straight above
        axis = torch.where(length > 1e-6, toward / length.clamp(min=1e-6), ahead)
        velocity = to_world((2.0 * act.action - 1.0) * self._limit, axis)
        for key, chosen in ((_NORMALIZED, act.action), (_VELOCITY, velocity)):
            now.set(key, chosen.reshape(self.plugin.actions[key]))
        return act

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the random numbers of the actions."""
        batches = torch.tensor(self._collected)
        return [{"generator": self._generator.get_state(), "batches": batches}]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with them."""
        self._generator.set_state(states[0]["generator"])
        self._collected = int(states[0]["batches"])

    def close(self) -> None:
        """Close the environment; may be called twice."""
        self._closed = True
        if not self.env.is_closed:
            self.env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        close_after(self.close, error)


def make_plugin(target: str, config: Mapping[str, Any], cfg: Any = None) -> EnvBase:
    """Make an environment from its name, "module.Class". This imports and runs code of that name.

    The name must come from the command line or from a file of the user's own, never from a
    checkpoint or another file that somebody may have sent. `cfg` is given to a class that takes
    such an argument, unless it is among the keywords in `config`.
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
    keywords = {key: value for key, value in config.items() if key != "_target_"}
    known = [*inspect.signature(kind.__init__).parameters][1:]
    if cfg is not None and "cfg" in known:
        keywords.setdefault("cfg", cfg)
    try:
        return kind(**keywords)
    except TypeError as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"plug-in {target} could not be made: {reason}; it takes {', '.join(known) or 'none'}"
        ) from error


def _is_env(item: Any) -> bool:
    return isinstance(item, type) and issubclass(item, EnvBase)
