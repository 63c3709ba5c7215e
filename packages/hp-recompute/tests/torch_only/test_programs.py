"""Random programs of views, in-place operations and shared storages: checkpointed as plain autograd has them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_recompute import CheckpointError, checkpoint

SIDE = 3
Step = tuple[str, int, int]
MAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sin": lambda x, y: x.sin(),
    "product": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y,
    "dropout": lambda x, y: torch.nn.functional.dropout(x, 0.5),
    "row": lambda x, y: x[1:2].expand(SIDE, SIDE),
    "turned": lambda x, y: x.t(),
    "viewed": lambda x, y: x.view(-1).view(SIDE, SIDE) if x.is_contiguous() else x.t(),
    "same": lambda x, y: x,
    "chunks": lambda x, y: torch.cat(x.split(1)[::-1]),
}
WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "doubled": lambda x, y: x.mul_(2),
    "added": lambda x, y: x.add_(y.sum() * 0.1),
    "a part added": lambda x, y: x[:1].add_(1),
    "a diagonal": lambda x, y: x.diagonal().mul_(3),
    "tanh": lambda x, y: x.tanh_(),
    "a column copied": lambda x, y: x[:, 0].copy_(y[:, 1]),
}
steps = st.tuples(st.sampled_from([*MAKES, *WRITES]), st.integers(0, 9), st.integers(0, 9))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"early_stop": False},
    {"policy_fn": [torch.matmul, torch.sin]},
    {"policy_fn": lambda context, operation, *args, **kwargs: True, "early_stop": False},
]


def run(
    program: list[Step], inputs: list[torch.Tensor], call: Callable[..., Any]
) -> list[torch.Tensor] | None:
    """Outputs, gradients and the next random number; None where autograd refuses the program."""
    torch.manual_seed(0)
    leaves = [x.clone().requires_grad_() for x in inputs]

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        known = [x * 1 for x in given]
        for name, one, other in program:
            x, y = known[one % len(known)], known[other % len(known)]
            if name in MAKES:
                known.append(MAKES[name](x, y))
            else:
                WRITES[name](x, y)
        return tuple(known[-3:])

    try:
        outputs = call(function, *leaves)
        sum(y.sum() * (i + 1) for i, y in enumerate(outputs)).backward()
    except CheckpointError:
        raise
    except RuntimeError:
        return None
    return [*(y.detach() for y in outputs), *(leaf.grad for leaf in leaves), torch.rand(1)]


@settings(max_examples=150, deadline=None)
@given(program=st.lists(steps, min_size=1, max_size=8), nests=st.booleans())
def test_programs_give_the_bits_of_plain_autograd_or_are_refused_as_there(
    program: list[Step], nests: bool
) -> None:
    inputs = [
        torch.linspace(-1, 1, SIDE * SIDE, dtype=torch.float64).reshape(SIDE, SIDE),
        torch.eye(SIDE).double(),
    ]
    expected = run(program, inputs, lambda function, *args: function(*args))
    for options in OPTIONS:

        def call(function: Callable[..., Any], *args: Any, options: dict[str, Any] = options) -> Any:
            if nests:
                return checkpoint(lambda *args: checkpoint(function, *args, **options), *args, **options)
            return checkpoint(function, *args, **options)

        try:
            found = run(program, inputs, call)
        except CheckpointError as error:
            assert "policy_fn" in options and "in place" in str(error)
            continue
        if expected is None:
            # What comes after the last saved tensor is not done again: early stop may be right where plain autograd refuses.
            assert found is None or options.get("early_stop", True), options
            continue
        assert found is not None, options
        for one, other in zip(found, expected, strict=True):
            assert one is other is None or torch.equal(one, other), options
