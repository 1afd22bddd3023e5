"""The first place that is not finite is found and named."""

import harness
import pytest
import torch
from torch import nn

from fusedtrain.train.nonfinite import NonFinite, find_nonfinite


class Root(nn.Module):
    """Its square root has an infinite gradient at 0, its output is finite."""

    def forward(self, x):
        return x.sqrt()


class Spoil(nn.Module):
    """Infinite in the rows whose first number is 7."""

    def forward(self, x):
        return torch.where(x[:, :1] == 7, torch.inf, x)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Sequential(*middle), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Dropout(0.5)
    )


def images() -> torch.Tensor:
    return torch.rand(6, 3) + 1


def find(model, x, **options) -> NonFinite | None:
    return find_nonfinite(model, lambda: model(x).square().mean(), [x], **options)


def test_a_healthy_batch_gives_nothing_and_leaves_everything_as_it_was():
    model, x = net(nn.Linear(3, 3), harness.ReplacedMean()), images()
    model(x).sum().backward()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    values = [grad.clone() for grad in grads]
    random = torch.get_rng_state()
    assert find(model, x) is None
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert all(p.grad is grad and torch.equal(grad, value) for p, grad, value in zip(model.parameters(), grads, values))
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def test_an_output_names_the_innermost_module_and_the_samples():
    x = images()
    x[[1, 4], 0] = 7
    found = find(net(nn.Identity(), Spoil(), nn.Linear(3, 3)), x)
    assert found == NonFinite("output", "1.1", "Spoil", (1, 4))
    assert str(found) == "the output of 1.1 (Spoil) is not finite for samples 1, 4 of the batch"


def test_a_gradient_names_the_module_and_the_samples():
    x = images()
    x[2] = 0
    model = net(nn.Linear(3, 3, bias=False), Root())
    with torch.no_grad():
        model[1][0].weight.copy_(torch.eye(3))
    found = find(model, x)
    assert found == NonFinite("gradient", "1.0", "Linear", (2,))
    assert str(found) == "the gradient of the output of 1.0 (Linear) is not finite for samples 2 of the batch"


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1e-30))

    def forward(self, x):
        return x * self.scale


def test_a_gradient_of_a_parameter_alone():
    found = find(nn.Sequential(nn.Identity(), Scale()), torch.full((6, 3), torch.finfo(torch.float32).max))
    assert str(found) == "the gradient of 1.scale (parameter) is not finite"


def test_gradients_that_overflow_under_a_scale():
    model, x = nn.Linear(3, 1).half(), images().half()
    loss = lambda: model(x).float().mean()  # noqa: E731
    assert find_nonfinite(model, loss, [x]) is None
    assert find_nonfinite(model, loss, [x], scale=2.0**20).what == "gradient"


def test_inputs_and_parameters_come_first():
    model, x = net(nn.Linear(3, 3)), images()
    x[3, 1] = torch.nan
    assert str(find(model, x)) == "input 0 of the batch is not finite for samples 3 of the batch"
    with torch.no_grad():
        model[2].weight[1] = torch.inf
    assert str(find(model, images())) == "parameter 2.weight is not finite"


def test_a_loss_whose_inputs_are_finite():
    model, x = nn.Linear(3, 3), images()
    found = find_nonfinite(model, lambda: (model(x).mean() * 0).log(), [x])
    assert (found.what, str(found)) == ("loss", "the loss is not finite")


@pytest.mark.parametrize("output", [dict, list, tuple])
def test_outputs_in_containers_are_seen(output):
    class Heads(nn.Module):
        def forward(self, x):
            parts = {"good": x, "bad": x / 0}
            return parts if output is dict else output(parts.values())

    model, x = Heads(), images()
    loss = lambda: sum(t.sum() for t in (model(x).values() if output is dict else model(x)))  # noqa: E731
    assert find_nonfinite(model, loss, [x]) == NonFinite("output", "the model", "Heads", tuple(range(6)))
