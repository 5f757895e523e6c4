"""What NavRL's train.py imports, small and on CPU: `python stand_ins.py train.py key=value …`.

The settings are those of hydra's command line: `key=value`, with a `+` before a key that
train.yaml does not have. `+hang_at=N` makes the N-th iteration wait to be killed.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import torch
from torch import nn

SETTINGS = {
    "headless": True,
    "device": "cpu",
    "seed": 3,
    "max_frame_num": 12 * 8 * 4,
    "eval_interval": 5,
    "save_interval": 2,
    "wandb.project": "navrl",
    "wandb.name": "test",
    "env.num_envs": 8,
    "algo.training_frame_num": 4,
    "algo.training_epoch_num": 2,
    "algo.num_minibatches": 4,
    "algo.feature_extractor.learning_rate": 5e-4,
    "algo.actor.learning_rate": 5e-4,
    "algo.actor.action_limit": 2.0,
}


class Config:
    """Settings by attribute, as omegaconf has them; one that is not there is an error."""

    def __init__(self, settings):
        self._settings = settings

    def __getattr__(self, name):
        if name in self._settings:
            return self._settings[name]
        inner = {
            key[len(name) + 1 :]: value
            for key, value in self._settings.items()
            if key.startswith(f"{name}.")
        }
        if not inner:
            raise AttributeError(f"Key '{name}' is not in struct")
        return Config(inner)

    def get(self, name, default=None):
        return self._settings.get(name, default)


def hydra_main(config_path, config_name, version_base):
    """Call the function with the settings of the command line."""

    def decorate(function):
        def call():
            settings = dict(SETTINGS)
            for word in sys.argv[1:]:
                key, value = word.split("=", 1)
                if key.startswith("+") == (key.lstrip("+") in SETTINGS):
                    sys.exit(f"Could not override {key!r}: new keys, and only those, begin with +")
                kind = type(SETTINGS.get(key, ""))
                settings[key.lstrip("+")] = kind(value)
            function(Config(settings))

        return call

    return decorate


class WandbRun:
    """Logs as lines of JSON; its folder is new at every start, as wandb's is."""

    def __init__(self, config):
        self.dir = os.path.join(os.environ["NAVRL_WANDB_DIR"], f"run-{os.getpid()}")
        os.makedirs(self.dir)
        self._hang_at = int(config.get("hang_at", -1))
        self._lines = 0

    def log(self, info):
        with open(os.path.join(self.dir, "log.jsonl"), "a") as file:
            file.write(json.dumps(info) + "\n")
        self._lines += 1
        if self._lines == self._hang_at:
            sys.stdout.write("hanging\n")
            sys.stdout.flush()
            time.sleep(600)


class SimulationApp:
    """Isaac Sim's: `close` ends the process at once, whatever is still to be done."""

    def __init__(self, settings):
        pass

    def close(self):
        sys.stdout.flush()
        os._exit(0)


class Spec:
    """Names and shapes of what the environment gives."""

    def __init__(self, shapes):
        self.shapes = shapes

    def keys(self, nested, leaves):
        return self.shapes.keys()

    def zero(self, *batch):
        return nested({key: torch.zeros(*batch, *shape) for key, shape in self.shapes.items()})


def nested(flat):
    """Tensors by tuples of names as dicts of dicts."""
    made = {}
    for (*outer, last), value in flat.items():
        place = made
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = value
    return made


OBSERVATION = {
    ("agents", "observation", "state"): (8,),
    ("agents", "observation", "lidar"): (1, 36, 4),
    ("agents", "observation", "direction"): (1, 3),
    ("agents", "observation", "dynamic_obstacle"): (1, 5, 10),
}
STATS = {("stats", "return"): (1,), ("stats", "reach_goal"): (1,)}


