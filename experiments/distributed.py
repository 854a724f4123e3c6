"""One run on several hosts: each starts the same command, with its own --process_id.

All processes compute and save checkpoints together; the first alone keeps other records and talks.
When a process is lost, JAX's runtime ends the others. All of them started again with the same
--workdir, which every host must see, they continue from the last checkpoint.
"""

import json
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
    "coordinator", None, "HOST:PORT of the first process of several, or `auto` to ask the cluster."
)
_COUNT = flags.DEFINE_integer("num_processes", None, "How many processes there are.", 1)
_INDEX = flags.DEFINE_integer("process_id", None, "Which of them this is, from 0.", 0)
_PATIENCE = flags.DEFINE_integer(
    "patience", 100, "Seconds without a heartbeat until a process is lost; to join, three times.", 5
)


def initialize() -> None:
    """Joins the other processes that the flags name, if any."""
    given: dict[str, Any] = {flag.name: flag.value for flag in (_COORDINATOR, _COUNT, _INDEX)}
    address, count, index = given.values()
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3:
        return
    if address != "auto":
        if missing:
            remedy = "pass --coordinator, --num_processes and --process_id together"
            raise checks.InputError(f"{missing[0]}: not set; {remedy}, or --coordinator=auto")
        if ":" not in address:
            raise checks.InputError(f"coordinator: must be HOST:PORT or auto, got {address!r}")
        if index >= count:
            raise checks.InputError(f"process_id: must be in 0..{count - 1}, got {index}")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    try:
        jax.distributed.initialize(
            None if address == "auto" else address,
            count,
            index,
            initialization_timeout=3 * _PATIENCE.value,
            heartbeat_timeout_seconds=_PATIENCE.value,
            shutdown_timeout_seconds=_PATIENCE.value,
        )
    except (RuntimeError, ValueError) as error:
        text = f"coordinator: cannot join {address} ({checks.first_line(error)})"
        remedy = "start every process with the address of the first one, or raise --patience"
        raise checks.InputError(f"{text}; {remedy}") from error
    # Devices are connected while all processes are here: it fails if some are late.
    multihost_utils.sync_global_devices("start")
    # Large files are looked through by all processes together, a part by each.
    checks._shard = jax.process_index(), jax.process_count()


def is_first() -> bool:
    """Whether this process keeps the records."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def from_first(tree: Tree) -> Tree:
    """Arrays of the first process on all of them: hosts may round differently."""
    if not jax.distributed.is_initialized():
        return tree
    arrays = multihost_utils.broadcast_one_to_all(tree, is_source=is_first())
    return jax.tree.map(jnp.asarray, arrays)


def agree(find: Callable[[], Any]) -> Any:
    """What the first process finds, as JSON values, or the error that it met, on all of them."""
    if not jax.distributed.is_initialized():
        return find()
    found: dict[str, Any] = {}
    if is_first():
        try:
            found = {"value": find()}
        except (checks.InputError, OSError) as error:
            found = {"error": str(error)}
    text = np.frombuffer(json.dumps(found).encode(), np.uint8)
    length = int(from_first(np.int32(len(text))))
    text = from_first(text if is_first() else np.zeros(length, np.uint8))
    found = json.loads(np.asarray(text).tobytes())
    if "error" in found:
        raise checks.InputError(found["error"])
    return found["value"]
