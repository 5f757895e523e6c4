"""Any TorchRL environment with the right keys feeds the learner; any other is refused in a line."""

import math
import sys
from functools import cache

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase, SerialEnv

from penstock.errors import DataError, SaverClosed, UsageError
from penstock.nav.networks import Policy
from penstock.nav.ppo import PPO, PPOSettings, gae
from penstock.nav.simulation.env import NavigationEnv
from penstock.nav.simulation.simulator import Simulator
from penstock.nav.simulation.task import Settings
from penstock.nav.torchrl_collector import TorchRLCollector, check_plugin, make_plugin

SMALL = Settings(
    num_envs=8, num_obstacles=60, dynamic_obstacles=16, episode_seconds=1.0, drone="fast"
)


class UpstreamLike(EnvBase):
    """Counts: environment i ends after i + 2 steps, truncated if i is even, terminated if odd.

    With `axis`, everything of an agent has upstream's extra axis. `without` leaves out a key, and
    `shapes` gives others.
    """

    def __init__(
        self,
        count=4,
        axis=True,
        action="action",
        reward=("agents", "reward"),
        flags=("done", "terminated", "truncated"),
        without=(),
        shapes=None,
        stats=True,
        bad=math.inf,
    ):
        super().__init__(device="cpu", batch_size=[count])
        self.steps = torch.zeros(count, dtype=torch.int64)
        self.flown = []
        self.bad = bad
        self.flags = flags
        self.reward_name = reward
        self.action_name = action
        self.stats = stats
        one = (1,) if axis else ()
        self.shapes = {
            "state": (8,),
            "lidar": (1, 36, 4) if axis else (36, 4),
            "direction": (*one, 3),
            "dynamic_obstacle": (*one, 5, 10),
        } | (shapes or {})
        for name in without:
            del self.shapes[name]
        seen = {name: Unbounded((count, *shape)) for name, shape in self.shapes.items()}
        whole = {"agents": {"observation": seen}}
        if stats:
            whole["stats"] = {
                name: Unbounded((count, 1)) for name in ("return", "episode_len", "unknown")
            }
        self.observation_spec = Composite(whole, shape=(count,))
        wish = Bounded(-3, 3, (count, *one, 3)) if action != "wide" else Unbounded((count, 4))
        name = "action" if action == "wide" else action
        self.action_spec = Composite({"agents": {name: wish}}, shape=(count,))
        paid = Unbounded((count, *one, 1))
        leaf = reward if isinstance(reward, str) else {reward[1]: paid}
        tree = {reward: paid} if isinstance(reward, str) else {reward[0]: leaf}
        self.reward_spec = Composite(tree, shape=(count,))
        flag = Categorical(2, (count, 1), dtype=torch.bool)
        self.done_spec = Composite({name: flag.clone() for name in flags}, shape=(count,))

    def _look(self):
        count = len(self.steps)
        where = self.steps.float() + 100 * torch.arange(count)
        seen = {}
        for name, shape in self.shapes.items():
            seen[name] = (where / 1000).view(-1, *[1] * len(shape)).expand(count, *shape).clone()
        if "direction" in seen:
            angle = torch.arange(count) * 1.0
            axes = torch.stack((5 * angle.cos(), 5 * angle.sin(), 0 * angle), -1)
            seen["direction"] = axes.view(count, *self.shapes["direction"])
        if (self.steps >= self.bad).any():
            seen["lidar"][1] = math.nan
        found = {"agents": {"observation": seen}}
        if self.stats:
            names = ("return", "episode_len", "unknown")
            found["stats"] = {name: self.steps[:, None].float() for name in names}
        return found

    def _reset(self, tensordict=None, **_):
        mask = None if tensordict is None else tensordict.get("_reset", None)
        self.steps[slice(None) if mask is None else mask.view(-1)] = 0
        return TensorDict(self._look(), batch_size=self.batch_size)

    def _step(self, tensordict):
        self.flown.append(tensordict["agents", self.action_name].clone())
        self.steps += 1
        number = torch.arange(len(self.steps))
        ended = self.steps >= number + 2
        truncated, terminated = ended & (number % 2 == 0), ended & (number % 2 == 1)
        result = TensorDict(self._look(), batch_size=self.batch_size)
        paid = self.steps.float()
        result[self.reward_name] = paid.view(self.full_reward_spec[self.reward_name].shape)
        parts = {"done": ended, "terminated": terminated, "truncated": truncated}
        for name in self.flags:
            result[name] = parts[name][:, None].clone()
        return result

    def _set_seed(self, seed):
        self.seeded = seed


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Networks this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def policy():
    return Policy("fast", seed=1)


