"""An environment of somebody else's flies like the built-in one: what a source asks of it.

Its state cannot be saved: a resumed run goes on with the same weights and random numbers, and with
new episodes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from penstock.errors import UsageError
from penstock.nav.learning.policy import Policy
from penstock.nav.learning.ppo_settings import Batch
from penstock.nav.training.collect import Stopped
from penstock.nav.training.config import Config, as_omegaconf
from penstock.nav.training.episodes import Episodes
from penstock.nav.training.plugin import PluginCollector, check_plugin, make_plugin


class PluginFlyer:
    """Flies any TorchRL environment with NavRL's keys.

    Args:
        config: Names the environment, and its arguments. A class that asks for a `cfg`, as NavRL's
            own do, gets all settings.
        seed: Of the environment and of the actions.
    """

    def __init__(self, config: Config, seed: int) -> None:
        assert config.plugin is not None
        arguments = dict(config.plugin_arguments)
        self.env = make_plugin(config.plugin, arguments | _whole_config(config))
        self.num_envs = check_plugin(self.env).num_envs
        self.dynamic_active = 0
        self.episodes = PluginEpisodes()
        self._config = config
        self._seed = seed
        self._state: Mapping[str, Any] | None = None
        self._collector: PluginCollector | None = None
        self._batches: Iterator[Batch] | None = None
        rows = config.steps * self.num_envs
        if rows % config.ppo.minibatches:
            raise UsageError(
                f"algo.minibatches={config.ppo.minibatches} does not divide the {rows} frames of "
                f"{type(self.env).__name__} ({config.steps} steps x {self.num_envs} environments)"
            )

    def memory(self) -> None:
        """Nothing: its batches have memory of their own."""

    def collect(self, policy: Policy, memory: Any) -> Batch:
        """Fly with a policy, always the same object."""
        del memory
        if self._collector is None:
            self._begin(policy)
        assert self._batches is not None and self._collector is not None
        batch = next(self._batches, None)
        if batch is None:
            raise Stopped
        self.episodes.add_batch(batch, self._collector.episodes())
        return batch

    def _begin(self, policy: Policy) -> None:
        device = self._config["device"]
        limit = self._config.settings.action_limit
        self._collector = PluginCollector(
            self.env, policy, self._config.steps, device, self._seed, limit
        )
        if self._state is not None:
            self._collector.start(self._seed + int(self._state["batches"]))
            self._collector.generator.set_state(self._state["generator"])
        self._batches = iter(self._collector)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the random numbers of the actions."""
        if self._collector is None:
            generator = torch.Generator().manual_seed(self._seed).get_state()
        else:
            generator = self._collector.generator.get_state()
        return [{"generator": generator, "batches": torch.tensor(self.episodes.batches)}]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on with them."""
        self._state = states[0]
        self.episodes.batches = int(states[0]["batches"])

    def close(self) -> None:
        """Close the environment."""
        if self._collector is not None:
            self._collector.close()
        elif not self.env.is_closed:
            self.env.close()


class PluginEpisodes(Episodes):
    """How episodes ended, by the environment's own statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.batches = 0
        self.means: dict[str, float] = {}

    def add_batch(self, batch: Batch, means: Mapping[str, float]) -> None:
        """Count a batch."""
        self.batches += 1
        self.add_reward(batch.reward)
        self.means = {f"stats/{name}": value for name, value in means.items()}
        if "reach_goal" in means:
            self.means["train/success"] = means["reach_goal"]

    def facts(self) -> dict[str, float]:
        """Return the environment's own statistics, of the last batch in which episodes ended."""
        return dict(self.means)


def _whole_config(config: Config) -> dict[str, Any]:
    """Return all settings as `cfg`, if that is what the class asks for."""
    assert config.plugin is not None
    if "cfg" in config.plugin_arguments:
        return {}
    module, _, name = config.plugin.rpartition(".")
    try:
        kind = getattr(__import__(module, fromlist=[name]), name)
        wants = "cfg" in inspect.signature(kind.__init__).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return {}  # make_plugin says what is wrong
    return {"cfg": as_omegaconf(config)} if wants else {}
