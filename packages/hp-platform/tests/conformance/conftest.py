"""The conformance suite: every primitive against numpy, on the device of every backend that is asked for.

``HP_TEST_BACKENDS`` names them (torch, cuda, npu, mindspore). One process runs one framework: backends of the other one are
skipped, and a required one (``HP_REQUIRE_BACKENDS``) that is skipped fails.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hp_platform.capabilities import CAPABILITIES
from hp_platform.platform import ENVIRONMENT_VARIABLE, Platform, get_platform, require
from hp_platform.testing.backends import BACKENDS


def _names(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]


def _backends() -> list[str]:
    named = _names("HP_TEST_BACKENDS")
    if named:
        return named
    framework = os.environ.get(ENVIRONMENT_VARIABLE)
    installed = [b.modules[0] for b in BACKENDS.values() if importlib.util.find_spec(b.modules[0])]
    wanted = framework or (installed[0] if installed else "torch")
    return [name for name, backend in BACKENDS.items() if backend.modules[0] == wanted]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", _backends(), indirect=True, scope="session")


@pytest.fixture(scope="session")
def platform() -> Platform:
    names = _backends()
    if not os.environ.get(ENVIRONMENT_VARIABLE) and len({BACKENDS[name].modules[0] for name in names}) == 1:
        os.environ[ENVIRONMENT_VARIABLE] = BACKENDS[names[0]].modules[0]
    return get_platform()


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest, platform: Platform) -> str:
    """The kind of device that tensors of the test live on."""
    backend = BACKENDS[request.param]
    reason = None
    if backend.modules[0] != platform.platform_type.value:
        reason = (
            f"this process runs {platform.platform_type.value}; run {backend.name} in a process of its own"
        )
    elif backend.device_type not in platform.device_types():
        reason = f"no {backend.device_type} device here"
    if reason and backend.name in _names("HP_REQUIRE_BACKENDS"):
        pytest.fail(f"backend {backend.name} is required, but {reason}")
    if reason:
        pytest.skip(reason)
    return backend.device_type


@pytest.fixture(scope="session")
def make(platform: Platform, device: str) -> Callable[..., Any]:
    """``make(data, dtype)``: a tensor on the device."""

    def build(data: Any, dtype: str | None = None) -> Any:
        return platform.tensor(data, dtype, device)

    return build


@pytest.fixture(scope="session")
def real(platform: Platform, device: str) -> str:
    """The most exact floating dtype that the device computes in."""
    return "float64" if platform.supports("float64_compute", device) else "float32"


@pytest.fixture(scope="session")
def lacks(platform: Platform, device: str) -> Callable[[str], bool]:
    """``lacks(capability)``: False if it exists; else True, after asserting that asking for it is refused with the way out."""

    def ask(capability: str) -> bool:
        if platform.supports(capability, device):
            require(platform, capability, device, what="the test")
            return False
        with pytest.raises(NotImplementedError) as caught:
            require(platform, capability, device, what="the test")
        message = str(caught.value)
        assert platform.platform_type.value in message, message
        assert device in message, message
        assert CAPABILITIES[capability] in message, message
        return True

    return ask


@pytest.fixture(scope="session")
def equal(platform: Platform) -> Callable[[Any, Any], None]:
    """Same shape and same numbers, bit for bit (bfloat16 compared as float32)."""

    def check(actual: Any, expected: Any) -> None:
        got, want = platform.to_numpy(actual), np.asarray(expected)
        assert got.shape == want.shape, (got.shape, want.shape)
        np.testing.assert_array_equal(got, want)

    return check


@pytest.fixture(scope="session")
def near(platform: Platform) -> Callable[..., None]:
    """Same shape, and numbers equal to a few units of the dtype's last place (or ``rtol``), relative to the largest."""
    # Sums of at most some tens of products: each rounds once, so a hundred units in the last place are ample, and a wrong
    # formula is wrong by far more.
    units = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

    def check(actual: Any, expected: Any, rtol: float | None = None) -> None:
        got, want = platform.to_numpy(actual).astype(np.float64), np.asarray(expected, dtype=np.float64)
        assert got.shape == want.shape, (got.shape, want.shape)
        limit = rtol if rtol is not None else 100 * units[platform.dtype_name(actual.dtype)]
        np.testing.assert_allclose(
            got, want, rtol=limit, atol=limit * max(1.0, np.abs(want).max(initial=0.0))
        )

    return check


@pytest.fixture
def leaf(platform: Platform, make: Callable[..., Any]) -> Callable[[Any], Any]:
    """``leaf(data)``: a tensor that asks for its gradient."""
    return lambda data: platform.set_requires_grad_(make(data), True)


@pytest.fixture
def affine(platform: Platform, make: Callable[..., Any]) -> type:
    """The class of a module with a weight, a bias, and a keyword argument of forward."""

    class Affine(platform.Module):
        WEIGHT = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        BIAS = np.array([0.5, -0.5, 1.0])

        def __init__(self, weight=WEIGHT, bias=BIAS):
            super().__init__()
            self.weight = platform.parameter(make(weight, "float32"))
            self.bias = platform.parameter(make(bias, "float32"))

        def forward(self, x, scale=1.0):
            return platform.linear(x, self.weight, self.bias) * scale

    return Affine


@pytest.fixture
def net(platform: Platform, make: Callable[..., Any], affine: type) -> Any:
    """Nested modules, a list, a buffer, and a weight that two modules share."""

    class Net(platform.Module):
        def __init__(self):
            super().__init__()
            self.first = affine()
            self.blocks = platform.ModuleList(
                [affine(np.eye(3), np.zeros(3)), affine(2 * np.eye(3), np.ones(3))]
            )
            self.last = affine()
            self.last.weight = self.first.weight
            platform.register_buffer(self, "offset", make([1.0, 2.0, 3.0]))

        def forward(self, x):
            y = self.first(x)
            for block in self.blocks:
                y = block(y)
            return y + self.offset

    return Net()
