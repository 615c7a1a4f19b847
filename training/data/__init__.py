"""Conversations, texts and pictures for ember-nano, all from seeds."""

from training.data.maker import REPAIR, WHOLE, batch_maker

__all__ = ["REPAIR", "WHOLE", "batch_maker"]
