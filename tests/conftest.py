"""Hypothesis tries more where the command line says so: `--hypothesis-profile fuzz`."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fuzz", max_examples=10_000, deadline=None)
