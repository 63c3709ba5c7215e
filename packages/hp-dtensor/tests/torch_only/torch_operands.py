"""Tensors that functions of torch can be called with, by words."""

from typing import Any

import torch

SHIFTS = "bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __rlshift__ __rrshift__"
INTEGERS = "gcd lcm bitwise_not __invert__ bitwise_and __and__ __rand__ bitwise_or __or__ __ror__ bitwise_xor __xor__ __rxor__"
OTHER_SHAPES = {
    "dsplit": ((2, 3, 4), (1,)),
    "bmm": ((2, 4, 3), (2, 3, 5)),
    "dot": ((7,), (7,)),
    "vdot": ((7,), (7,)),
    "outer": ((7,), (5,)),
    "ger": ((7,), (5,)),
    "cross": ((4, 3), (4, 3)),
    "baddbmm": ((2, 4, 5), (1,)),
    "addmv": ((4,), (1,)),
}


def tensors_for(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64) * 0.9 + 0.05

    if name in OTHER_SHAPES:
        first, second = OTHER_SHAPES[name]
        return {**_operands(draw), "x": draw(*first), "y": draw(*second)}
    if name in (*INTEGERS.split(), *SHIFTS.split()):
        return {"x": torch.arange(20).reshape(4, 5), "y": torch.arange(20).reshape(4, 5) % 7 + 1}
    return {
        "x": draw(4, 5) + (1.0 if name in ("acosh", "arccosh") else 0.0),
        "y": draw(4, 5),
        "mask": draw(4, 5) > 0.5,
        "other": draw(5, 3),
        "left": draw(3, 4),
        "weight": draw(3, 5),
        "vector": draw(5),
        "classes": torch.tensor([2, 0, 1, 2]),
        **_operands(draw),
    }


def _operands(draw: Any) -> dict[str, torch.Tensor]:
    """Of products and layers."""
    places = {1: (5,), 2: (5, 4), 3: (3, 4, 3)}
    return {
        "complex": torch.complex(draw(4, 5), draw(4, 5)),
        "pairs": draw(4, 5, 2),
        "numbers": torch.tensor([2, 0, 3]),
        "places": torch.arange(20).reshape(4, 5) * 7 % 4,
        "rising": torch.arange(6, dtype=torch.float64) / 6,
        "cube": draw(3, 4, 5),
        **{f"image {n}": draw(2, 3, *sizes) for n, sizes in places.items()},
        **{f"kernel {n}": draw(4, 3, *(2 for _ in sizes)) for n, sizes in places.items()},
        **{f"transposed kernel {n}": draw(3, 4, *(2 for _ in sizes)) for n, sizes in places.items()},
        "positive": torch.eye(4, dtype=torch.float64) * torch.arange(1.0, 5) + 0.1,
        "weight of pairs": draw(3, 5, 5),
        "left of product": draw(4, 3),
        "right of product": draw(3, 5),
        "square": draw(4, 4),
        "four": draw(4),
        "three": draw(3),
        "bags": torch.arange(8).reshape(4, 2) % 4,
        "pixels": draw(2, 4, 4, 2),
        "points": draw(2, 3, 2, 2),
        "theta": draw(2, 2, 3),
        "places in image 2": torch.arange(120).reshape(2, 3, 5, 4) % 20,
        "places in image 3": torch.arange(216).reshape(2, 3, 3, 4, 3) % 36,
        "scores": draw(5, 4, 3).log_softmax(2),
        "targets": torch.arange(8).reshape(4, 2) % 2 + 1,
        "steps": torch.full((4,), 5),
        "lengths": torch.tensor([2, 1, 2, 1]),
        "labels": torch.zeros(4, 5, dtype=torch.int64),
        "left batch": draw(2, 4, 3),
        "right batch": draw(2, 3, 5),
    }
