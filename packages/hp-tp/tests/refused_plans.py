"""The table of wrong calls: what is done, and what is said. Each part of the package adds its rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tp_models import Config, Maker, block_of, make_mesh

from hp_dtensor import Replicate, Shard, distribute_tensor
from hp_platform import init_device_mesh
from hp_platform.testing import World
from hp_tp import (
    ColwiseParallel,
    ModuleCuts,
    RowwiseParallel,
    SequenceParallel,
    compile_block,
    describe,
    parallelize_module,
)

CONFIG = Config(heads=6, kv_heads=3, hidden=5, length=4)
"""3 heads of keys and values do not divide over two ranks."""
WIDTH = CONFIG.width


@dataclass(frozen=True)
class Call:
    """A wrong call, on two ranks."""

    run: Callable[[World], Any]
    message: str
    error: type[Exception] = ValueError


def apply(world: World, plan: Any, model: Any = None, mesh: Any = None) -> Any:
    """Lay out a Llama-like layer."""
    model = block_of(world, CONFIG) if model is None else model
    return parallelize_module(model, make_mesh(world) if mesh is None else mesh, plan)


def applied(plan: Any, message: str, error: type[Exception] = ValueError) -> Call:
    """A plan that is refused when it is applied. ``plan`` makes it: styles refuse their own options."""
    return Call(lambda world: apply(world, plan()), message, error)


def called(style: Callable[[], Any], given: Callable[[World, Any], tuple[Any, ...]], message: str) -> Call:
    """A layer of 6 features in and out that is laid out well and called wrongly."""

    def run(world: World) -> None:
        mesh = make_mesh(world)
        layer = parallelize_module(Maker(world).linear(6, 6), mesh, style())
        layer(*given(world, mesh))

    return Call(run, message)


def ones(world: World, *shape: int) -> Any:
    return world.platform.full(shape, 1.0, Maker(world).dtype, world.device)


def grid(world: World) -> Any:
    return init_device_mesh(world.device_type, (2, 1), mesh_dim_names=("tp", "other"))


def other_mesh(world: World) -> Any:
    return init_device_mesh(world.device_type, (2,), mesh_dim_names=("elsewhere",))


def twice(world: World) -> None:
    layer = apply(world, {"mlp.up": ColwiseParallel()})
    apply(world, {"mlp.up": RowwiseParallel()}, layer)


def tied_differently(world: World) -> None:
    model = block_of(world, CONFIG)
    model.attention.o.weight = model.attention.q.weight
    apply(world, {"attention.q": ColwiseParallel(), "attention.o": RowwiseParallel()}, model)


def own_cuts(cuts: Any) -> Callable[[], Any]:
    return lambda: {"mlp.up": ColwiseParallel(cuts=cuts)}


CALLS: dict[str, Call] = {
    # --- the plan
    "a pattern without a module": applied(
        lambda: {"attention.query": ColwiseParallel()},
        r"parallelize_plan\['attention\.query'\] meets no sub-module of Block; did you mean",
    ),
    "a class for a style": applied(
        lambda: {"mlp.up": ColwiseParallel}, r"parallelize_plan\['mlp\.up'\] must be a style", TypeError
    ),
    "a mesh of two dims": Call(
        lambda world: apply(world, {"mlp.up": ColwiseParallel()}, mesh=grid(world)),
        r"ColwiseParallel takes a mesh of 1 dim, got .* of shape \(2, 1\); slice it by name",
    ),
    "a mesh of two dims, without a plan": Call(
        lambda world: RowwiseParallel().apply(Maker(world).linear(4, 4), grid(world)),
        r"RowwiseParallel takes a mesh of one dim, got .* of shape \(2, 1\); slice it by name, such as mesh\['tp'\]",
    ),
    "no mesh": Call(
        lambda world: ColwiseParallel().apply(Maker(world).linear(4, 4), "tp"),
        r"device_mesh must be a hp_platform\.DeviceMesh, got str",
    ),
    "a module in two styles": Call(
        twice,
        r"RowwiseParallel: parameter 'weight' of this Linear is a DTensor of .* already: apply one style to it",
    ),
    "a tie that is cut in two ways": Call(
        tied_differently,
        r"'attention\.q\.weight' and 'attention\.o\.weight' are one parameter, but were given",
    ),
    # --- modules of the wrong kind
    "columns of a module without parameters": applied(
        lambda: {"": ColwiseParallel()},
        r"ColwiseParallel does not know how to cut a Block: it knows Linear, Embedding and convolutions\. Say cuts=",
    ),
    "rows of a norm": applied(
        lambda: {"norm1": RowwiseParallel()}, r"RowwiseParallel does not know how to cut a RMSNorm"
    ),
    "cuts that are none": applied(
        own_cuts({"weight": 0}), r"the cuts of a Linear must be a ModuleCuts, got dict", TypeError
    ),
    "cuts that leave a parameter out": applied(
        own_cuts(ModuleCuts({"weight": 0})),
        r"the cuts of this Linear must name its parameters weight, bias; missing: bias",
    ),
    "cuts of a parameter that is not there": applied(
        own_cuts(ModuleCuts({"weight": 0, "bias": 0, "scale": 0})), r"it has no scale"
    ),
    "cuts along a dim that is not there": applied(
        own_cuts(ModuleCuts({"weight": 2, "bias": 0})),
        r"'weight' of this Linear has 2 dims, so dim 2 cannot be cut",
    ),
    "cuts of nothing": applied(
        own_cuts(ModuleCuts({"weight": None, "bias": None})), r"the cuts of this Linear cut no parameter"
    ),
    "cuts whose features are counted from the front": applied(
        own_cuts(ModuleCuts({"weight": 0, "bias": 0}, feature_dim=2)),
        r"feature_dim is counted from the end, such as -1; got 2",
    ),
    # --- heads
    "query heads that do not divide": applied(
        lambda: {"attention.q": ColwiseParallel(heads=3)},
        r"3 heads of this Linear do not divide over 2 ranks: use a number of ranks that divides 3",
    ),
    "heads of keys that do not divide": applied(
        lambda: {"attention.k": ColwiseParallel(heads=3)},
        r"do not divide over 2 ranks.*replicate_kv=True and query_heads=",
    ),
    "heads that the features do not make": applied(
        lambda: {"attention.q": ColwiseParallel(heads=8)},
        r"the 12 features of this Linear are not 8 heads of one size: give the number of heads",
    ),
    "heads that are no number": applied(
        lambda: {"attention.q": ColwiseParallel(heads=2.0)},
        r"heads must be a number of attention heads, got 2\.0",
    ),
    "rows of heads that do not divide": applied(
        lambda: {"attention.o": RowwiseParallel(heads=3)},
        r"RowwiseParallel: 3 heads of this Linear do not divide over 2",
    ),
    "replicated heads without query heads": applied(
        lambda: {"attention.k": ColwiseParallel(heads=3, replicate_kv=True)},
        r"replicate_kv=True needs heads= \(of keys and values\) and query_heads=.*query_heads=None",
    ),
    "query heads for nothing": applied(
        lambda: {"attention.k": ColwiseParallel(heads=3, query_heads=6)}, r"query_heads is for nothing else"
    ),
    "query heads that share unevenly": applied(
        lambda: {"attention.k": ColwiseParallel(heads=3, query_heads=4, replicate_kv=True)},
        r"4 query heads are not shared evenly by 3 heads of this Linear: query_heads must be a multiple of heads",
    ),
    "query heads that do not divide, behind replicated ones": applied(
        lambda: {"attention.k": ColwiseParallel(heads=3, query_heads=9, replicate_kv=True)},
        r"9 query heads of this Linear do not divide over 2 ranks",
    ),
    # --- parts
    "parts that are not all": applied(
        lambda: {"attention.q": ColwiseParallel(parts={"a": 4, "b": 4})},
        r"the parts \{'a': 4, 'b': 4\} have 8 features together, this Linear has 12",
    ),
    "parts that are a number": applied(
        lambda: {"attention.q": ColwiseParallel(parts=3)},
        r"parts is a dict from names to sizes, or a list of sizes, got 3",
    ),
    "parts with a name that is none": applied(
        lambda: {"attention.q": ColwiseParallel(parts={"a.b": 12})},
        r"the name of a part must be an identifier.*'a\.b'",
    ),
    "parts without a size": applied(
        lambda: {"attention.q": ColwiseParallel(parts=[12, 0])},
        r"part '1' must have a number of features, got 0",
    ),
    "parts put together otherwise": applied(
        lambda: {"attention.q": ColwiseParallel(parts=[8, 4], output_layouts=Replicate())},
        r"the result of a layer in parts is handed out as plain pieces, part by part, which no placement describes",
    ),
    "heads of a part that is not there": applied(
        lambda: {"attention.q": ColwiseParallel(parts={"a": 8, "b": 4}, heads={"c": 2})},
        r"heads names 'c', which is no part of this Linear: its parts are 'a', 'b'",
    ),
    # --- options
    "a layout that is a number": applied(
        lambda: {"mlp.up": ColwiseParallel(input_layouts=1)},
        r"ColwiseParallel: input_layouts must be a placement such as Shard\(1\) or Replicate\(\), got 1",
    ),
    "a flag that is a word": applied(
        lambda: {"mlp.up": ColwiseParallel(use_local_output="yes")},
        r"use_local_output must be True or False, got 'yes'",
    ),
    "a sequence dim that is none": applied(
        lambda: {"norm1": SequenceParallel(sequence_dim=None)},
        r"sequence_dim must be a dim such as 1, got None",
    ),
    "a whole layer on pieces": applied(
        lambda: {"": SequenceParallel(local=True)},
        r"local=True is for modules without sub-modules, this one has 11",
    ),
    # --- calls
    "no tensor": called(
        ColwiseParallel,
        lambda world, mesh: (3,),
        r"argument of forward must be a tensor, got a value of type int",
    ),
    "no argument": called(
        ColwiseParallel, lambda world, mesh: (), r"must be a tensor, got none: pass the tensor first"
    ),
    "a tensor of another mesh": called(
        ColwiseParallel,
        lambda world, mesh: (distribute_tensor(ones(world, 2, 6), other_mesh(world)),),
        r"the input lies on .*elsewhere.*, but the style was applied on .*tp",
    ),
    "a whole tensor for a piece": called(
        RowwiseParallel,
        lambda world, mesh: (ones(world, 2, 6),),
        r"the input's piece has 6 of 6 features on this rank, the parameters' has 3: a plain input is taken to lie as Shard",
    ),
    "a piece of a dim that is not there": called(
        lambda: ColwiseParallel(input_layouts=Shard(3)),
        lambda world, mesh: (ones(world, 2, 6),),
        r"the input of shape \(2, 6\) has no dim 3 that could be cut",
    ),
    "an uneven result in plain pieces": called(
        lambda: RowwiseParallel(output_layouts=Shard(0)),
        lambda world, mesh: (ones(world, 3, 3),),
        r"dim 0 of size 3 does not divide over 2 ranks, and as plain pieces of several sizes.*use_local_output=False",
    ),
    # --- asking
    "a number to describe": Call(lambda world: describe(3), r"describe takes a module, got int", TypeError),
    "a number to compile": Call(
        lambda world: compile_block(3), r"compile_block takes a module, got int", TypeError
    ),
    "a list to compile": Call(
        lambda world: compile_block(world.platform.ModuleList([])),
        r"compile_block: a ModuleList has no forward, .*: call compile_block on each of its modules",
    ),
}
