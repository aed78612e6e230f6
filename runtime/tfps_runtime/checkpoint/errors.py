"""What the reader raises."""

from __future__ import annotations


class CheckpointError(Exception):
    """These bytes are not what TensorFlow writes, or not all of it; the message says what is wrong with them."""
