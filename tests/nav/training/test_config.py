"""Settings: what is accepted, and what is said of what is not."""

from __future__ import annotations

import re

import pytest

from penstock.errors import UsageError
from penstock.nav.config import help_text, load_config, write_config


def test_the_keys_of_the_seeds_are_all_there():
    config = load_config(
        [
            "headless=True",
            "env.num_envs=1024",
            "env.num_obstacles=350",
            "env_dyn.num_obstacles=80",
            "wandb.mode=offline",
            "max_frame_num=12e8",
            "save_interval=1000",
            "eval_interval=1000",
            "compress_checkpoint=True",
            "async_checkpoint_queue_size=3",
            "save_compression_level=9",
            "rollout_save_interval=100",
            "sensor.lidar_range=4.0",
            "sensor.lidar_vfov=[-10,20]",
            "algo.training_frame_num=32",
        ]
    )
    assert config.max_frames == 1_200_000_000
    assert config.settings.num_envs == 1024
    assert config.settings.lidar_beams == (36, 4)
    assert config["save_compression_level"] == 9


def test_every_key_has_a_comment():
    lines = [line for line in help_text().splitlines() if re.match(r" *\w+: *[^ #|]", line)]
    uncommented = [line for line in lines if "#" not in line]
    # Weights of the reward are explained together, other keys explain themselves.
    own = {"velocity", "constant", "static", "dynamic", "smoothness", "height", "collision", "goal"}
    own |= {"relative", "goal_ends", "lidar_vbeams", "name", "gamma", "lam", "epochs"}
    own |= {"minibatches", "clip", "actor_weight", "critic_weight", "entropy_weight"}
    own |= {"max_grad_norm", "lr", "critic_lr", "value_norm_beta", "tensorboard", "project"}
    own |= {"eval_worlds"}
    assert {line.split(":")[0].strip() for line in uncommented} <= own
    assert len(lines) > 50


def test_presets_change_the_algorithm():
    assert load_config(["algo=navrl"]).ppo.minibatches == 16
    assert load_config([]).ppo.minibatches == 8
    assert load_config(["algo=navrl", "algo.lr=2e-4"]).ppo.lr == 2e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["env.num_env=3"], "unknown setting 'env.num_env'; did you mean 'env.num_envs'"),
        (["num_envs=3"], "unknown setting 'num_envs'"),
        (["algo=nav"], "algo='nav' is no preset; did you mean 'navrl'"),
        (["algo.learning_rate=1"], "unknown setting 'algo.learning_rate'"),
        (["algo.lr=fast"], "lr is 'fast'; give a number above 0"),
        (["algo.gamma=2"], "gamma is 2"),
        (["env.num_envs=0"], "env.num_envs=0; give a whole number, at least 1"),
        (["env.num_envs=1.5"], "env.num_envs=1.5"),
        (["env.max_episode_length=0"], "env.max_episode_length=0; give a whole number, at least 1"),
        (["env.maps=0"], "env.maps=0; give a whole number, at least 1"),
        (["env.num_envs=many"], "env.num_envs='many'"),
        (["env.num_obstacles=-1"], "env.num_obstacles=-1"),
        (["backend=torch"], "backend=… is gone"),
        (["sim.noise=1"], "sim.noise=1; give its parts"),
        (["sim.latency=0.5"], "latency is 0.5; give a whole number"),
        (["sim.noise.dropout=2"], "dropout is 2; give a number, 0 to 1"),
        (["sim.curriculum=2"], "sim.curriculum=2"),
        (["collector=async"], "collector='async' is unknown"),
        (["collector=compressed"], "collector=compressed is gone: it cost time"),
        (["wandb.mode=onlin"], "wandb.mode='onlin' is unknown; did you mean 'online'"),
        (["env.drone=mavic"], "drone='mavic' is unknown"),
        (["reward.preset=shift"], "reward='shift' is not a preset; did you mean 'shifted'"),
        (["env.num_envs=10", "processes=4"], "change env.num_envs, shards or processes"),
        (["algo.minibatches=7"], "minibatches=7 does not divide"),
        (["sim.substeps=0"], "sim.substeps=0"),
        (["env=3"], "env=3; give its parts"),
        (["nonsense"], "'nonsense' is not a setting"),
        (["env.num_envs=[1"], "cannot be read"),
        (["max_minutes=-1"], "max_minutes=-1"),
        (["save_compression_level=17"], "from 0 to 16"),
        (["env_dyn.curriculum=2"], "env_dyn.curriculum=2"),
        (["sensor.lidar_vbeams=8"], "36 beams around and 8 high do not fit the networks"),
        (["sensor.lidar_hres=7"], "sensor.lidar_hres=7; give degrees that divide 360"),
        (["device=gpu"], "device='gpu' is none that torch knows"),
        (["algo.bf16=maybe"], "algo.bf16='maybe'"),
        (["reward.velocity=fast"], "reward.velocity='fast'; give a number"),
        (["reward.velocity=.nan"], "reward.velocity=nan; give a number"),
        (["reward.goal=true"], "reward.goal=True; give a number"),
        (["reward.goal_ends=7"], "reward.goal_ends=7; give true or false"),
        (["seed=1e18"], "seed=1e+18; give a whole number, from 0 to"),
        (["env.map_seed=1e30"], "env.map_seed=1e+30; give a whole number, from 0 to"),
        (["env.action_limit=true"], "action_limit is True; give a number above 0"),
        (["env.hold_yaw=maybe"], "env.hold_yaw='maybe'; give true or false"),
        (["tensorboard=maybe"], "tensorboard='maybe'; give true or false"),
        (["max_minutes=true"], "max_minutes=True; give a number"),
        (["max_minutes=.inf"], "max_minutes=inf; give a number"),
        (["env_dyn.curriculum=true"], "env_dyn.curriculum=True; give a share"),
    ],
)
def test_what_is_wrong_is_one_line(words, message):
    with pytest.raises(UsageError, match=re.escape(message)) as raised:
        load_config(words)
    assert "\n" not in str(raised.value)


