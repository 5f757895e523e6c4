"""The simulator as a TorchRL environment, with NavRL's keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.core.extras import needs_torchrl
from penstock.errors import UsageError
from penstock.nav.simulation.kernels import AXIS, POSITION, QUATERNION, RATES, RETURN, VELOCITY
from penstock.nav.simulation.simulator import Observation, Simulator
from penstock.nav.simulation.task import Settings

with needs_torchrl("NavigationEnv"):
    from tensordict import TensorDict, TensorDictBase
    from torchrl.data import Binary, Bounded, Composite, Unbounded
    from torchrl.envs import EnvBase

ACTIONS = ("normalized", "velocity")


class NavigationEnv(EnvBase):  # type: ignore[misc]
    """Drones as a batched TorchRL environment.

    Keys, per drone: ("agents", "observation", "state" | "lidar" | "direction" |
    "dynamic_obstacle"), ("agents", "reward"), "done", "terminated", "truncated",
    ("info", "drone_state") (position, quaternion, velocity, body rates) and ("stats", "return" |
    "episode_len" | "reach_goal" | "collision" | "truncated") of the running episode.

    As TorchRL wants it, a drone whose episode ends is not started again inside `step`.

    Args:
        settings: What is simulated.
        seed: As for `Simulator`, as is `threads`.
        action: "normalized" takes ("agents", "action_normalized") from 0 to 1, in the goal frame,
            as the policy's Beta distributions give it; "velocity" takes ("agents", "action"), a
            velocity in the world in m/s as NavRL hands it on, cut at the action limit.
        changes: Other settings, by name: `NavigationEnv(num_envs=64)`.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        seed: int = 0,
        action: str = "normalized",
        threads: int = 1,
        **changes: Any,
    ) -> None:
        if action not in ACTIONS:
            raise UsageError(f"action={action!r} is unknown; use one of {', '.join(ACTIONS)}")
        settings = (settings or Settings()).with_(**changes)
        self.simulator = Simulator(settings, seed, threads)
        super().__init__(device=torch.device("cpu"), batch_size=[settings.num_envs])
        self._velocity = action == "velocity"
        self._last: Observation | None = None
        count, device = settings.num_envs, self.device

        def free(*shape: int) -> Any:
            return Unbounded((count, *shape), device=device)

        def group(**parts: Any) -> Any:
            return Composite(parts, shape=(count,), device=device)

        seen = group(**{name: free(*shape) for name, shape in settings.shapes().items()})
        names = ("return", "episode_len", "reach_goal", "collision", "truncated")
        self.observation_spec = group(
            agents=group(observation=seen),
            info=group(drone_state=free(1, 13)),
            stats=group(**{name: free(1) for name in names}),
        )
        if self._velocity:
            limit = 2**0.5 * settings.action_limit  # a corner, turned
            name, low, high = "action", -limit, limit
        else:
            name, low, high = "action_normalized", 0.0, 1.0
        bounded = Bounded(low, high, (count, 3), device=device, dtype=torch.float32)
        self.action_spec = group(agents=group(**{name: bounded}))
        self.reward_spec = group(agents=group(reward=free(1)))
        flag = Binary(1, (count, 1), device=device, dtype=torch.bool)
        self.done_spec = group(done=flag, terminated=flag.clone(), truncated=flag.clone())

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        simulator = self.simulator
        mask = None if tensordict is None else tensordict.get("_reset", None)
        if mask is None or self._last is None:
            seen = simulator.reset(simulator.observation_buffer())
        else:  # the others stay as they are, TorchRL merges the two
            seen = {name: value.clone() for name, value in self._last.items()}
            simulator.restart(mask.view(-1).nonzero()[:, 0], seen)
        self._last = seen
        nobody = torch.zeros(simulator.num_envs, 1, dtype=torch.bool, device=self.device)
        return self._observed(seen, nobody, nobody, nobody, nobody)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        simulator = self.simulator
        if self._velocity:
            limit = simulator.settings.action_limit
            wish = to_goal_frame(tensordict["agents", "action"], simulator.rows[:, AXIS])
            action = (0.5 * (wish / limit + 1)).clamp(0, 1)
        else:
            action = tensordict["agents", "action_normalized"]
        seen = simulator.observation_buffer()
        _, reward, terminated, truncated, info = simulator.step(action, seen, restart=False)
        self._last = seen
        crashed = info.collision_static | info.collision_dynamic | info.collision_height
        result = self._observed(seen, info.reach_goal, crashed, terminated, truncated)
        result["agents", "reward"] = reward[:, None].clone()
        return result

    def _observed(self, seen: Observation, *ends: Tensor) -> TensorDictBase:
        reached, crashed, terminated, truncated = (flag.view(-1, 1).clone() for flag in ends)
        rows, count = self.simulator.rows, self.simulator.num_envs
        parts = [rows[:, part] for part in (POSITION, QUATERNION, VELOCITY, RATES)]
        stats = {
            "return": rows[:, RETURN, None].clone(),
            "episode_len": self.simulator.progress[:, None].float(),
            "reach_goal": reached.float(),
            "collision": crashed.float(),
            "truncated": truncated.float(),
        }
        return TensorDict(
            {
                "agents": {"observation": dict(seen)},
                "info": {"drone_state": torch.cat(parts, 1)[:, None]},
                "stats": stats,
                "terminated": terminated,
                "truncated": truncated,
                "done": terminated | truncated,
            },
            batch_size=[count],
            device=self.device,
        )

    def _set_seed(self, seed: int | None) -> None:
        if seed is not None:
            self.simulator.reseed(seed)
            self._last = None

    def close(self, **kwargs: Any) -> None:
        """Release threads."""
        self.simulator.close()
        super().close(**kwargs)


def to_goal_frame(vector: Tensor, axis: Tensor) -> Tensor:
    """Rotate vectors [n, ..., 3] of the world into the frames whose x axes are `axis`, [n, 2]."""
    shape = [axis.shape[0]] + [1] * (vector.ndim - 2)
    c, s = axis[:, 0].view(shape), axis[:, 1].view(shape)
    x, y, z = vector.unbind(-1)
    return torch.stack([c * x + s * y, c * y - s * x, z], -1)


def to_world(vector: Tensor, axis: Tensor) -> Tensor:
    """Undo `to_goal_frame`."""
    return to_goal_frame(vector, axis * axis.new_tensor([1.0, -1.0]))
