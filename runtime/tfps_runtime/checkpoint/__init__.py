"""TensorFlow's checkpoints without TensorFlow: which are complete, what is in them, whether it is what was written.

Standard library only, Python 3.9. Everything raises CheckpointError, and nothing else, for bytes that make no sense.

    latest_checkpoint("/data/ckpt")                             # Checkpoint(prefix, global_step, size, time) or None
    read_index("/data/ckpt/model.ckpt-1200").tensors["w"]       # Tensor(name, dtype, shape, shard, offset, size, …)
    verify("/data/ckpt/model.ckpt-1200")                        # every CRC-32C
"""

from __future__ import annotations

from tfps_runtime.checkpoint.bundle import (
    MAX_INDEX_BYTES as MAX_INDEX_BYTES,
    Index as Index,
    Part as Part,
    Tensor as Tensor,
    parse_index as parse_index,
    read_index as read_index,
)
from tfps_runtime.checkpoint.directory import (
    Checkpoint as Checkpoint,
    FileStatus as FileStatus,
    complete_checkpoints as complete_checkpoints,
    complete_in as complete_in,
    latest_checkpoint as latest_checkpoint,
    watch as watch,
)
from tfps_runtime.checkpoint.errors import CheckpointError as CheckpointError
from tfps_runtime.checkpoint.slices import Extent as Extent
from tfps_runtime.checkpoint.state import (
    STATE_FILE as STATE_FILE,
    read_state as read_state,
    write_state as write_state,
)
from tfps_runtime.checkpoint.unfinished import remove_unfinished as remove_unfinished
from tfps_runtime.checkpoint.verify import Verified as Verified, verify as verify
