"""``with mesh:`` makes a mesh current, per thread."""

from __future__ import annotations

import threading

import pytest

from hp_platform.mesh import DeviceMesh, get_current_mesh, init_device_mesh

pytestmark = pytest.mark.once


@pytest.fixture
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), ("dp", "tp"), _rank=0)


def test_the_innermost_mesh_is_current(mesh: DeviceMesh) -> None:
    with mesh as entered:
        assert entered is mesh
        assert get_current_mesh() is mesh
        with mesh["tp"]:
            assert get_current_mesh() is mesh["tp"]
            with mesh:
                assert get_current_mesh() is mesh
            assert get_current_mesh() is mesh["tp"]
        assert get_current_mesh() is mesh
    with pytest.raises(RuntimeError, match="no mesh is current"):
        get_current_mesh()


def test_an_error_leaves_the_mesh_and_passes_on(mesh: DeviceMesh) -> None:
    with pytest.raises(KeyError, match="mine"), mesh:
        raise KeyError("mine")
    with pytest.raises(RuntimeError, match="no mesh is current"):
        get_current_mesh()


def test_threads_have_their_own_current_mesh(mesh: DeviceMesh) -> None:
    seen: list[object] = []
    entered, checked = threading.Barrier(2, timeout=5), threading.Barrier(2, timeout=5)

    def other() -> None:
        try:
            get_current_mesh()
        except RuntimeError as error:
            seen.append(str(error))
        with mesh["dp"]:
            entered.wait()
            seen.append(get_current_mesh())
            checked.wait()

    with mesh:
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait()
        assert get_current_mesh() is mesh
        checked.wait()
        thread.join(timeout=5)
        assert get_current_mesh() is mesh
    assert seen == [
        "no mesh is current: enter one (`with mesh:`), or hand it over as an argument",
        mesh["dp"],
    ]


def test_meshes_are_left_innermost_first(mesh: DeviceMesh) -> None:
    with mesh:
        inner = mesh["tp"]
        inner.__enter__()
        with pytest.raises(
            RuntimeError, match=r"was left while the current mesh is another .*tp=2.*innermost first"
        ):
            mesh.__exit__(None, None, None)
        inner.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match=r"was left while the current mesh is another \(none\)"):
        mesh.__exit__(None, None, None)
