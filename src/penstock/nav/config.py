"""Settings of a training: conf/train.yaml, a user's YAML and key=value words, checked.

The presets of the algorithm are in ppo.py, those of the reward in simulation/task.py. Every mistake
is one line, before anything starts.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch

from penstock.core.files import publish_bytes, storage_error
from penstock.errors import MissingExtra, UsageError
from penstock.nav.networks import PRESETS
from penstock.nav.ppo import PPOSettings
from penstock.nav.simulation.task import (
    PHYSICS_DT_S,
    Disturbances,
    Reward,
    Settings,
    is_number,
)
from penstock.ui.suggestions import did_you_mean

try:
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ModuleNotFoundError as error:
    raise MissingExtra("omegaconf", "rl") from error

CONF: Final = Path(__file__).parent / "conf/train.yaml"
COLLECTORS: Final = ("sync", "pipelined")
TRAINING_MAPS: Final = 1_000_000  # seeds of maps: from here for training, see evaluation for others
VALIDATION_MAPS: Final = 500_000
_CHANGED: Final = "# changed after iteration"
_WORD: Final = re.compile(r"(\+\+|\+|~)?([^=]+?)=(.*)", re.DOTALL)
_WHOLE: Final = {  # settings that are whole numbers, by the least that they may be
    0: "seed save_interval rollout_save_interval eval_interval stats_interval "
    "checkpoint_delta_every save_compression_level rollout_compression_level env.num_obstacles "
    "env.map_seed env.new_map_every env_dyn.num_obstacles",
    1: "threads eval_worlds eval_drones log_interval async_checkpoint_queue_size max_frame_num "
    "max_iterations checkpoint_keep rollout_keep env.num_envs env.maps env.max_episode_length "
    "sim.substeps algo.training_frame_num",
}
_MOST: Final = {  # and the most
    "seed": 10**9,
    "env.map_seed": 2**60,
    "save_compression_level": 16,
    "rollout_compression_level": 16,
}
_FLAGS: Final = ("headless", "tensorboard", "compress_checkpoint", "env.hold_yaw")
_OR_NULL: Final = ("max_iterations", "checkpoint_keep", "rollout_keep")
_PPO: Final = {item.name: item for item in fields(PPOSettings) if item.name != "shards"}


@dataclass(frozen=True)
class Config:
    """What is trained, checked. `raw` holds all keys as they were given."""

    raw: Mapping[str, Any]
    settings: Settings
    ppo: PPOSettings
    preset: str
    steps: int
    max_frames: int
    max_seconds: float | None
    processes: int
    shards: int
    plugin_arguments: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What is not as it was given, and why: for the user to see."""

    def __getitem__(self, name: str) -> Any:
        """Look up one of the other keys: `config["save_interval"]`, `config["wandb.mode"]`."""
        value: Any = self.raw
        for part in name.split("."):
            value = value[part]
        return value

    @property
    def frames_per_iteration(self) -> int:
        """Decisions of all drones together in one iteration."""
        return self.steps * self.settings.num_envs

    @property
    def plugin(self) -> str | None:
        """The name of another environment, or None for the built-in one."""
        target: str | None = self["env._target_"]
        return target

    def shard_settings(self, shard: int) -> Settings:
        """Return the settings of one shard's simulator: its share of drones and of maps."""
        maps = max(1, self.settings.maps // self.shards)
        return self.settings.with_(
            num_envs=self.settings.num_envs // self.shards,
            maps=maps,
            # Far apart: a shard that renews its maps must not come upon another's.
            map_seed=self.settings.map_seed + 100_000 * shard,
        )

    def to_yaml(self) -> str:
        """Return all keys, for `load_config(base=...)`."""
        return str(OmegaConf.to_yaml(as_omegaconf(self)))


def load_config(
    words: Sequence[str] = (), file: Path | str | None = None, base: Path | None = None
) -> Config:
    """Read the settings.

    Args:
        words: key=value, as on the command line.
        file: A YAML file of the user's with some of the keys.
        base: The config.yaml of a run to go on with, instead of the defaults.
    """
    pairs = [pair for pair in map(_split, words) if pair != ("backend", "backend=numba")]
    if any(key == "backend" for key, _ in pairs):
        raise UsageError("backend=… is gone: the simulator is compiled for the CPU; leave it out")
    user = _read_yaml(Path(file)) if file is not None else OmegaConf.create({})
    presets = [word.partition("=")[2] for key, word in pairs if key == "algo"]
    if isinstance(preset := OmegaConf.select(user, "algo"), str):  # a file may name it, too
        presets = [preset, *presets]
        del user["algo"]
    config = _defaults(presets[-1] if presets else "fast")
    if base is not None:
        former = _read_yaml(base)
        if not former:
            raise UsageError(f"{base} holds no settings; start a new run")
        target = OmegaConf.select(former, "env._target_")
        if target and not any(key == "env._target_" for key, _ in pairs):
            raise UsageError(  # a file must not decide what code is run
                f"{base} names another environment, {target}: give env._target_=… again to run it"
            )
        if presets:  # asked for anew
            former.pop("algo", None)
        elif preset := OmegaConf.select(former, "algo.name"):
            config = _defaults(str(preset))
        if former.pop("backend", "numba") != "numba":  # of runs before there was only one
            raise UsageError(f"{base}: backend=torch is gone; start a new run")
        config = _merged(config, former, str(base), foreign=True)
    target = OmegaConf.select(user, "env._target_") or config.env._target_
    foreign = bool(target) or any(key == "env._target_" for key, _ in pairs)
    config = _merged(config, user, str(file), foreign)
    for key, word in pairs:
        if key != "algo":
            config = _merged(config, _override(word), word, foreign)
    raw: Any = OmegaConf.to_container(config, resolve=True)
    named = {*_keys(user), *(key for key, _ in pairs)} - {"env._target_"}
    arguments = {key: raw["env"][key] for key in raw["env"] if foreign and f"env.{key}" in named}
    return _checked(raw, arguments)


def as_omegaconf(config: Config) -> DictConfig:
    """Return all keys as NavRL's own classes take them."""
    return OmegaConf.create(dict(config.raw))


def write_config(config: Config, path: Path, iteration: int = 0) -> None:
    """Write all keys to a file that appears whole or not at all.

    Over the file of a run that is gone on with, what changes after that iteration is kept as
    comments on top.
    """
    used = OmegaConf.merge(as_omegaconf(config), {"resume": None})
    history: list[str] = []
    if path.exists():
        before, now = _values(_read_yaml(path)), _values(used)
        history = [line for line in path.read_text().splitlines() if line.startswith(_CHANGED)]
        changes = [
            f"{key} {json.dumps(before[key])} -> {json.dumps(value)}"
            for key, value in now.items()
            if key in before and before[key] != value
        ]
        if changes:
            history.append(f"{_CHANGED} {iteration}: {', '.join(changes)}")
    text = "".join(f"{line}\n" for line in history) + OmegaConf.to_yaml(used)
    publish_bytes(path, text.encode())


def _defaults(preset: str) -> DictConfig:
    """Return all settings with a preset of the algorithm."""
    if preset not in PRESETS:
        raise UsageError(
            f"algo={preset!r} is no preset; {did_you_mean(preset, PRESETS)} (settings of it are "
            "algo.lr=… and so on)"
        )
    config = _read_yaml(CONF)
    settings = PPOSettings.preset(preset)
    config.algo.update({"name": preset, **{key: getattr(settings, key) for key in _PPO}})
    config.reward.update({item.name: None for item in fields(Reward)})
    return config


def help_text() -> str:
    """Return the settings with their comments."""
    text = CONF.read_text()
    reward = "".join(f"  {item.name}: null\n" for item in fields(Reward))
    text = text.replace("  # (weights)\n", reward)
    algo = ""
    settings = PPOSettings.preset("fast")
    for name, item in _PPO.items():
        value, comment = getattr(settings, name), item.metadata.get("help")
        line = f"{name}: {'null' if value is None else value}"
        algo += f"{line:<37}# {comment}\n" if comment else f"{line}\n"
    return text + textwrap.indent(algo, "  ")


def _split(word: str) -> tuple[str, str]:
    match = _WORD.fullmatch(word)
    if match is None or match[1] == "~":
        raise UsageError(f"{word!r} is not a setting; give key=value, such as env.num_envs=256")
    return match[2].strip(), f"{match[2].strip()}={match[3]}"


def _override(word: str) -> DictConfig:
    """Turn key=value into a config; the value is YAML, as Hydra reads it."""
    try:
        return OmegaConf.from_dotlist([word])
    except Exception as error:  # YAML errors of several libraries, all about this word
        raise UsageError(f"{word!r} cannot be read: {_first_line(error)}") from error


def _read_yaml(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.load(path)
    except OSError as error:
        raise storage_error("read", path, error) from error
    except Exception as error:  # YAML errors of several libraries, all about this file
        raise UsageError(f"{path} is no YAML that can be read: {_first_line(error)}") from error
    if not isinstance(loaded, DictConfig):
        raise UsageError(f"{path} holds no settings; give key: value lines")
    return loaded


def _merged(config: DictConfig, more: DictConfig, where: str, foreign: bool) -> DictConfig:
    known = set(_keys(config))
    for key in _keys(more):
        if key not in known and not (foreign and key.startswith("env.")):
            raise UsageError(f"{where}: unknown setting {key!r}; {did_you_mean(key, known)}")
    try:
        merged: Any = OmegaConf.merge(config, more)
    except OmegaConfBaseException as error:
        raise UsageError(f"{where}: {_first_line(error)}") from error
    for name in ("env", "env_dyn", "sim", "sim.noise", "sensor", "reward", "algo", "wandb"):
        if not isinstance(group := OmegaConf.select(merged, name), DictConfig):
            raise UsageError(f"{name}={group!r}; give its parts, such as {name}.…=…")
    return merged  # type: ignore[no-any-return]


def _keys(config: DictConfig, prefix: str = "") -> list[str]:
    """All keys, dotted: those with values, and the names of groups of them."""
    found = []
    for key in config:
        name = prefix + str(key)
        found.append(name)
        child = config._get_node(key)
        if isinstance(child, DictConfig) and not child._is_none():
            found += _keys(child, f"{name}.")
    return found


def _values(config: Any) -> dict[str, Any]:
    """All values by their dotted keys."""
    nodes = {key: OmegaConf.select(config, key) for key in _keys(config)}
    plain: dict[str, Any] = {
        key: OmegaConf.to_container(node) if isinstance(node, ListConfig) else node
        for key, node in nodes.items()
        if not isinstance(node, DictConfig)
    }
    return plain


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


# ---------------------------------------------------------------------- values


def _checked(raw: dict[str, Any], plugin_arguments: Mapping[str, Any]) -> Config:
    if raw["collector"] == "compressed":
        raise UsageError(
            "collector=compressed is gone: it cost time and saved nothing where a batch is used "
            "once; give collector=sync, which learns the same bits"
        )
    _check_choice("collector", raw["collector"], COLLECTORS)
    _check_device(raw["device"])
    _check_choice("wandb.mode", raw["wandb"]["mode"], ("offline", "online", "disabled"))
    if raw["env"]["map_seed"] == "auto":
        raw["env"]["map_seed"] = TRAINING_MAPS * (1 + _whole("seed", raw["seed"], 0))
    for name in _FLAGS:
        place, key = _place(raw, name)
        if place[key] not in (True, False):
            raise UsageError(f"{name}={place[key]!r}; give true or false")
    for least, names in _WHOLE.items():
        for name in names.split():
            place, key = _place(raw, name)
            if place[key] is not None or name not in _OR_NULL:
                place[key] = _whole(name, place[key], least)
    algo, envs, notes = raw["algo"], raw["env"]["num_envs"], list[str]()
    processes, shards = _processes(raw, envs, notes)
    if algo["bf16"] not in (True, False, None):
        raise UsageError(f"algo.bf16={algo['bf16']!r}; give true, false or null")
    ppo = PPOSettings.preset(algo["name"], **{key: algo[key] for key in _PPO if key in algo})
    steps = algo["training_frame_num"]
    if not raw["env"]["_target_"]:  # another environment says itself how many it is
        replace(ppo, shards=shards).check_rows(steps, envs)
    for group in ("env_dyn", "sim"):
        share = raw[group]["curriculum"]
        if not is_number(share) or not 0 <= share <= 1:
            raise UsageError(f"{group}.curriculum={share!r}; give a share from 0 to 1")
    minutes = raw["max_minutes"]
    if minutes is not None and not (is_number(minutes) and minutes > 0):
        raise UsageError(f"max_minutes={minutes!r}; give a number above 0, or null")
    settings = _settings(raw, shards)
    kinds = "there are 8 kinds, equally many of each"
    _adjust(raw["env_dyn"], "env_dyn.num_obstacles", settings.dynamic_obstacles, kinds, notes)
    why = "a multiple of the shards, at most one per drone"
    _adjust(raw["env"], "env.maps", settings.maps, why, notes)
    return Config(
        notes=tuple(notes),
        raw=raw,
        settings=settings,
        ppo=ppo,
        preset=algo["name"],
        steps=steps,
        max_frames=raw["max_frame_num"],
        max_seconds=None if minutes is None else 60.0 * minutes,
        processes=processes,
        shards=shards,
        plugin_arguments=plugin_arguments,
    )


def _settings(raw: dict[str, Any], shards: int) -> Settings:
    env, sensor, sim = raw["env"], raw["sensor"], raw["sim"]
    hres = sensor["lidar_hres"]
    if not is_number(hres) or hres <= 0 or (360 / hres) % 1:
        raise UsageError(f"sensor.lidar_hres={hres!r}; give degrees that divide 360")
    around, high = round(360 / hres), sensor["lidar_vbeams"]
    if (around, high) != (36, 4):
        raise UsageError(
            f"sensor: {around} beams around and {high} high do not fit the networks, which take 36 "
            "and 4; give lidar_hres=10 lidar_vbeams=4"
        )
    weights = {key: value for key, value in raw["reward"].items() if key != "preset"}
    reward = Reward.preset(str(raw["reward"]["preset"]))
    reward = replace(reward, **{key: value for key, value in weights.items() if value is not None})
    outer = {name: sim[name] for name in ("latency", "wind", "mass")}
    maps = max(shards, env["maps"] // shards * shards)
    return Settings(
        num_envs=env["num_envs"],
        num_obstacles=env["num_obstacles"],
        dynamic_obstacles=raw["env_dyn"]["num_obstacles"],
        substeps=sim["substeps"],
        episode_seconds=env["max_episode_length"] * PHYSICS_DT_S,
        lidar_range_m=sensor["lidar_range"],
        lidar_beams=(around, high),
        lidar_fov_deg=sensor["lidar_vfov"],
        action_limit=env["action_limit"],
        drone=env["drone"],
        hold_yaw=bool(env["hold_yaw"]),
        reward=reward,
        maps=min(maps, env["num_envs"]),
        map_seed=env["map_seed"],
        new_map_every=env["new_map_every"],
        crossing_share=env["crossing_share"],
        disturbances=Disturbances(**sim["noise"], **outer),
    )


def _adjust(group: dict[str, Any], name: str, used: int, why: str, notes: list[str]) -> None:
    """Put the count that is used in the place of the one that was given; note it."""
    key = name.rpartition(".")[2]
    if group[key] not in (used, "auto"):
        notes.append(f"{name}={group[key]} becomes {used}: {why}")
    group[key] = used


def _processes(raw: dict[str, Any], envs: int, notes: list[str]) -> tuple[int, int]:
    """How many processes train together, and in how many shards; under torchrun, its own."""
    foreign = bool(raw["env"]["_target_"])
    if "WORLD_SIZE" in os.environ:
        processes = _whole("WORLD_SIZE", os.environ["WORLD_SIZE"], 1)
    elif raw["processes"] == "auto":
        alone = raw["device"] != "cpu" or foreign
        given = raw["shards"] if raw["shards"] != "auto" else envs
        most = 1 if alone else min(os.cpu_count() or 1, 8)
        processes = next(n for n in range(most, 0, -1) if envs % n == 0 and given % n == 0)
    else:
        processes = _whole("processes", raw["processes"], 1)
    shards = processes if raw["shards"] == "auto" else _whole("shards", raw["shards"], 1)
    if foreign:
        _adjust(raw, "shards", processes, "one per process of another environment", notes)
        return processes, processes
    if shards % processes or envs % shards:
        raise UsageError(
            f"env.num_envs={envs} in {shards} shards on {processes} processes: each number must be "
            "a multiple of the next; change env.num_envs, shards or processes"
        )
    raw["shards"] = shards
    return processes, shards


def _place(raw: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """Return the group that a dotted key is in, and its name there."""
    *groups, last = name.split(".")
    for group in groups:
        raw = raw[group]
    return raw, last


def _whole(name: str, value: Any, least: int) -> int:
    """A whole number, also written as 12e8."""
    most = _MOST.get(name)
    try:
        number = float(value) if not isinstance(value, bool) else float("nan")
    except (TypeError, ValueError):
        number = float("nan")
    if not number.is_integer() or number < least or (most is not None and number > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(f"{name}={value!r}; give a whole number, {limit}")
    return int(number)


def _check_device(device: Any) -> None:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"device={device!r} is none that torch knows; give cpu or cuda") from error
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device={device!r}: this torch has no CUDA device; give device=cpu")


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UsageError(f"{name}={value!r} is unknown; {did_you_mean(str(value), choices)}")