def own(facts):
    """The environment's statistics of a batch."""
    return {name[6:]: value for name, value in facts.items() if name.startswith("stats/")}


def take(collector, count):
    return [collector.collect() for _ in range(count)]


# ---------------------------------------------------------------------- the built-in simulator


@pytest.mark.parametrize("action", ["normalized", "velocity"])
def test_it_trains(action):
    policy = Policy("fast", seed=0)
    ppo = PPO(policy, PPOSettings.preset("fast", minibatches=4))
    order = torch.Generator().manual_seed(0)
    before = [parameter.detach().clone() for parameter in policy.encoder.trunk.parameters()]
    with TorchRLCollector(NavigationEnv(SMALL, action=action), policy, steps=8) as collector:
        for _ in range(3):
            batch = collector.collect()
            # The weights are those of the learner, after each update as well.
            flat = {name: value.flatten(0, 1) for name, value in batch.obs.items()}
            alpha, beta, value = policy(flat)
            torch.testing.assert_close(batch.value.flatten(), value, atol=1e-5, rtol=1e-4)
            density = torch.distributions.Beta(alpha, beta).log_prob(batch.action.flatten(0, 1))
            torch.testing.assert_close(
                batch.log_prob.flatten(), density.sum(-1), atol=1e-4, rtol=1e-4
            )
            stats = ppo.update(batch, order)
            assert all(map(math.isfinite, stats.values()))
    after = list(policy.encoder.trunk.parameters())
    assert all(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_it_is_the_simulator_flown_by_hand(policy):
    with TorchRLCollector(NavigationEnv(SMALL), policy, steps=7, seed=3) as collector:
        batches = take(collector, 3)
    with Simulator(SMALL, seed=3) as simulator:
        seen = simulator.reset()
        ends = 0
        for batch in batches:
            for step in range(7):
                for name, value in seen.items():
                    assert torch.equal(batch.obs[name][step], value), name
                seen, reward, terminated, truncated, info = simulator.step(batch.action[step])
                assert torch.equal(batch.reward[step], reward)
                assert torch.equal(batch.terminated[step], terminated)
                assert torch.equal(batch.truncated[step], truncated)
                final = torch.zeros(8)
                if info.final_index.numel():
                    final[info.final_index] = policy.value(info.final)
                torch.testing.assert_close(batch.final_value[step], final, atol=1e-5, rtol=1e-4)
                ends += int((terminated | truncated).sum())
            going = ~(batch.terminated[-1] | batch.truncated[-1])
            torch.testing.assert_close(
                batch.last_value[going], policy.value(seen)[going], atol=1e-5, rtol=1e-4
            )
        assert ends >= 8


def test_the_same_seed_gives_the_same_bits_and_the_global_generator_is_left_alone(policy):
    runs = []
    state = torch.get_rng_state()
    for seed in (5, 5, 6):
        with TorchRLCollector(NavigationEnv(SMALL), policy, steps=5, seed=seed) as collector:
            runs.append(take(collector, 2)[-1])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(runs[0].action, runs[1].action)
    assert torch.equal(runs[0].obs["lidar"], runs[1].obs["lidar"])
    assert not torch.equal(runs[0].action, runs[2].action)
    assert not torch.equal(runs[0].obs["state"], runs[2].obs["state"])


def test_statistics_of_the_episodes_that_ended(policy):
    with TorchRLCollector(NavigationEnv(SMALL), policy, steps=25) as collector:
        (batch,) = take(collector, 1)
        ended = batch.terminated | batch.truncated
        stats = own(batch.facts)
    assert batch.facts["train/success"] == stats["reach_goal"]
    assert set(stats) == {"episodes", "reach_goal", "collision", "return", "episode_len"}
    assert stats["episodes"] == ended.sum() >= 8
    assert 1 <= stats["episode_len"] <= 10
    crashed = float(batch.terminated.sum() / ended.sum())
    assert stats["collision"] == pytest.approx(crashed)


# ---------------------------------------------------------------------- an environment of others


@pytest.mark.parametrize("axis", [True, False])
@pytest.mark.parametrize("action", ["action", "action_normalized"])
def test_an_extra_axis_of_agents(policy, axis, action):
    env = UpstreamLike(axis=axis, action=action, reward=("agents", "reward"))
    with TorchRLCollector(env, policy, steps=6) as collector:
        (batch,) = take(collector, 1)
        flown = torch.stack(env.flown[-6:])
    assert env.is_closed
    assert env.seeded == 0
    shapes = {name: tuple(value.shape) for name, value in batch.obs.items()}
    assert shapes == {
        "state": (6, 4, 8),
        "lidar": (6, 4, 1, 36, 4),
        "direction": (6, 4, 1, 3),
        "dynamic_obstacle": (6, 4, 5, 10),
    }
    assert batch.action.shape == (6, 4, 3)
    assert batch.reward.shape == batch.truncated.shape == (6, 4)
    assert flown.shape == ((6, 4, 1, 3) if axis else (6, 4, 3))
    flown = flown.view(6, 4, 3)
    if action == "action_normalized":
        assert torch.equal(flown, batch.action)
    else:
        ahead, left, up = (4 * batch.action - 2).unbind(-1)
        angle = torch.arange(4) * 1.0
        east = ahead * angle.cos() - left * angle.sin()
        north = ahead * angle.sin() + left * angle.cos()
        torch.testing.assert_close(flown, torch.stack((east, north, up), -1))
    learner = PPO(Policy("fast"), PPOSettings.preset("fast", minibatches=2))
    assert math.isfinite(learner.update(batch, torch.Generator())["actor_loss"])


@pytest.mark.parametrize("flags", [("done", "terminated", "truncated"), ("done", "terminated")])
def test_truncation_is_bootstrapped_and_termination_is_not(policy, flags):
    # Environments 0 and 2 are cut off after 2 and 4 steps, 1 and 3 end after 3 and 5.
    with TorchRLCollector(UpstreamLike(flags=flags), policy, steps=7) as collector:
        first, second = take(collector, 2)
        stats = own(first.facts), own(second.facts)
    steps = torch.arange(1, 15)
    for number in range(4):
        ended = steps % (number + 2) == 0
        cut, over = (ended, ended & False) if number % 2 == 0 else (ended & False, ended)
        for batch, part in ((first, slice(0, 7)), (second, slice(7, 14))):
            assert torch.equal(batch.truncated[:, number], cut[part])
            assert torch.equal(batch.terminated[:, number], over[part])
            assert torch.equal(batch.reward[:, number], (((steps - 1) % (number + 2)) + 1.0)[part])

    @cache
    def worth(number, step):
        """The value of what environment `number` sees after `step` steps."""
        seen = {
            name: torch.full((1, *shape), (step + 100 * number) / 1000)
            for name, shape in (("state", [8]), ("lidar", [1, 36, 4]))
        }
        seen["dynamic_obstacle"] = torch.full((1, 5, 10), (step + 100 * number) / 1000)
        return float(policy.value(seen))

    expected = torch.zeros(7, 4)
    for number in (0, 2):
        expected[number + 1 :: number + 2, number] = worth(number, number + 2)
    torch.testing.assert_close(first.final_value, expected)
    # After 7 steps: environment 0 is at 1, environment 1 at 1, 2 at 3, 3 at 2.
    last = torch.tensor([worth(0, 1), worth(1, 1), worth(2, 3), worth(3, 2)])
    torch.testing.assert_close(first.last_value, last)
    # The advantages, by the definition: one environment and one episode at a time.
    advantage, _ = gae(
        first.reward,
        first.value,
        first.terminated,
        first.truncated,
        first.final_value,
        first.last_value,
        gamma=0.9,
        lam=0.8,
    )
    for number in range(4):
        carried = 0.0
        for step in reversed(range(7)):
            at = step % (number + 2)
            ended = at == number + 1
            after = 0.0 if ended and number % 2 else worth(number, at + 1)
            error = at + 1 + 0.9 * after - worth(number, at)
            carried = error + (0.0 if ended else 0.9 * 0.8 * carried)
            assert float(advantage[step, number]) == pytest.approx(carried, abs=1e-4)
    counts = [each["episodes"] for each in stats]
    assert sum(counts) == 7 + 4 + 3 + 2
    total = sum(each["episode_len"] * count for each, count in zip(stats, counts, strict=True))
    assert total == pytest.approx(7 * 2 + 4 * 3 + 3 * 4 + 2 * 5)
    assert all(set(each) == {"episodes", "return", "episode_len"} for each in stats)


def test_a_batch_is_not_overwritten(policy):
    with TorchRLCollector(UpstreamLike(count=1), policy, steps=1) as collector:
        first, second = take(collector, 2)
    assert first.reward.tolist() == [[1.0]]
    assert second.reward.tolist() == [[2.0]]
    assert not torch.equal(first.action, second.action)
    assert not torch.equal(first.obs["state"], second.obs["state"])


def test_without_statistics_and_with_a_plain_reward(policy):
    env = UpstreamLike(stats=False, reward="reward", axis=False)
    with TorchRLCollector(env, policy, steps=4) as collector:
        (batch,) = take(collector, 1)
        assert batch.reward[:, 3].tolist() == [1, 2, 3, 4]
        assert own(batch.facts) == {"episodes": 4.0}


def test_several_environments_in_one(policy):
    class Single(EnvBase):
        """One environment, not batched."""

        def __init__(self):
            super().__init__(batch_size=[])
            shapes = {"state": 8, "direction": (1, 3), "lidar": (1, 36, 4)}
            seen = {name: Unbounded(shape) for name, shape in shapes.items()}
            seen["dynamic_obstacle"] = Unbounded((1, 5, 10))
            self.observation_spec = Composite({"agents": {"observation": seen}})
            self.action_spec = Composite({"agents": {"action": Unbounded((1, 3))}})
            self.reward_spec = Unbounded((1,))

        def _reset(self, tensordict=None, **_):
            return self.observation_spec.zero()

        def _step(self, tensordict):
            done = torch.zeros(1, dtype=torch.bool)
            return self.observation_spec.zero().update({"reward": torch.ones(1), "done": done})

        def _set_seed(self, seed):
            pass

    with pytest.raises(UsageError, match=r"plug-in Single has batch_size \[\]; give a batch"):
        check_plugin(Single())
    with TorchRLCollector(SerialEnv(2, Single), policy, steps=3) as collector:
        (batch,) = take(collector, 1)
    assert batch.reward.tolist() == [[1, 1]] * 3


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: UpstreamLike(without=["lidar"]),
            r"has no observation \('agents', 'observation', 'lidar'\); did you mean",
        ),
        (
            lambda: UpstreamLike(without=["direction"], stats=False),
            r"has no observation \('agents', 'observation', 'direction'\)",
        ),
        (
            lambda: UpstreamLike(shapes={"lidar": (1, 72, 4)}),
            r"'lidar'\) has shape \[4, 1, 72, 4\]; give \[4, 36, 4\], with any axes of length 1",
        ),
        (
            lambda: UpstreamLike(shapes={"dynamic_obstacle": (1, 5, 8)}),
            r"'dynamic_obstacle'\) has shape \[4, 1, 5, 8\]; give \[4, 5, 10\]",
        ),
        (lambda: UpstreamLike(shapes={"state": (2, 8)}), r"\[4, 2, 8\]; give \[4, 8\]"),
        (
            lambda: UpstreamLike(action="motors"),
            r"asks for the action \('agents', 'motors'\); the policy gives "
            r"\('agents', 'action_normalized'\), from 0 to 1, and \('agents', 'action'\), in m/s",
        ),
        (lambda: UpstreamLike(action="wide"), r"'action'\) has shape \[4, 4\]; give \[4, 3\]"),
        (
            lambda: UpstreamLike(reward=("agents", "rewards")),
            r"has no reward \('agents', 'reward'\); did you mean \"\('agents', 'rewards'\)\"\?",
        ),
        (lambda: object(), r"a plug-in is a torchrl.envs.EnvBase, not a object"),
    ],
)
def test_a_bad_environment_is_refused_before_anything_starts(policy, make, message):
    env = make()
    with pytest.raises(UsageError, match=message) as caught:
        TorchRLCollector(env, policy, steps=4)
    assert "\n" not in str(caught.value)
    assert not getattr(env, "flown", [])
    assert not hasattr(env, "seeded")


