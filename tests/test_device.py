"""Tests of the device profiles."""

import types

import jax
import pytest

from sotalign_jax.ot import device


def described(platform, capability="", stats=None):
    """Returns an object with the attributes of a JAX device of another machine."""
    return types.SimpleNamespace(
        platform=platform, compute_capability=capability, memory_stats=lambda: stats
    )


@pytest.mark.parametrize(
    ("platform", "capability", "teacher", "others", "int8"),
    [
        ("cpu", "", device.HIGHEST, device.HIGHEST, False),
        ("gpu", "7.0", device.HIGHEST, device.HIGHEST, True),
        ("gpu", "7.5", device.HIGHEST, device.HIGHEST, True),
        ("gpu", "8.0", device.THREE_PASSES, device.TF32, True),
        ("gpu", "8.6", device.HIGHEST, device.HIGHEST, True),
        ("gpu", "8.9", device.HIGHEST, device.HIGHEST, True),
        ("gpu", "9.0", device.THREE_PASSES, device.TF32, True),
        ("gpu", "10.0", device.THREE_PASSES, device.TF32, True),
        ("gpu", "12.0", device.HIGHEST, device.HIGHEST, True),
        ("gpu", "gfx942", device.HIGHEST, device.HIGHEST, True),
        ("metal", "", device.HIGHEST, device.HIGHEST, True),
        ("tpu", "", device.THREE_PASSES, device.THREE_PASSES, True),
    ],
)
def test_profile_of_every_device_kind(platform, capability, teacher, others, int8):
    found = device.profile(described(platform, capability))
    assert found.teacher == teacher and found.int8 == int8
    assert found.student == found.gradient == found.heads == others


def test_profile_memory_is_reported_by_the_device():
    reported = device.profile(described("gpu", "8.0", {"bytes_limit": 12345})).memory
    assert reported == 12345
    for platform in ("gpu", "tpu"):
        unknown = device.profile(described(platform, "8.0" * (platform == "gpu"))).memory
        assert unknown == device.UNKNOWN_MEMORY
    host = device.profile(jax.devices("cpu")[0]).memory
    assert host > 2**30 and host != device.UNKNOWN_MEMORY


def test_compiling_for_restores_the_profile():
    before = device.profile()
    with device.compiling_for(device.Profile("cuda 7.5")):
        assert device.profile().name == "cuda 7.5"
    assert device.profile() == before
