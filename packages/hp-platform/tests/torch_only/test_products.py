"""Products of 16-bit matrices by kernels of our own: for which devices and matrices they are, and what their bits depend on."""

from __future__ import annotations

import torch

from hp_platform.testing import World, distributed


@distributed(world_size=1, backends=["torch", "cuda"])
def test_kernels_for_products_are_for_hopper_gpus_and_their_bits_depend_on_no_other_matrix(
    world: World,
) -> None:
    kernels = world.platform.device(world.device).fused_updates()
    if world.device_type == "cpu":
        assert kernels is None
        return
    products = type(kernels.products)(smallest=8)
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    generator = torch.Generator(world.device).manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        for count, rows, cols in ((3, 264, 520), (40, 128, 64), (2, 8, 1000)):
            x = torch.randn(count, rows, cols, device=world.device, generator=generator).to(dtype) / 30
            for each in (x, x.mT.contiguous().mT):
                gram = products.gram(each)
                assert (gram is not None) == is_hopper
                if gram is None:
                    continue
                square = products.square_add(gram, 2.0, -4.7)
                applied = products.matmul_add(x, square, each, 1.0, 3.4)
                assert torch.equal(gram, gram.mT) and torch.equal(square, square.mT)
                assert torch.equal(products.gram(each[1:2])[0], gram[1])
                assert torch.equal(products.square_add(gram[1:2], 2.0, -4.7)[0], square[1])
                one = products.matmul_add(x[1:2], square[1:2], each[1:2], 1.0, 3.4)
                assert torch.equal(one[0], applied[1])
    # Shapes that do not match are for the framework to refuse or to repeat.
    x = torch.zeros(2, 64, 128, device=world.device, dtype=torch.bfloat16)
    assert products.square_add(x, 1.0, 1.0) is None
    for other, addend in ((x, x), (x.mT[:1], x[:, :, :64]), (x.mT, x), (x.mT, x[:1, :, :64])):
        assert products.matmul_add(addend.contiguous(), x, other, 1.0, 1.0) is None
    # What takes the host longer to start than the device to compute.
    small, large = (
        torch.zeros(1, rows, 2048, device=world.device, dtype=torch.bfloat16) for rows in (1024, 2048)
    )
    assert kernels.products.gram(small) is None and (kernels.products.gram(large) is not None) == is_hopper
    # Rows that begin where the accelerator does not read, and dtypes that are exact.
    odd = torch.ones(2, 264, 263, device=world.device)
    assert products.gram(odd.to(torch.bfloat16)) is None
    assert products.gram(torch.ones(2, 7, 16, device=world.device, dtype=torch.bfloat16)) is None
    assert products.gram(torch.ones(2, 8, 16, device=world.device)) is None
    assert products.matmul_add(odd, odd, odd.mT, 1.0, 1.0) is None
