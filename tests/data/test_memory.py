"""Memory of micro-batches: aligned, and lent again only after its copy."""

import gc
import weakref

import pytest
import torch

from falconet.data.buffers import Ring, Shape, fresh_room


class Copy:
    """An event that notes who waited for it."""

    def __init__(self):
        self.waited = False

    def synchronize(self):
        self.waited = True


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("images", [1, 3, 8])
def test_a_room_has_its_tensors_side_by_side_and_overlapping_nowhere(images, dtype):
    room = fresh_room(Shape(images, 5, dtype))
    tensors = [room.images, room.labels, room.mixup, room.box]
    assert [tuple(tensor.shape) for tensor in tensors] == [(images, 5, 5, 3), (images,), (images,), (4,)]
    assert [tensor.dtype for tensor in tensors] == [dtype, torch.int64, torch.float32, torch.int64]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [tensor.unique().tolist() for tensor in tensors] == [[1], [2], [3], [4]]


def test_a_slot_is_lent_again_only_when_its_copy_is_done():
    ring, shape = Ring(pin=False), Shape(2, 4)
    first, second = ring(shape), ring(shape)
    assert first.images.data_ptr() != second.images.data_ptr()
    copied = Copy()
    ring.give_back(first.images.permute(0, 3, 1, 2), copied=copied)
    assert not copied.waited
    again = ring(shape)
    assert copied.waited
    assert again.images.data_ptr() == first.images.data_ptr()
    assert ring.allocated == 2


def test_a_thousand_batches_take_as_many_slots_as_are_out_at_once():
    ring, out = Ring(pin=False), []
    for _ in range(1000):
        out.append(ring(Shape(2, 4)))
        if len(out) == 5:
            ring.give_back(out.pop(0).images, copied=Copy())
    assert ring.allocated == 5


def test_slots_of_another_size_are_given_up_not_cut():
    ring = Ring(pin=False)
    ring.give_back(ring(Shape(2, 4)).images, copied=Copy())
    assert ring(Shape(3, 4)).images.shape == (3, 4, 4, 3)


def test_a_slot_that_nobody_gives_back_is_freed():
    ring = Ring(pin=False)
    room = ring(Shape(2, 4))
    alive = weakref.ref(room.images)
    del room
    gc.collect()
    assert alive() is None