def test_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("algo: navrl\nenv:\n  num_envs: 64\nseed: 3\n")
    config = load_config(["seed=4"], path)
    assert (config.preset, config.settings.num_envs, config["seed"]) == ("navrl", 64, 4)
    path.write_text("env:\n  num_env: 64\n")
    with pytest.raises(UsageError, match=r"mine.yaml: unknown setting 'env.num_env'"):
        load_config([], path)
    path.write_text("- a list\n")
    with pytest.raises(UsageError, match="holds no settings"):
        load_config([], path)


def test_a_written_config_is_read_back(tmp_path):
    config = load_config(["env.num_envs=64", "algo=navrl", "algo.clip=0.3"])
    write_config(config, tmp_path / "config.yaml")
    again = load_config(["seed=1"], base=tmp_path / "config.yaml")
    assert again.settings.num_envs == 64
    assert again.ppo == config.ppo
    assert again.preset == "navrl"
    assert again["seed"] == 1


def test_another_environment_takes_its_own_keys(tmp_path):
    config = load_config(["env._target_=my.Env", "env.num_envs=64", "env.scene=forest"])
    assert config.plugin == "my.Env"
    assert config.plugin_arguments == {"num_envs": 64, "scene": "forest"}
    # A file of a run must not decide what code is run.
    write_config(config, tmp_path / "config.yaml")
    with pytest.raises(UsageError, match=r"give env\._target_=… again"):
        load_config([], base=tmp_path / "config.yaml")


def test_shards_share_drones_and_maps_out():
    config = load_config(["env.num_envs=64", "env.maps=4", "processes=1", "shards=2", "seed=2"])
    first, second = config.shard_settings(0), config.shard_settings(1)
    assert first.num_envs == second.num_envs == 32
    assert first.maps == second.maps == 2
    assert abs(first.map_seed - second.map_seed) > 1000
    assert min(first.map_seed, second.map_seed) >= 1_000_000


@pytest.mark.parametrize(
    ("text", "message"), [("env: 3\n", "env=3; give its parts"), ("", "holds no settings")]
)
def test_a_damaged_config_of_a_run_is_one_line(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_config(["seed=1"], base=path)


def test_drones_that_do_not_fly_are_not_counted():
    """Another environment has its own number: the built-in one's says nothing of it."""
    words = ["env._target_=my.Env", "algo.training_frame_num=32"]
    assert load_config([*words, "algo.minibatches=7"]).ppo.minibatches == 7
    config = load_config([*words, "processes=3", "shards=6"])
    assert config.processes == config.shards == config["shards"] == 3  # its states are per process
    assert any("shards=6 becomes 3" in note for note in config.notes)
