"""NNOps: hooks of modules, and what stays uncompiled."""

from __future__ import annotations


def test_forward_hooks_see_and_replace_arguments_and_output(platform, affine, make, equal):
    module, seen = affine(), []
    x = make([[1.0, 0.0]])

    def before(hooked, args, kwargs):
        seen.append(("before", hooked is module, len(args), dict(kwargs)))
        return (args[0] * 2,), {"scale": 10.0}

    def after(hooked, args, kwargs, output):
        seen.append(("after", hooked is module, len(args), dict(kwargs)))
        return output + 1

    handles = [
        platform.register_forward_pre_hook(module, before),
        platform.register_forward_hook(module, after),
    ]
    equal(module(x, scale=3.0), [[26.0, 56.0, 111.0]])
    assert seen == [("before", True, 1, {"scale": 3.0}), ("after", True, 1, {"scale": 10.0})]
    for handle in handles:
        handle.remove()
        handle.remove()
    equal(module(x), [[1.5, 2.5, 6.0]])
    assert len(seen) == 2


def test_a_hook_that_returns_none_changes_nothing(platform, affine, make, equal):
    module = affine()
    platform.register_forward_pre_hook(module, lambda hooked, args, kwargs: None)
    platform.register_forward_hook(module, lambda hooked, args, kwargs, output: None)
    equal(module(make([[1.0, 0.0]]), scale=2.0), [[3.0, 5.0, 12.0]])


def test_functions_that_stay_uncompiled_run_as_ever(platform):
    class Counter:
        total = 0

        def add(self, n):
            self.total = self.total + n
            return self.total

    counter = Counter()
    platform.run_uncompiled([counter.add, abs])
    assert [counter.add(2), counter.add(3)] == [2, 5]


def test_hooks_run_in_the_order_of_registration_and_prepended_ones_first(platform, affine, make):
    module, order = affine(), []
    platform.register_forward_pre_hook(module, lambda *_: order.append("pre 1"))
    platform.register_forward_pre_hook(module, lambda *_: order.append("pre 2"))
    platform.register_forward_pre_hook(module, lambda *_: order.append("pre 0"), prepend=True)
    platform.register_forward_hook(module, lambda *_: order.append("post 1"))
    platform.register_forward_hook(module, lambda *_: order.append("post 2"))
    platform.register_forward_hook(module, lambda *_: order.append("post 0"), prepend=True)
    module(make([[1.0, 0.0]]))
    assert order == ["pre 0", "pre 1", "pre 2", "post 0", "post 1", "post 2"]


def test_hooks_removed_while_others_stay(platform, affine, make):
    module, order = affine(), []
    handles = [platform.register_forward_hook(module, lambda *_, i=i: order.append(i)) for i in range(3)]
    handles[1].remove()
    module(make([[1.0, 0.0]]))
    assert order == [0, 2]


def test_backward_hooks_see_and_replace_gradients(platform, affine, make, equal):
    module, seen = affine(), []
    x = platform.set_requires_grad_(make([[1.0, 0.0]]), True)

    def before(hooked, grad_output):
        seen.append(("before", hooked is module, platform.to_numpy(grad_output[0]).tolist()))
        return (grad_output[0] * 2,)

    def after(hooked, grad_input, grad_output):
        seen.append(("after", hooked is module, platform.to_numpy(grad_output[0]).tolist()))
        return (grad_input[0] * 10,)

    handles = [
        platform.register_backward_pre_hook(module, before),
        platform.register_backward_hook(module, after),
    ]
    platform.backward([platform.sum(module(x))])
    assert seen == [("before", True, [[1.0, 1.0, 1.0]]), ("after", True, [[2.0, 2.0, 2.0]])]
    equal(platform.get_grad(x), [[180.0, 240.0]])
    equal(platform.get_grad(module.bias), [2.0, 2.0, 2.0])
    for handle in handles:
        handle.remove()
    platform.set_grad(x, None)
    platform.backward([platform.sum(module(x))])
    equal(platform.get_grad(x), [[9.0, 12.0]])
    assert len(seen) == 2


def test_hooks_on_loading_are_those_that_were_registered_on_the_module_itself(platform, affine):
    outer, inner, seen = affine(), affine(), []
    outer.inner = inner
    assert platform.loading_hooks(outer) == ([], [])
    inner.register_load_state_dict_pre_hook(
        lambda module, values, prefix, *rest: seen.append((module is inner, prefix))
    )
    inner.register_load_state_dict_post_hook(lambda module, names: seen.append((module is inner, names)))
    assert platform.loading_hooks(outer) == ([], [])
    before, after = platform.loading_hooks(inner)
    for hook in before:
        hook({}, "inner.", {}, True, [], [], [])
    for hook in after:
        hook(inner, "names")
    assert seen == [(True, "inner."), (True, "names")]
