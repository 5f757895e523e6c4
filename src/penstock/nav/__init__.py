"""Navigation: drones in a field of obstacles, simulated and trained without Isaac Sim.

simulation/  the world, its drones and sensors, by two back ends; the TorchRL environment
learning/    the policy and PPO
shield/      a filter between policy and drone
training/    settings, collection, the loop, its live panel; `penstock train`
evaluation/  honest crossings of unseen worlds, their picture; `penstock evaluate`
export.py    a policy as ONNX; `penstock export`
navigator.py such a policy that flies, without torch
"""

from __future__ import annotations

from penstock.nav.navigator import Navigator

__all__ = ["Navigator"]
