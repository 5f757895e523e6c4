"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long it takes to make an example says something about the machine, not about the code.
settings.register_profile("penstock", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("penstock")
