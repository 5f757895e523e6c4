"""Learn to cross the static map off-policy: SAC with a compressed replay buffer.

    python examples/sac_navigation.py                    # half an hour on two cores
    python examples/sac_navigation.py --steps 40         # a glance

128 drones fly in the simulator of `penstock train`; what they see goes into `CompressedStorage`
under a TorchRL buffer, lossless and several times smaller. Four updates follow each decision. At
the end, and now and then, the mean action crosses worlds that were not trained on.
"""

import argparse
import logging
import math
import time

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.data import TensorDictReplayBuffer

from penstock import CompressedStorage
from penstock.nav.evaluation.crossing import Outcome, fly
from penstock.nav.simulation.simulator import Observation, Simulator
from penstock.nav.simulation.task import Settings

DRONES, SLOTS, BATCH, UPDATES, GAMMA, TAU = 128, 300_000, 512, 4, 0.99, 0.005
REWARD_SCALE, WARM_UP, ENTROPY = 0.1, 40, -3.0
WORLDS = range(310_000, 310_004)
TASK = Settings(
    num_envs=DRONES,
    dynamic_obstacles=0,
    drone="fast",
    reward="shifted",
    maps=16,
    map_seed=1_000_000,
    new_map_every=6,
    crossing_share=0.7,
)
SCALE = torch.tensor([1.0, 1.0, 1.0, 0.05, 0.5, 0.5, 0.5, 0.5])


def look(obs: Observation) -> Tensor:
    """Lay an observation out as one row: lidar, state, and the distance of a near target."""
    state = obs["state"]
    near = state[:, 3:4].clamp(max=4.0) * 0.25
    return torch.cat((obs["lidar"].flatten(1) * 0.25, state * SCALE, near), 1)


def network(inputs: int, outputs: int) -> nn.Sequential:
    """Make two hidden layers with layer norm, which keeps the critics from running away."""
    layers: list[nn.Module] = []
    for size in (256, 256):
        layers += [nn.Linear(inputs, size), nn.LayerNorm(size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


class Agent(nn.Module):
    """Actor, two critics and their slow copies, and the weight of the entropy."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.actor = network(seen, 6)
        self.critics = nn.ModuleList(network(seen + 3, 1) for _ in range(2))
        self.slow = nn.ModuleList(network(seen + 3, 1) for _ in range(2))
        self.slow.load_state_dict(self.critics.state_dict())
        self.log_weight = nn.Parameter(torch.tensor(math.log(0.1)))
        with torch.no_grad():
            self.actor[-1].bias[0] = 0.5  # drift towards the goal at first

    def act(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Draw actions inside (-1, 1); return them and their log densities."""
        mean, spread = self.actor(rows).chunk(2, 1)
        spread = spread.clamp(-5.0, 1.0)
        raw = mean + spread.exp() * torch.randn_like(mean)
        action = raw.tanh()
        density = -0.5 * ((raw - mean) / spread.exp()).square() - spread - 0.919
        density = density - 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))
        return action, density.sum(1)

    def value(self, critics: nn.ModuleList, rows: Tensor, action: Tensor) -> Tensor:
        """Return what both critics say, [2, n]."""
        joined = torch.cat((rows, action), 1)
        return torch.stack([critic(joined)[:, 0] for critic in critics])


def update(agent: Agent, optimizers: list[torch.optim.Optimizer], batch: TensorDict) -> None:
    """Learn from a batch: critics, actor, entropy; then the slow critics follow."""
    rows, weight = batch["seen"], agent.log_weight.detach().exp()
    with torch.no_grad():
        action, density = agent.act(batch["next"])
        later = agent.value(agent.slow, batch["next"], action).amin(0) - weight * density
        wanted = batch["reward"] + GAMMA * later * ~batch["terminated"]
    losses = [(agent.value(agent.critics, rows, batch["action"]) - wanted).square().sum(0).mean()]
    action, density = agent.act(rows)
    best = agent.value(agent.critics, rows, action).amin(0)
    losses.append((weight * density - best).mean())
    losses.append(-(agent.log_weight.exp() * (density.detach() + ENTROPY)).mean())
    parts = [agent.critics.parameters(), agent.actor.parameters(), [agent.log_weight]]
    for loss, part, optimizer in zip(losses, parts, optimizers, strict=True):
        optimizer.zero_grad()
        loss.backward(inputs=list(part))
    for optimizer in optimizers:  # now: what the others' gradients needed must not change before
        optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(agent.slow.parameters(), agent.critics.parameters(), strict=True):
            slow.lerp_(fast, TAU)


def crossed(agent: Agent, drones: int) -> float:
    """Return the share of drones that cross unseen worlds with the mean action."""

    @torch.no_grad()
    def pilot(obs: Observation) -> Tensor:
        return 0.5 + 0.5 * agent.actor(look(obs))[:, :3].tanh()

    flights = fly(pilot, TASK, WORLDS, drones)
    return float((flights.outcome == Outcome.SUCCESS).float().mean())


def learn(steps: int, drones: int) -> None:
    """Train, and say how it goes."""
    torch.manual_seed(0)
    storage = CompressedStorage(SLOTS)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    begin = time.process_time()
    with Simulator(TASK, seed=0, threads=1) as simulator:
        rows = look(simulator.reset())
        agent = Agent(rows.shape[1])
        parts = [agent.critics.parameters(), agent.actor.parameters(), [agent.log_weight]]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(part, 3e-4) for part in parts]
        for step in range(1, steps + 1):
            with torch.no_grad():
                action = agent.act(rows)[0]
            obs, reward, terminated, _, info = simulator.step(0.5 + 0.5 * action)
            after = look(obs)
            following = after.clone()  # of drones out of time: what they saw last
            following[info.final_index] = look(info.final)
            items = {"seen": rows, "action": action, "next": following}
            items |= {"reward": REWARD_SCALE * reward, "terminated": terminated.clone()}
            buffer.extend(TensorDict(items, [DRONES]))
            rows = after
            for _ in range(UPDATES if step > WARM_UP // 2 else 0):
                update(agent, optimizers, buffer.sample())
            if step % 500 == 0 or step == steps:
                raw = len(buffer) * (2 * rows.shape[1] + 5) * 4
                print(
                    f"{step * DRONES / 1e3:6.0f} k frames, {step * UPDATES / 1e3:5.1f} k updates, "
                    f"{(time.process_time() - begin) / 60:4.1f} CPU min: "
                    f"{crossed(agent, drones):.1%} cross, buffer {storage.nbytes / 1e6:.0f} MB "
                    f"({raw / max(storage.nbytes, 1):.1f} times smaller)",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--drones", type=int, default=64, help="of each world of the test")
    words = parser.parse_args()
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    learn(words.steps, words.drones)
