"""SGD with one tensor for gradient and velocity against torch's SGD with two."""

import copy

import pytest
import torch

from falconet.optim.optimizers import CombinedSGD

RATES = [0.01 * (1 + update % 7) for update in range(20)]


def pair(model):
    other = copy.deepcopy(model)
    options = {"lr": 0.0, "momentum": 0.9, "weight_decay": 0.01}
    return (model, CombinedSGD(model.parameters(), **options)), (other, torch.optim.SGD(other.parameters(), **options))


def train(model, optimizer, accumulate, updates):
    for update in updates:
        for group in optimizer.param_groups:
            group["lr"] = RATES[update]
        optimizer.zero_grad()
        for micro_batch in range(3):
            accumulate(model, 3 * update + micro_batch)
        optimizer.step()


def test_twenty_updates_of_three_micro_batches_equal_torchs_sgd(network, accumulate):
    (ours, combined), (theirs, separate) = pair(network())
    train(ours, combined, accumulate, range(20))
    train(theirs, separate, accumulate, range(20))
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6, msg=name)
        torch.testing.assert_close(p.grad, separate.state[q]["momentum_buffer"], rtol=1e-5, atol=1e-5)


def test_the_first_update_is_torchs_exactly(network, accumulate):
    (ours, combined), (theirs, separate) = pair(network())
    train(ours, combined, accumulate, range(1))
    train(theirs, separate, accumulate, range(1))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradient_and_velocity_share_their_memory(network, accumulate):
    model = network()
    optimizer = CombinedSGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, accumulate, range(1))
    addresses = [p.grad.data_ptr() for p in model.parameters()]
    train(model, optimizer, accumulate, range(1, 4))
    assert [p.grad.data_ptr() for p in model.parameters()] == addresses
    assert [optimizer.state[p]["velocity"].data_ptr() for p in model.parameters()] == addresses


def test_a_loaded_state_dict_puts_the_velocity_back_and_continues_bit_for_bit(network, accumulate):
    (straight, optimizer), _ = pair(network())
    train(straight, optimizer, accumulate, range(5))
    restored = copy.deepcopy(straight)
    saved = copy.deepcopy(optimizer.state_dict())
    train(straight, optimizer, accumulate, range(5, 10))

    again = CombinedSGD(restored.parameters(), lr=0.0, momentum=0.9, weight_decay=0.01)
    again.load_state_dict(saved)
    for index, p in enumerate(restored.parameters()):
        assert torch.equal(p.grad, saved["state"][index]["velocity"])
    train(restored, again, accumulate, range(5, 10))
    for p, q in zip(straight.parameters(), restored.parameters(), strict=True):
        assert torch.equal(p, q)


def test_gradients_dropped_by_others_do_not_lose_the_velocity(network, accumulate):
    (kept, combined), _ = pair(network())
    (dropped, other), _ = pair(network())
    train(kept, combined, accumulate, range(3))
    train(dropped, other, accumulate, range(2))
    dropped.zero_grad(set_to_none=True)
    train(dropped, other, accumulate, range(2, 3))
    for p, q in zip(kept.parameters(), dropped.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_without_momentum_it_is_plain_sgd_and_keeps_nothing(set_to_none):
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = CombinedSGD([weight], lr=0.5, momentum=0.0)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        (2.0 * weight.sum()).backward()
        optimizer.step()
    assert weight.tolist() == [-2.0, -1.0]
    assert not optimizer.state


def test_a_second_zero_grad_without_an_update_is_refused(network, accumulate):
    model = network()
    optimizer = CombinedSGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, accumulate, range(1))
    optimizer.zero_grad()
    with pytest.raises(AssertionError, match="one tensor"):
        optimizer.zero_grad()