def test_flags_inside_the_agents_are_refused():
    env = UpstreamLike()
    flag = Categorical(2, (4, 1), dtype=torch.bool)
    env.done_spec = Composite({"agents": {"done": flag, "terminated": flag.clone()}}, shape=(4,))
    with pytest.raises(UsageError, match=r"has no flag 'done'; use one of \('agents', 'done'\)"):
        check_plugin(env)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps is 0; give a whole number, at least 1"),
        ({"steps": 4, "action_limit": math.nan}, "action_limit is nan; give a number above 0"),
    ],
)
def test_bad_arguments(policy, options, message):
    with pytest.raises(UsageError, match=message):
        TorchRLCollector(UpstreamLike(), policy, **options)


def test_an_observation_that_is_not_finite_is_named(policy):
    env = UpstreamLike(bad=3)
    with (
        pytest.raises(DataError, match=r"observation lidar of the plug-in holds 144 values"),
        TorchRLCollector(env, policy, steps=8) as collector,
    ):
        take(collector, 1)
    assert env.is_closed


def test_what_the_environment_raises_comes_through_and_it_is_closed(policy):
    class Broken(UpstreamLike):
        def _step(self, tensordict):
            raise OSError("the simulator is gone")

    env = Broken()
    with (
        pytest.raises(OSError, match="the simulator is gone"),
        TorchRLCollector(env, policy, steps=8) as collector,
    ):
        take(collector, 1)
    assert env.is_closed


