"""AutogradOps: casts, operations and saved tensors that somebody watches."""

from __future__ import annotations

import pytest


def test_the_frameworks_own_casts_are_brought_back(platform, make):
    as_now = platform.autocast_state()
    x = make([[1.0]])
    with as_now():
        assert platform.matmul(x, x).dtype == x.dtype


def test_what_is_kept_of_a_watched_result_counts_the_writes_to_it(platform, device, make, equal, lacks):
    if lacks("operation_dispatch"):
        equal(platform.detach_watched(make([3.0])), [3.0])
        return
    kept = []

    def keeps(operation, args, kwargs):
        out = operation(*args, **kwargs)
        kept.append(platform.detach_watched(out))
        return out

    x = make([0.0])
    with platform.watch_operations(keeps):
        y = platform.exp(x)
    before = platform.version(kept[0])
    platform.mul_(y, 2.0)
    equal(kept[0], [2.0])
    assert platform.version(kept[0]) == before + 1


def test_casts_are_told_from_other_operations(platform, make, lacks):
    if lacks("operation_dispatch"):
        assert not platform.is_cast(platform.cast)
        return
    seen = []

    def note(operation, args, kwargs):
        seen.append(platform.is_cast(operation))
        return operation(*args, **kwargs)

    x = make([1.0])
    with platform.watch_operations(note):
        platform.exp(x)
        assert seen == [False]
        platform.cast(x, platform.dtype("float16"))
    assert True in seen


def test_operations_are_done_by_who_watches(platform, device, make, equal, lacks):
    if lacks("operation_dispatch"):
        assert not platform.operations_of(platform.exp)
        assert not platform.can_be_kept(platform.exp)
        with pytest.raises(NotImplementedError, match="operations below autograd"):
            platform.watch_operations(lambda operation, args, kwargs: None)
        return
    seen = []

    def twice(operation, args, kwargs):
        seen.append(str(operation))
        return operation(*args, **kwargs) * 2  # is not watched itself

    x = make([3.0])
    with platform.watch_operations(twice):
        y = platform.exp(x * 0)
    assert len(seen) == 2
    assert "exp" in seen[1]
    equal(y, [2.0])
    platform.exp(x)
    assert len(seen) == 2


def test_what_is_kept_for_backward_passes_through_the_hooks(platform, leaf, equal):
    x, packed, unpacked = leaf([3.0]), [], []

    def pack(tensor):
        packed.append(platform.to_numpy(tensor).tolist())
        return len(packed) - 1, tensor

    def unpack(kept):
        unpacked.append(kept[0])
        return kept[1]

    with platform.saved_tensors_hooks(pack, unpack):
        y = platform.sum(x * x)
    assert packed == [[3.0], [3.0]]
    assert unpacked == []
    platform.backward([y])
    assert sorted(unpacked) == [0, 1]
    equal(platform.get_grad(x), [6.0])
    platform.backward([platform.sum(x * x)])
    assert len(packed) == 2
