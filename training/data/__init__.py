"""Conversations, texts and pictures for ember-nano, all from seeds."""

from training.data.maker import batch_maker

__all__ = ["batch_maker"]
