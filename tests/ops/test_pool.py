"""Memory of freed tensors serves the next ones, and never two at once."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from moeflow.ops import pool

BIG = pool.SMALLEST_BYTES // 2  # floats: twice the least


def test_a_freed_block_serves_the_next_request_of_about_its_size():
    blocks = pool.Pool()
    first = blocks.empty((BIG,), torch.float32)
    address = first.data_ptr()
    assert blocks.idle() == 0
    del first
    assert blocks.idle() == BIG * 4
    again = blocks.empty((BIG - 8,), torch.float32)  # a little smaller
    assert again.data_ptr() == address and blocks.idle() == 0
    assert blocks.empty((BIG,), torch.float32).data_ptr() != address  # lent: another one


def test_a_view_keeps_the_block():
    blocks = pool.Pool()
    tensor = blocks.empty((4, BIG), torch.float32)
    row = tensor[2].fill_(7)
    del tensor
    assert blocks.idle() == 0
    other = blocks.empty((4, BIG), torch.float32).fill_(1)
    assert (row == 7).all() and (other == 1).all()
    del row
    assert blocks.idle() == 16 * BIG


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_an_ordinary_tensor(dtype: torch.dtype):
    tensor = pool.Pool().empty((3, BIG), dtype)
    assert tensor.shape == (3, BIG) and tensor.dtype == dtype and tensor.is_contiguous() and tensor.device.type == "cpu"
    tensor.fill_(1).add_(1)
    assert (tensor == 2).all()
    assert torch.equal(tensor.clone(), tensor)


def test_a_block_much_too_large_is_left_alone():
    blocks = pool.Pool()
    del [blocks.empty((4 * BIG,), torch.float32)][0]
    small = blocks.empty((BIG,), torch.float32)
    assert small.untyped_storage().nbytes() < 8 * BIG and blocks.idle() == 16 * BIG


def test_idle_memory_is_bounded_and_the_longest_unused_goes_first():
    blocks = pool.Pool(idle_bytes=10 * BIG)
    one, two, three = (blocks.empty((BIG,), torch.float32) for _ in range(3))
    last = {two.data_ptr(), three.data_ptr()}
    del one
    del two
    del three
    assert blocks.idle() == 8 * BIG
    assert {blocks.empty((BIG,), torch.float32).data_ptr() for _ in range(1)} <= last
    blocks.clear()
    assert blocks.idle() == 0


def test_threads_never_share_a_block():
    blocks, wrong = pool.Pool(), []

    def work(value: int):
        for _ in range(50):
            tensor = blocks.empty((BIG,), torch.float32)
            tensor[::4096] = value
            if not (tensor[::4096] == value).all():
                wrong.append(value)
            del tensor

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_training_steps_take_their_memory_from_the_step_before():
    from moeflow import MoELayer

    torch.manual_seed(0)
    layer = MoELayer(64, 16, d_hidden=1024)  # the experts' weights are 4 MB each way
    x = torch.randn(256, 64)
    pool.clear()
    for _ in range(3):
        layer.zero_grad(set_to_none=True)
        gc.collect()
        before = pool._pool.idle()
        layer(x).square().mean().backward()
    held = sum(p.grad.numel() * 4 for p in layer.experts.parameters() if p.grad.numel() * 4 >= pool.SMALLEST_BYTES)
    assert held > 0
    assert before - pool._pool.idle() == held  # the third step's gradients are the second's memory: nothing was added
