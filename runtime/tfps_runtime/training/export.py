"""Export a checkpoint as a SavedModel, to be served without this package.

    export("ctr.py", "/data/ckpt/model.ckpt-1000", "/srv/ctr/1", hparams)
    tf.saved_model.load("/srv/ctr/1").signatures["serving_default"](ids=...)        # TensorFlow 2, elsewhere

The signature's inputs are the features by their names (`features` if there is but one tensor), its outputs the model's
predictions by theirs (`predictions`). The leading dimension of every input is open. A program may have a function
`serving_fn(params)` that returns `(inputs, features)`: placeholders by name, and the features made of them, such as
parsed from serialised examples. Without one the inputs look like the features of the program's input.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow.compat.v1 as tf

from tfps_runtime.training.evaluation import begin, input_to_predict, restore
from tfps_runtime.training.inputs import Batches, build_batches
from tfps_runtime.training.model import PREDICT, Params, ProgramError
from tfps_runtime.training.program import Program


def export(
    program: str | Program,
    checkpoint: str,
    directory: str,
    hparams: Mapping[str, Any] | None = None,
    inputs: Mapping[str, str] | None = None,
    *,
    seed: int = 0,
) -> str:
    """Write the model with a checkpoint's values, or their moving averages, to a new directory, and give its path.

    The directory appears complete or not at all.

    Args:
        program: path of the program, or a loaded one.
        checkpoint: prefix of the checkpoint.
        directory: must not exist.
        hparams: as in training.
        inputs: name -> local path; what the program's input needs, if that is asked for the features' form.
        seed: for that input.

    Raises:
        ProgramError: the directory exists, no such checkpoint, it does not fit the model, or there are no predictions.
    """
    program, params = begin(program, checkpoint, hparams, inputs)
    if os.path.lexists(directory):
        raise ProgramError(f"{directory} exists already; a SavedModel is written to a directory of its own")
    structure = None if program.serving_fn is not None else _features_of(program, params, seed)
    with tf.Graph().as_default():
        if program.serving_fn is not None:
            receivers, features = program.serving_fn(params)
        else:
            features = tf.nest.map_structure(_placeholder, structure)
            receivers = _named(features, "features")
        found = restore(program, checkpoint, Batches(features, None), PREDICT, params)
        with contextlib.closing(found.session):
            _write(found.session, directory, receivers, _named(found.model.predictions, "predictions"))
    return directory


def _features_of(program: Program, params: Params, seed: int) -> Any:
    """(type, shape, is sparse) of each feature, in the structure of the features; the graph of the input is dropped."""
    with tf.Graph().as_default():
        features = build_batches(input_to_predict(program, params, seed)).features
        return tf.nest.map_structure(_Form, features)


class _Form:
    """What a tensor looks like. No tuple: that would be taken for a structure."""

    def __init__(self, tensor: Any) -> None:
        shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
        self.shape = shape if not shape else [None, *shape[1:]]
        self.dtype = tensor.dtype.base_dtype
        self.is_sparse = isinstance(tensor, tf.SparseTensor)


def _placeholder(form: _Form) -> Any:
    if form.is_sparse:
        return tf.sparse_placeholder(form.dtype, form.shape)
    return tf.placeholder(form.dtype, form.shape)


def _named(structure: Any, alone: str) -> dict[str, Any]:
    """Tensors by name: their keys, with `/` between those of nested dicts."""
    if not isinstance(structure, (Mapping, list, tuple)):
        return {alone: structure}
    pairs = structure.items() if isinstance(structure, Mapping) else enumerate(structure)
    found: dict[str, Any] = {}
    for key, value in pairs:
        is_leaf = not isinstance(value, (Mapping, list, tuple))
        deeper = (
            {str(key): value} if is_leaf else {f"{key}/{name}": t for name, t in _named(value, "").items()}
        )
        found.update(deeper)
    return found


def _write(session: Any, directory: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    path = Path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.parent / f".{path.name}.{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        builder = tf.saved_model.Builder(str(partial))
        signature = tf.saved_model.predict_signature_def(dict(inputs), dict(outputs))
        builder.add_meta_graph_and_variables(
            session,
            [tf.saved_model.tag_constants.SERVING],
            signature_def_map={
                tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY: signature
            },
            assets_collection=tf.get_collection(tf.GraphKeys.ASSET_FILEPATHS),
            main_op=tf.tables_initializer(),
            clear_devices=True,
        )
        builder.save()
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
