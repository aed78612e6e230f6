"""Load a program: a Python file with `input_fn` and `model_fn`."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from tfps_runtime.training.model import Model, Params, ProgramError, Shard


@dataclass(frozen=True)
class Program:
    """The functions of a program, as loaded from `path`."""

    path: str
    input_fn: Callable[[str, Params, Shard], Any]
    _model_fn: Callable[[Any, Any, str, Params], Any]
    serving_fn: Callable[[Params], Any] | None = None
    """Optional, for `export`: gives (inputs by name, features)."""

    def model_fn(self, features: Any, labels: Any, mode: str, params: Params) -> Model:
        """Call the program's `model_fn`. Raises ProgramError if it returns anything but a Model."""
        model = self._model_fn(features, labels, mode, params)
        if not isinstance(model, Model):
            raise ProgramError(
                f"{self.path}: model_fn returned {type(model).__name__}; "
                "return tfps_runtime.training.Model(loss=..., optimizer=...)"
            )
        return model


def load_program(path: str) -> Program:
    """Execute the file at `path` as a module and take its functions.

    Its directory comes first on `sys.path`, as with `python path`. Errors of the file itself propagate.

    Raises:
        ProgramError: the file is absent, or lacks one of the two functions.
    """
    file = Path(path).absolute()
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise ProgramError(f"{file}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    directory = str(file.parent)
    if sys.path[:1] != [directory]:
        sys.path.insert(0, directory)
    sys.modules[file.stem] = module  # dataclasses and pickle look their module up by name
    spec.loader.exec_module(module)
    for function in ("input_fn", "model_fn"):
        if not callable(getattr(module, function, None)):
            raise ProgramError(
                f"{file}: no function {function}; a program has input_fn(mode, params, shard) "
                "and model_fn(features, labels, mode, params)"
            )
    return Program(str(file), module.input_fn, module.model_fn, getattr(module, "serving_fn", None))
