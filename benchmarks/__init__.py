"""Measures replaykit beside the driver's own limit and its peers, on one server, in one run."""
