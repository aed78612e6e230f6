"""Let a script written for TensorFlow 1 say `import tensorflow as tf` and mean `tensorflow.compat.v1`.

    compat.install()
    runpy.run_path("dist_mnist.py", run_name="__main__")

With it come the pieces of `tf.contrib` in `contrib`, `tensorflow.examples.tutorials.mnist.input_data` (`mnist`), and
`tf.layers` and `tf.nn.rnn_cell`, which TensorFlow still has but hides from users of Keras 3. Whatever else is gone
fails by name, with its replacement where one is known. A script may plant modules of its own in `sys.modules` before
it imports them.

Three defaults differ from TensorFlow's own, which make a short training miss a worker or its end (see `Supervisor`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import logging
import os
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

import tensorflow.compat.v1 as tf
from tensorflow.python.layers import layers as legacy_layers
from tensorflow.python.ops import rnn_cell

from tfps_runtime.training import contrib, mnist

RECOVERY_WAIT_SECS = 0.5
"""Between two looks of a worker for the chief's initialisation; stock: 30 s, so that it misses a short training."""
STOP_GRACE_SECS = 2.0
"""For threads at the end; stock: 120 s, all of which a chief in sync mode waits, blocked in its queue runner."""

_PROGRAM = "a program with model_fn and input_fn for the training harness (docs/jobs.md)"
_REPLACEMENTS = {
    "contrib.cluster_resolver": "json.loads(os.environ['TF_CONFIG'])['cluster']",
    "contrib.data": "tf.data",
    "contrib.distribute": "tf.distribute",
    "contrib.estimator": _PROGRAM,
    "contrib.framework.arg_scope": "arguments at each call",
    "contrib.framework.init_from_checkpoint": "tf.train.init_from_checkpoint",
    "contrib.framework.list_variables": "tf.train.list_variables",
    "contrib.framework.load_variable": "tf.train.load_variable",
    "contrib.framework.nest": "tf.nest",
    "contrib.layers.batch_norm": "tf.nn.batch_normalization",
    "contrib.layers.embed_sequence": "tf.nn.embedding_lookup",
    "contrib.layers.one_hot_encoding": "tf.one_hot",
    "contrib.layers.optimize_loss": "an optimizer's minimize()",
    "contrib.layers.softmax": "tf.nn.softmax",
    "contrib.learn": _PROGRAM,
    "contrib.lookup": "tf.lookup",
    "contrib.losses": "tf.losses",
    "contrib.metrics": "tf.metrics",
    "contrib.saved_model": "tf.saved_model",
    "contrib.slim": "the package tf_slim",
    "contrib.staging": "tf.data with prefetch()",
    "contrib.summary": "tf.summary",
    "contrib.tpu": "tf.distribute",
    "contrib.training.HParams": "argparse.Namespace",
    "contrib.util.make_tensor_proto": "tf.make_tensor_proto",
    "estimator": _PROGRAM,
    "layers.batch_normalization": "tf.nn.batch_normalization",
    # What TensorFlow 1.0 dropped, too.
    "batch_matmul": "tf.matmul",
    "histogram_summary": "tf.summary.histogram",
    "image_summary": "tf.summary.image",
    "merge_all_summaries": "tf.summary.merge_all",
    "merge_summary": "tf.summary.merge",
    "mul": "tf.multiply",
    "neg": "tf.negative",
    "pack": "tf.stack",
    "scalar_summary": "tf.summary.scalar",
    "select": "tf.where",
    "sub": "tf.subtract",
    "train.SummaryWriter": "tf.summary.FileWriter",
    "unpack": "tf.unstack",
}
"""What is gone -> what does the same now. A name stands for all below it."""


class Supervisor(tf.train.Supervisor):  # type: ignore[misc]  # TensorFlow is untyped
    """TensorFlow's, with defaults for short trainings, and for synchronous ones.

    Stock, a worker that looks for the chief's initialisation too early looks again after 30 s; and a synchronous chief
    waits 120 s at the end for its queue runner, which is blocked, and then fails. One that closes its session before
    it stops, as `with supervisor.prepare_or_wait_for_session(…)` does, cancels that thread's step: no failure here.
    """

    def __init__(
        self,
        *args: Any,
        recovery_wait_secs: float = RECOVERY_WAIT_SECS,
        stop_grace_secs: float = STOP_GRACE_SECS,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *args, recovery_wait_secs=recovery_wait_secs, stop_grace_secs=stop_grace_secs, **kwargs
        )
        ends = (tf.errors.OutOfRangeError, tf.errors.CancelledError)
        self._coord = tf.train.Coordinator(clean_stop_exception_types=ends)

    def stop(
        self, threads: Any = None, close_summary_writer: bool = True, ignore_live_threads: bool = True
    ) -> None:
        super().stop(threads, close_summary_writer, ignore_live_threads)


class SessionManager(tf.train.SessionManager):  # type: ignore[misc]  # TensorFlow is untyped
    """TensorFlow's; workers look for the chief's initialisation as often as a `Supervisor`'s do."""

    def __init__(self, *args: Any, recovery_wait_secs: float = RECOVERY_WAIT_SECS, **kwargs: Any) -> None:
        super().__init__(*args, recovery_wait_secs=recovery_wait_secs, **kwargs)