def test_closed_twice(policy):
    env = UpstreamLike()
    collector = TorchRLCollector(env, policy, steps=2)
    take(collector, 2)
    assert int(env.steps[3]) == 4
    collector.close()
    collector.close()
    assert env.is_closed
    with pytest.raises(SaverClosed, match="was closed; make a new one"):
        take(collector, 1)
    unused = TorchRLCollector(UpstreamLike(), policy, steps=2)
    unused.close()
    assert unused.env.is_closed
    with pytest.raises(SaverClosed):
        unused.collect()


# ---------------------------------------------------------------------- by name

HERE = "plugin_for_the_test"


@pytest.fixture
def module(monkeypatch, tmp_path):
    (tmp_path / f"{HERE}.py").write_text(
        "from penstock.nav.simulation.env import NavigationEnv\n"
        "from penstock.nav.simulation.task import Settings\n"
        "called = []\n"
        "def factory(**keywords):\n"
        "    called.append(keywords)\n"
        "class Forest(NavigationEnv):\n"
        "    def __init__(self, trees, num_envs=2):\n"
        "        super().__init__(Settings(num_envs=num_envs, num_obstacles=trees))\n"
    )
    (tmp_path / "plugin_that_needs.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop(HERE, None)


def test_a_plugin_by_name(module):
    env = make_plugin(f"{HERE}.Forest", {"_target_": f"{HERE}.Forest", "trees": 5, "num_envs": 3})
    assert check_plugin(env).num_envs == 3
    env.close()


@pytest.mark.parametrize(
    ("target", "config", "message"),
    [
        ("Forest", {}, "plug-in 'Forest' is not a name such as 'my_package.envs.MyEnv'"),
        ("os;system.x", {}, "'os;system.x' is not a name"),
        ("..Forest", {}, "is not a name"),
        (None, {}, "plug-in None is not a name"),
        ("no_such.module.Env", {}, "there is no module 'no_such'; install it, or name its folder"),
        (f"{HERE}.deeper.Env", {}, f"there is no module '{HERE}.deeper'"),
        ("plugin_that_needs.Env", {}, "its module needs 'a_package_that_nobody_has'; install it"),
        (f"{HERE}.Forrest", {}, f"{HERE} has no 'Forrest'; did you mean 'Forest'?"),
        ("json.Env", {}, "json has no 'Env'; the module has no environments"),
        (f"{HERE}.factory", {}, "is not a class of torchrl.envs.EnvBase; name one"),
        ("os.system", {"command": "false"}, "is not a class of torchrl.envs.EnvBase"),
        (f"{HERE}.Settings", {}, "is not a class of torchrl.envs.EnvBase"),
        (f"{HERE}.Forest", {"tree": 5}, "unexpected keyword argument 'tree'; it takes trees, num_"),
        (f"{HERE}.Forest", {}, "missing 1 required positional argument: 'trees'; it takes trees"),
    ],
)
def test_a_bad_name_is_one_line(module, target, config, message):
    with pytest.raises(UsageError) as caught:
        make_plugin(target, config)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    if HERE in sys.modules:
        assert sys.modules[HERE].called == []  # nothing but environments is called
