"""Navigation: drones in a field of obstacles, simulated and trained without Isaac Sim.

train.py      the loop, `penstock train`; with config, ppo, networks, distributed, recorder, panel
collect.py    batches from the simulator; torchrl_collector.py from any TorchRL environment
simulation/   the world, its drones and sensors; the TorchRL environment
shield/       a filter between policy and drone
evaluation/   honest crossings of unseen worlds, their picture; `penstock evaluate`
export.py     a policy as ONNX; `penstock export`
navigator.py  such a policy that flies, without torch
"""

from __future__ import annotations

from penstock.nav.navigator import Navigator

__all__ = ["Navigator"]
