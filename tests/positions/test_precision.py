"""Numbers of an encoding stay in float32 and in bounds, whatever an engine does to them."""

import math

import torch

from megatron.positions import DistanceBias, Shape, within

SHAPE = Shape(heads=4, head_dim=8, hidden=32, train_length=64)


def test_bounds_hold_forward_and_let_the_gradient_pass():
    x = torch.tensor([-1.0, 0.5, 3.0], requires_grad=True)
    torch.testing.assert_close(within(x, 0.01, 2.0), torch.tensor([0.01, 0.5, 2.0]))
    far = within(torch.tensor([-100.0, -3.0, 1e-7]), 1e-6, math.inf)
    assert torch.equal(far, torch.full((3,), 1e-6))
    within(x, 0.01, 2.0).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3))


def test_modules_inside_an_encoding_compute_in_float32_whatever_an_engine_does_to_them():
    class Net(DistanceBias):
        def __init__(self, shape: Shape) -> None:
            super().__init__(shape)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(1, 5), torch.nn.Tanh(), torch.nn.Linear(5, shape.heads)
            )

        def log_kernel(self, distance: torch.Tensor) -> torch.Tensor:
            return self.net(distance[:, None] / 10).t()

    position = Net(SHAPE)
    exact = position.distance_bias(40)
    torch.testing.assert_close(position.bfloat16().distance_bias(40), exact, rtol=0, atol=0)
    assert position.learned().keys() == {"net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"}
    # As DeepSpeed's bf16 engine and our trainer do.
    for _, name, parameter in position.own_parameters():
        position.exact[name] = parameter.detach().clone()
        parameter.data = parameter.data.bfloat16()
    table = position.distance_bias(40)
    torch.testing.assert_close(table, exact, rtol=0, atol=0)
    table.sum().backward()
    assert all(parameter.grad is not None for parameter in position.parameters())
