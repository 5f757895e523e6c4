"""The safety shield: a filter between the policy and the drone."""

from __future__ import annotations

from penstock.nav.shield.shield import Shield, ShieldSettings

__all__ = ["Shield", "ShieldSettings"]