class NavigationEnv:
    """Random worlds. Isaac Sim's physics cannot be saved: a new process begins new episodes.

    Episodes last as long as a rollout and begin at its first step, so that a resumed run can equal
    one that was never stopped.
    """

    def __init__(self, cfg):
        self.num_envs = cfg.env.num_envs
        self.observation_spec = Spec({**OBSERVATION, **STATS})
        self.action_spec = Spec({("agents", "action"): (3,)})
        self._goal = None

    def set_seed(self, seed):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)

    def train(self):
        return self

    def eval(self):
        return self

    def enable_render(self, on):
        pass

    def reset(self):
        self._goal = torch.rand(self.num_envs, 3) * 4 - 2 + random.random() - np.random.rand()
        self._return = torch.zeros(self.num_envs, 1)
        return self._observe()

    def step(self, action):
        error = (action - self._goal).norm(dim=-1, keepdim=True)
        self._return = self._return - error
        return self._observe(), -error, {"return": self._return, "reach_goal": error < 1}

    def _observe(self):
        tensors = {key: torch.randn(self.num_envs, *shape) for key, shape in OBSERVATION.items()}
        tensors["agents", "observation", "state"][:, :3] = self._goal
        return tensors


class SyncDataCollector:
    """Gives the same dict of the same tensors again and again, as `return_same_td=True` does."""

    def __init__(self, env, policy, frames_per_batch, total_frames, device, return_same_td, **_):
        assert return_same_td
        self._env, self._policy, self._total = env, policy, total_frames
        self._steps = frames_per_batch // env.num_envs
        self._fps = 0.0
        shape = (env.num_envs, self._steps)
        actions = {"action": (3,), "action_normalized": (3,)}
        flat = {
            **OBSERVATION,
            **{("agents", name): shape for name, shape in actions.items()},
            ("sample_log_prob",): (1,),
            ("state_value",): (1,),
            **{("next", *key): shape for key, shape in {**OBSERVATION, **STATS}.items()},
            ("next", "agents", "reward"): (1,),
            ("next", "done"): (1,),
        }
        self._flat = {key: torch.zeros(*shape, *tail) for key, tail in flat.items()}
        self._data = nested(self._flat)
        env.reset()

    def __iter__(self):
        self._frames = 0
        while self._frames < self._total:
            begin = time.perf_counter()
            self._rollout()
            frames = self._env.num_envs * self._steps
            self._fps = frames / (time.perf_counter() - begin)
            self._frames += frames
            yield self._data

    @torch.no_grad()
    def _rollout(self):
        observed = self._env.reset()
        for step in range(self._steps):
            decided = self._policy(nested(observed))
            following, reward, stats = self._env.step(decided["agents"]["action"])
            for key, value in observed.items():
                self._flat[key][:, step] = value
            for name in ("action", "action_normalized"):
                self._flat["agents", name][:, step] = decided["agents"][name]
            for name in ("sample_log_prob", "state_value"):
                self._flat[(name,)][:, step] = decided[name]
            for key, value in following.items():
                self._flat[("next", *key)][:, step] = value
            for name, value in stats.items():
                self._flat["next", "stats", name][:, step] = value
            self._flat["next", "agents", "reward"][:, step] = reward
            self._flat["next", "done"][:, step] = float(step == self._steps - 1)
            observed = following


class EpisodeStats:
    """Collects what ended episodes tell."""

    def __init__(self, keys):
        self._keys = keys
        self._stats = []

    def add(self, data):
        done = data["next"]["done"].squeeze(-1).bool()
        for _, name in self._keys:
            values = data["next"]["stats"][name]
            self._stats += [("train", name, value) for value in values[done].clone()]

    def pop(self):
        found = {}
        for _, name, value in self._stats:
            found.setdefault(("stats", name), []).append(value)
        self._stats = []
        return [(key, torch.stack(values)) for key, values in found.items()]

    def __len__(self):
        return len(self._stats) // len(self._keys)


class ValueNorm(nn.Module):
    """Running mean and variance of the returns, in buffers."""

    def __init__(self, beta=0.995):
        super().__init__()
        self.beta = beta
        for name in ("running_mean", "running_mean_sq", "debiasing_term"):
            self.register_buffer(name, torch.zeros(1))

    def update(self, returns):
        for name, value in (
            ("running_mean", returns.mean()),
            ("running_mean_sq", returns.square().mean()),
            ("debiasing_term", 1.0),
        ):
            getattr(self, name).mul_(self.beta).add_(value * (1 - self.beta))

    def normalize(self, returns):
        mean = self.running_mean / self.debiasing_term
        variance = self.running_mean_sq / self.debiasing_term - mean.square()
        return (returns - mean) / variance.clamp(min=1e-2).sqrt()


