"""The names that hp-platform and its harness promise."""

from __future__ import annotations

from types import ModuleType

import pytest

import hp_platform
import hp_platform.testing
from hp_platform.testing import assert_exports


@pytest.mark.parametrize("package", [hp_platform, hp_platform.testing], ids=lambda package: package.__name__)
def test_every_public_name_loads_explains_itself_and_is_seen_by_type_checkers(package: ModuleType) -> None:
    assert_exports(package)


def test_a_name_that_only_one_side_sees_is_told(tmp_path, monkeypatch) -> None:
    (tmp_path / "lopsided.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "from hp_platform.lazy import attach\n"
        "if TYPE_CHECKING:\n    from hp_platform import Work as Work\n"
        "__getattr__, __dir__, __all__ = attach(__name__, {'ProcessGroup': 'hp_platform'})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import lopsided  # type: ignore[import-not-found]

    with pytest.raises(
        AssertionError, match=r"under TYPE_CHECKING only \['Work'\], in __all__ only \['ProcessGroup'\]"
    ):
        assert_exports(lopsided)
