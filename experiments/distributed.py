"""Support for runs on several hosts, which start the same command with their own --process_id.

All processes compute and save checkpoints together. Only the first process prints and writes other
files. If a process is lost, JAX's runtime ends the others. Starting all of them again with the same
--workdir, which every host must be able to read, resumes from the last checkpoint.
"""

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.experimental import multihost_utils

from sotalign_jax import checks

Tree = TypeVar("Tree")

_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "HOST:PORT of the first process, or `auto` to ask the cluster."
)
_COUNT = flags.DEFINE_integer("num_processes", None, "Number of processes.", 1)
_INDEX = flags.DEFINE_integer("process_id", None, "Number of this process, from 0.", 0)
_PATIENCE = flags.DEFINE_integer(
    "patience", 100, "Seconds without a heartbeat after which a process counts as lost.", 5
)


def initialize() -> None:
    """Connects to the other processes if the flags ask for several.

    Raises:
        InputError: The flags are incomplete, or the coordinator cannot be reached.
    """
    given: dict[str, Any] = {flag.name: flag.value for flag in (_COORDINATOR, _COUNT, _INDEX)}
    address, count, index = given.values()
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        return
    if address != "auto":
        if missing:
            remedy = "pass --coordinator, --num_processes and --process_id together"
            raise checks.InputError(f"{missing[0]} is not set; {remedy}, or --coordinator=auto")
        if ":" not in address:
            raise checks.InputError(f"coordinator must be HOST:PORT or auto, got {address!r}")
        if index >= count:
            raise checks.InputError(f"process_id must be in 0..{count - 1}, got {index}")
    # JAX's preemption service would replace the SIGTERM handler of `cli`.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            None if address == "auto" else address,
            count,
            index,
            # Hosts of a cluster start minutes apart, so joining may take longer than a heartbeat.
            initialization_timeout=3 * _PATIENCE.value,
            heartbeat_timeout_seconds=_PATIENCE.value,
            shutdown_timeout_seconds=_PATIENCE.value,
        )
    except (RuntimeError, ValueError) as error:
        text = f"coordinator {address} cannot be reached ({checks.first_line(error)})"
        remedy = "start every process with the address of the first one, or raise --patience"
        raise checks.InputError(f"{text}; {remedy}") from error
    # The first collective connects the devices and times out if a process is late. At this point
    # all processes have just joined.
    multihost_utils.sync_global_devices("start")
    # Each process checks its own part of large files.
    checks._shard = jax.process_index(), jax.process_count()


def is_first() -> bool:
    """Returns True in the first process, the only one that prints and writes files."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def from_first(tree: Tree) -> Tree:
    """Broadcasts the arrays of the first process.

    Hosts may round differently, so that arrays computed on each of them can differ.

    Args:
        tree: Pytree of arrays. All processes must pass the same shapes.

    Returns:
        The arrays of the first process, in every process.
    """
    if not jax.distributed.is_initialized():
        return tree
    arrays = multihost_utils.broadcast_one_to_all(tree, is_source=is_first())
    return jax.tree.map(jnp.asarray, arrays)


def agree(find: Callable[[], Any]) -> Any:
    """Calls a function in the first process and returns its result in all processes.

    Args:
        find: Function whose result can be pickled. The other processes do not call it.

    Returns:
        The value.

    Raises:
        InputError: The function raised InputError or OSError. All processes raise it.
    """
    if not jax.distributed.is_initialized():
        return find()
    found: dict[str, Any] = {}
    if is_first():
        try:
            found = {"value": find()}
        except (checks.InputError, OSError) as error:
            found = {"error": str(error)}
    # Shapes must agree for a broadcast, so the length of the message is sent first.
    message = np.frombuffer(pickle.dumps(found), np.uint8)
    length = int(from_first(np.int32(len(message))))
    message = from_first(message if is_first() else np.zeros(length, np.uint8))
    found = pickle.loads(np.asarray(message).tobytes())
    if "error" in found:
        raise checks.InputError(found["error"])
    return found["value"]