class SyncReplicasOptimizer(tf.train.SyncReplicasOptimizer):  # type: ignore[misc]  # TensorFlow is untyped
    """TensorFlow's; takes the `replica_id` that it took until 1.0, and needs it as little."""

    def __init__(self, *args: Any, replica_id: Any = None, **kwargs: Any) -> None:
        del replica_id
        super().__init__(*args, **kwargs)


_monitored_training_session = tf.train.MonitoredTrainingSession


@functools.wraps(_monitored_training_session)
def monitored_training_session(*args: Any, **kwargs: Any) -> Any:
    """TensorFlow's, with a short grace at the end; see `Supervisor`."""
    kwargs.setdefault("stop_grace_period_secs", STOP_GRACE_SECS)
    return _monitored_training_session(*args, **kwargs)


def gone(name: str) -> str:
    """What to tell of a name that is not there, `contrib.slim` say: its replacement, or that none is known."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        replacement = _REPLACEMENTS.get(".".join(parts[:end]))
        if replacement is not None:
            instead = f"use {replacement}"
            break
    else:
        instead = "no replacement is known: change the script, or plant a module of that name in sys.modules"
    return f"tf.{name} is not there in TensorFlow {tf.__version__}; {instead}"


class _Package(types.ModuleType):
    """A module, or the stand-in for a package, that tells what is gone by name.

    It is a package for the import system even when it has no files, so that `from … import` asks our finder.
    """

    def __init__(self, name: str, content: Mapping[str, Any], behind: Any = None) -> None:
        super().__init__(name)
        self.__path__: Any = []
        self.__dict__.update(content)
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        planted = sys.modules.get(f"{self.__name__}.{name}")
        if planted is not None:
            return planted
        if self._behind is not None:
            with contextlib.suppress(AttributeError):
                return getattr(self._behind, name)
        raise AttributeError(gone(f"{self.__name__}.{name}".partition(".")[2]))


class _Finder(importlib.abc.MetaPathFinder):
    """Refuses `import tensorflow.contrib.slim` and the like with our words."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        del path, target
        if fullname.startswith(("tensorflow.contrib.", "tensorflow.examples.")):
            raise ImportError(gone(fullname.partition(".")[2]), name=fullname)


def install() -> None:
    """Put the stand-in in the place of `tensorflow` and turn TensorFlow 2 behaviour off; idempotent.

    For a process that has not used TensorFlow yet. Submodules (`from tensorflow.python.framework import ops`) are
    found as before.
    """
    _silence()
    tf.disable_v2_behavior()
    _replace_defaults()
    real = sys.modules["tensorflow"]
    if isinstance(real, _Package):
        return
    layers = tf.layers if os.environ.get("TF_USE_LEGACY_KERAS") else legacy_layers
    content = {
        "layers": _Package("tensorflow.layers", {}, layers),
        "nn": _Package("tensorflow.nn", {"rnn_cell": rnn_cell}, tf.nn),
        "train": _Package("tensorflow.train", {}, tf.train),
    }
    stand_in = _Package("tensorflow", content, tf)
    stand_in.__path__ = real.__path__
    stand_in.__spec__ = real.__spec__
    stand_in.__file__ = real.__file__
    stand_in.__doc__ = real.__doc__
    sys.modules["tensorflow"] = stand_in
    tutorials = "examples.tutorials"
    packages: Mapping[str, Mapping[str, Any]] = {
        "contrib": {},
        **{f"contrib.{name}": names for name, names in contrib.PARTS.items()},
        "examples": {},
        tutorials: {},
        f"{tutorials}.mnist": {},
        f"{tutorials}.mnist.input_data": {
            name: getattr(mnist, name) for name in ("DataSet", "Datasets", "read_data_sets")
        },
    }
    for name, names in packages.items():
        sys.modules.setdefault(f"tensorflow.{name}", _Package(f"tensorflow.{name}", names))
    sys.meta_path.insert(0, _Finder())


def _replace_defaults() -> None:
    """Also for scripts that say `tensorflow.compat.v1`, and for what TensorFlow makes for them."""
    tf.train.Supervisor = Supervisor
    tf.train.SyncReplicasOptimizer = SyncReplicasOptimizer
    tf.train.MonitoredTrainingSession = monitored_training_session
    sys.modules[SessionManager.__mro__[1].__module__].SessionManager = SessionManager  # type: ignore[attr-defined]
    tf.train.SessionManager = SessionManager


def _silence() -> None:
    """Keep out of the log that nearly every name of TensorFlow 1 is deprecated, and every line's second copy.

    TensorFlow's logger has a handler, and `tf.app.run` gives absl's to the root logger.
    """
    warnings.filterwarnings("ignore", category=UserWarning, module=r"tensorflow\.python\.")
    logger = tf.get_logger()
    logger.propagate = False
    if not any(isinstance(one, _NoDeprecations) for one in logger.filters):
        logger.addFilter(_NoDeprecations())


class _NoDeprecations(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        text = str(record.msg)
        return "deprecated" not in text and "not supported in the long term" not in text