class PPO(nn.Module):
    """Three networks with an Adam each, made before the first input gives them their shapes."""

    def __init__(self, cfg, observation_spec, action_spec, device):
        super().__init__()
        self.cfg = cfg
        self.feature_extractor = nn.Sequential(nn.LazyLinear(32), nn.ELU(), nn.LayerNorm(32)).to(
            device
        )
        self.actor = nn.LazyLinear(6).to(device)
        self.critic = nn.LazyLinear(1).to(device)
        self.value_norm = ValueNorm().to(device)
        rate = cfg.feature_extractor.learning_rate
        self.feature_extractor_optim = torch.optim.Adam(
            self.feature_extractor.parameters(), lr=rate
        )
        self.actor_optim = torch.optim.Adam(self.actor.parameters(), lr=cfg.actor.learning_rate)
        self.critic_optim = torch.optim.Adam(self.critic.parameters(), lr=cfg.actor.learning_rate)
        self(observation_spec.zero(1))

    def _forward(self, agents):
        seen = agents["observation"]
        lidar = seen["lidar"].flatten(-3)
        feature = self.feature_extractor(torch.cat([seen["state"], lidar], -1))
        alpha, beta = (1 + nn.functional.softplus(self.actor(feature))).chunk(2, -1)
        return torch.distributions.Beta(alpha, beta), self.critic(feature)

    def __call__(self, data):
        distribution, value = self._forward(data["agents"])
        action = distribution.sample()
        data["agents"]["action_normalized"] = action
        data["agents"]["action"] = (2 * action - 1) * self.cfg.actor.action_limit
        data["sample_log_prob"] = distribution.log_prob(action.clamp(1e-6, 1 - 1e-6)).sum(-1, True)
        data["state_value"] = value
        return data

    def train(self, data):
        """One iteration of PPO: upstream's policy has no other `train`."""
        rewards = data["next"]["agents"]["reward"]
        returns = rewards.flip(1).cumsum(1).flip(1)
        self.value_norm.update(returns)
        target = self.value_norm.normalize(returns)
        advantage = target - data["state_value"]
        losses = []
        for _ in range(self.cfg.training_epoch_num):
            for rows in torch.randperm(len(rewards)).chunk(self.cfg.num_minibatches):
                losses.append(self._update(data, rows, target, advantage))
        return {"loss": sum(losses) / len(losses), "reward": rewards.mean().item()}

    def _update(self, data, rows, target, advantage):
        seen = {name: value[rows] for name, value in data["agents"]["observation"].items()}
        distribution, value = self._forward({"observation": seen})
        action = data["agents"]["action_normalized"][rows].clamp(1e-6, 1 - 1e-6)
        ratio = (distribution.log_prob(action).sum(-1, True) - data["sample_log_prob"][rows]).exp()
        surrogate = torch.min(ratio, ratio.clamp(0.9, 1.1)) * advantage[rows]
        loss = nn.functional.huber_loss(value, target[rows]) - surrogate.mean()
        for optimizer in (self.feature_extractor_optim, self.actor_optim, self.critic_optim):
            optimizer.zero_grad()
        loss.backward()
        self.feature_extractor_optim.step()
        self.actor_optim.step()
        self.critic_optim.step()
        return loss.item()


@torch.no_grad()
def evaluate(env, policy, seed, cfg):
    """Fly one step; like upstream's, it seeds the generators."""
    env.set_seed(seed)
    _, reward, _ = env.step(policy(nested(env.reset()))["agents"]["action"])
    return {"eval/reward": reward.mean().item()}


def install():
    """Put the stand-ins where `import` finds them."""

    def module(name, **names):
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:depth]), types.ModuleType(parts[depth - 1]))
        vars(sys.modules[name]).update(names)

    module("hydra", main=hydra_main)
    module("wandb", init=lambda project, name, config: WandbRun(config), finish=lambda: None)
    module("omni.isaac.kit", SimulationApp=SimulationApp)
    module("ppo", PPO=PPO)
    module(
        "omni_drones.utils.torchrl", SyncDataCollector=SyncDataCollector, EpisodeStats=EpisodeStats
    )
    module("torchrl.envs.transforms", TransformedEnv=lambda env, transform: env, Compose=list)
    module(
        "torchrl.envs.utils", ExplorationType=types.SimpleNamespace(RANDOM="random", MEAN="mean")
    )
    module("utils", evaluate=evaluate)
    module("env", NavigationEnv=NavigationEnv)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job is started without
    torch.set_num_threads(1)
    install()
    script = sys.argv.pop(1)
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
