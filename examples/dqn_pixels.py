"""Learn to catch a ball from pictures: DQN with a compressed replay buffer, beside a plain one.

    python examples/dqn_pixels.py                      # two minutes on two cores
    python examples/dqn_pixels.py --iterations 200     # a glance

The game: a ball falls through 84 x 84 pictures, drifting; the paddle at the bottom has to be there.
Two pictures make an observation. The same loop runs with `CompressedStorage` and with TorchRL's
`LazyTensorStorage`: the samples, and so the learning, are the same; memory and speed are printed.
"""

import argparse
import logging
import time

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from penstock import CompressedStorage

GRID, SCALE, PLAYERS, ACTIONS = 12, 7, 16, 3
SLOTS, BATCH, GAMMA = 20_000, 64, 0.9


class Catch:
    """Sixteen games at once, each begun anew when its ball is down."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)
        shade = torch.arange(GRID * SCALE) // 12 % 2 * 20 + 30  # a wall behind, in stripes
        self.wall = shade.to(torch.uint8).expand(GRID * SCALE, -1)
        self.ball, self.drift, self.paddle = torch.zeros(3, PLAYERS, 2, dtype=torch.long)
        self.begin(torch.ones(PLAYERS, dtype=torch.bool))
        self.seen = self.picture()

    def begin(self, which: Tensor) -> None:
        """Throw new balls."""
        count = int(which.sum())
        draw = torch.randint(0, GRID, (3, count), generator=self.random)
        self.ball[which] = torch.stack([torch.zeros_like(draw[0]), draw[0]], dim=1)
        self.drift[which] = torch.stack([torch.ones_like(draw[0]), draw[1] % 3 - 1], dim=1)
        self.paddle[which] = torch.stack([torch.full_like(draw[0], GRID - 1), draw[2]], dim=1)

    def picture(self) -> Tensor:
        """Draw all games."""
        pictures = self.wall.expand(PLAYERS, -1, -1).clone()
        for player in range(PLAYERS):
            row, column = (self.ball[player] * SCALE).tolist()
            pictures[player, row : row + SCALE, column : column + SCALE] = 255
            row, column = (self.paddle[player] * SCALE).tolist()
            pictures[player, row:, max(0, column - SCALE) : column + 2 * SCALE] = 180
        return pictures

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move the paddles; return the observations, the rewards, and which games are over."""
        self.paddle[:, 1] = (self.paddle[:, 1] + action - 1).clamp(0, GRID - 1)
        self.ball += self.drift
        self.drift[(self.ball[:, 1] <= 0) | (self.ball[:, 1] >= GRID - 1), 1] *= -1
        self.ball[:, 1].clamp_(0, GRID - 1)
        done = self.ball[:, 0] == GRID - 1
        caught = (self.ball[:, 1] - self.paddle[:, 1]).abs() <= 1
        reward = torch.where(done, torch.where(caught, 1.0, -1.0), 0.0)
        before, self.seen = self.seen, self.picture()
        pixels = torch.stack([before, self.seen], dim=1)
        if done.any():
            self.begin(done)
            self.seen = self.picture()
        return pixels, reward, done


def network() -> nn.Module:
    """Make a network that gives the value of each action."""
    return nn.Sequential(
        *(nn.Conv2d(2, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(32 * 81, 128), nn.ReLU(), nn.Linear(128, ACTIONS)),
    )


def values(net: nn.Module, pixels: Tensor) -> Tensor:
    """Return the values of the actions."""
    return net(pixels.float() / 255)


def learn(storage: LazyTensorStorage, iterations: int) -> tuple[float, float, float]:
    """Train; return the share of balls caught lately, frames per second, and the buffer's bytes."""
    torch.manual_seed(0)
    net, target, game = network(), network(), Catch(0)
    target.load_state_dict(net.state_dict())
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    buffer = TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    pixels = torch.stack([game.seen, game.seen], dim=1)
    results, begin = [], time.perf_counter()
    for iteration in range(iterations):
        with torch.no_grad():
            action = values(net, pixels).argmax(1)
        explore = max(0.05, 1 - 2 * iteration / iterations)
        action = torch.where(torch.rand(PLAYERS) < explore, torch.randint(0, 3, (PLAYERS,)), action)
        seen, reward, done = game.step(action)
        items = {"pixels": pixels, "action": action, "next": {"pixels": seen, "reward": reward}}
        buffer.extend(TensorDict({**items, "done": done}, [PLAYERS]))
        pixels = torch.where(done[:, None, None, None], game.seen[:, None].expand_as(seen), seen)
        results += (reward[done] > 0).tolist()

        batch = buffer.sample()
        with torch.no_grad():
            later = values(target, batch["next", "pixels"]).max(1).values
        wanted = batch["next", "reward"] + GAMMA * later * ~batch["done"]
        guess = values(net, batch["pixels"]).gather(1, batch["action"][:, None])[:, 0]
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(guess, wanted).backward()
        optimizer.step()
        if iteration % 50 == 0:
            target.load_state_dict(net.state_dict())
        if iteration % 500 == 499:
            print(f"{iteration + 1:6d}: {sum(results[-500:]) / len(results[-500:]):4.0%} caught")
    frames = iterations * PLAYERS / (time.perf_counter() - begin)
    held = (
        storage.nbytes if hasattr(storage, "nbytes") else storage[:].bytes() / len(storage) * SLOTS
    )
    return sum(results[-500:]) / len(results[-500:]), frames, held


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=2000)
    iterations = parser.parse_args().iterations
    logging.getLogger("torchrl").setLevel(logging.ERROR)
    for kind in (CompressedStorage, LazyTensorStorage):
        print(kind.__name__)
        caught, frames, held = learn(kind(SLOTS), iterations)
        print(f"  {caught:.0%} caught, {frames:.0f} frames/s, buffer of {held / 1e6:.1f} MB")
