"""Save the whole training state without stopping the training, and go on after a crash.

Run: python examples/save_checkpoints.py      (and again: it goes on where it was)
"""

from pathlib import Path

import torch

from penstock import AsyncCheckpointSaver, load_checkpoint, rng_state, set_rng_state

STEPS = 60
net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

first = 0
if Path("run/latest").exists():
    state = load_checkpoint("run")  # the newest that is whole; every byte is verified
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    set_rng_state(state["rng"])
    first = state["step"]
    print(f"going on after step {first}")

# Hand over every optimizer: what they own is copied in the background, before their next step.
with AsyncCheckpointSaver("run", optimizers=[optimizer], keep_last=3, delta_every=5) as saver:
    for step in range(first + 1, first + STEPS + 1):
        inputs = torch.randn(256, 64)
        loss = (net(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            saver.save_async({**state, "rng": rng_state()}, f"ckpt_{step:06d}.pt")
stats = saver.get_stats()
print(f"step {step}, loss {loss:.3f}, {stats['total_saved']} saved, the last: {stats['last_path']}")
print(f"the training was held up {1e3 * stats['blocked']['call']['p50']:.2f} ms per save")
