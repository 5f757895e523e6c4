"""Any TorchRL environment as a source of batches."""

from __future__ import annotations

from penstock.nav.learning.policy import Policy
from penstock.nav.training.config import Config
from penstock.nav.training.sources import Source


def make_plugin_source(config: Config, policy: Policy, seed: int) -> Source:
    raise NotImplementedError
