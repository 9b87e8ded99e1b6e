"""Workflows of our own and generated ones, killed at every commit by `replaykit.testing.crash_everywhere`."""
