from __future__ import annotations

from hypothesis import HealthCheck, settings

# No example fails for its time, since others use the machine too.
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")
