"""Hypothesis profiles: `quick` for make test, `ci` for the longer runs. HYPOTHESIS_PROFILE chooses."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

__all__ = ["load", "name"]

settings.register_profile(
    "quick", max_examples=30, stateful_step_count=30, deadline=None, derandomize=True, print_blob=True
)
settings.register_profile(
    "ci",
    max_examples=300,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def name() -> str:
    """Give the name of the profile in force."""
    return os.environ.get("HYPOTHESIS_PROFILE", "quick")


def load() -> None:
    """Put the chosen profile in force."""
    settings.load_profile(name())
