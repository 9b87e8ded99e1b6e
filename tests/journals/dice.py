"""The chance that bodies have: set by whoever runs them."""

from __future__ import annotations

import random

__all__ = ["roll", "take_dice"]

_dice = random.Random(0)


def take_dice(dice: random.Random) -> None:
    """Bodies throw these from now on."""
    global _dice
    _dice = dice


def roll(sides: int) -> int:
    """A throw, from 0."""
    return _dice.randrange(sides)
