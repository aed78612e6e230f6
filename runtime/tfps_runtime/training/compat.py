"""Let a script written for TensorFlow 1 say `import tensorflow as tf` and mean `tensorflow.compat.v1`.

    compat.install()
    runpy.run_path("dist_mnist.py", run_name="__main__")

What TensorFlow 2 no longer has (`tf.contrib`, `tensorflow.examples`) stays absent; a script may plant modules of those
names in `sys.modules` before it imports them.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import tensorflow.compat.v1 as tf


class _TensorFlow1(types.ModuleType):
    """Stands for the package `tensorflow`; reads its attributes from `tensorflow.compat.v1`."""

    def __getattr__(self, name: str) -> Any:
        planted = sys.modules.get(f"tensorflow.{name}")
        if planted is not None:
            return planted
        try:
            return getattr(tf, name)
        except AttributeError:
            raise AttributeError(
                f"tf.{name} is not in tensorflow.compat.v1 (TensorFlow {tf.__version__}); "
                "change the script, or plant a replacement"
            ) from None


def install() -> None:
    """Put the stand-in in the place of `tensorflow` and turn TensorFlow 2 behaviour off; idempotent.

    For a process that has not used TensorFlow yet. Submodules (`from tensorflow.python.framework import ops`) are
    found as before.
    """
    tf.disable_v2_behavior()
    real = sys.modules["tensorflow"]
    if isinstance(real, _TensorFlow1):
        return
    stand_in = _TensorFlow1("tensorflow", tf.__doc__)
    stand_in.__path__ = real.__path__
    stand_in.__spec__ = real.__spec__
    stand_in.__file__ = real.__file__
    sys.modules["tensorflow"] = stand_in
