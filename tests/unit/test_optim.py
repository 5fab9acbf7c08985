"""One step of each optimizer against NumPy, the two groups, and the mask for non-finite steps."""

import numpy as np
import pytest
import torch
from torch import nn

from pipeline.config import OptimizerSection
from pipeline.optim import LARS, build_optimizer, effective_rates

NAMES = ["lars", "sgd", "adamw"]
BATCH = 512  # twice the reference batch: effective rates are twice the section's


def make(name: str, dtype: torch.dtype = torch.float64, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model with gradients, and its optimizer with rates 0.2 and 0.04."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)).to(dtype)
    section = OptimizerSection(name=name, lr_weights=0.1, lr_biases=0.02, weight_decay=0.3, **options)
    optimizer = build_optimizer(section, model.named_parameters(), BATCH)
    give_gradients(model)
    return model, optimizer


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


def numpy_parameters(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def step_and_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    give_gradients(model)
    gradients = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    optimizer.step()
    return gradients


def assert_equal(model: nn.Module, expected: dict[str, np.ndarray]) -> None:
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-12, atol=1e-14, err_msg=name)


def test_lars_equals_numpy_and_leaves_biases_alone():
    model, optimizer = make("lars", momentum=0.8, trust_coefficient=0.01)
    expected = numpy_parameters(model)
    momenta = {name: np.zeros_like(p) for name, p in expected.items()}
    for _ in range(3):
        for name, g in step_and_gradients(model, optimizer).items():
            p = expected[name]
            if p.ndim > 1:
                update = g + 0.3 * p
                update *= 0.01 * np.linalg.norm(p) / np.linalg.norm(update)
                rate = 0.2
            else:
                update, rate = g, 0.04
            momenta[name] = 0.8 * momenta[name] + update
            expected[name] = p - rate * momenta[name]
        assert_equal(model, expected)


def test_sgd_equals_numpy():
    model, optimizer = make("sgd")
    expected = numpy_parameters(model)
    momenta = {name: np.zeros_like(p) for name, p in expected.items()}
    for _ in range(3):
        for name, g in step_and_gradients(model, optimizer).items():
            p = expected[name]
            decay, rate = (0.3, 0.2) if p.ndim > 1 else (0.0, 0.04)
            momenta[name] = 0.9 * momenta[name] + g + decay * p
            expected[name] = p - rate * momenta[name]
        assert_equal(model, expected)


def test_adamw_equals_numpy():
    model, optimizer = make("adamw", betas=(0.7, 0.9))
    expected = numpy_parameters(model)
    first = {name: np.zeros_like(p) for name, p in expected.items()}
    second = {name: np.zeros_like(p) for name, p in expected.items()}
    for t in (1, 2, 3):
        for name, g in step_and_gradients(model, optimizer).items():
            p = expected[name]
            decay, rate = (0.3, 0.2) if p.ndim > 1 else (0.0, 0.04)
            first[name] = 0.7 * first[name] + 0.3 * g
            second[name] = 0.9 * second[name] + 0.1 * g**2
            m, v = first[name] / (1 - 0.7**t), second[name] / (1 - 0.9**t)
            expected[name] = p * (1 - rate * decay) - rate * m / (np.sqrt(v) + 1e-8)
        assert_equal(model, expected)


@pytest.mark.parametrize("zero", ["parameter", "update"])
def test_lars_takes_factor_one_where_a_norm_is_zero(zero):
    p = torch.zeros(2, 3) if zero == "parameter" else torch.ones(2, 3)
    gradient = torch.zeros(2, 3) if zero == "update" else torch.full((2, 3), 4.0)
    p.grad = gradient
    LARS([p], lr=0.5, weight_decay=0.0).step()
    expected = torch.full((2, 3), -2.0) if zero == "parameter" else torch.ones(2, 3)
    assert torch.equal(p, expected)


@pytest.mark.parametrize("name", NAMES)
def test_groups_and_frozen_parameters(name):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    model[0].weight.requires_grad_(False)
    section = OptimizerSection(name=name, weight_decay=0.5)
    weights, biases = build_optimizer(section, model.named_parameters(), 1024).param_groups
    assert [p.shape for p in weights["params"]] == [(2, 4)]
    assert [p.shape for p in biases["params"]] == [(4,), (4,), (4,)]
    assert (weights["name"], weights["base_lr"], weights["weight_decay"]) == ("weights", 0.8, 0.5)
    assert (biases["name"], biases["base_lr"], biases["weight_decay"]) == ("biases", 0.0192, 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_group_may_be_empty(name):
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = build_optimizer(OptimizerSection(name=name), [("p", p)], 256)
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert (p < 1).all()


def test_rates_follow_the_global_batch_only():
    section = OptimizerSection(lr_weights=0.2, lr_biases=0.0048)
    assert effective_rates(section, 2048) == pytest.approx((1.6, 0.0384))
    unscaled = OptimizerSection(lr_weights=0.2, lr_biases=0.0048, reference_batch=None)
    assert effective_rates(unscaled, 2048) == (0.2, 0.0048)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [t for values in optimizer.state_dict()["state"].values() for t in values.values()]
    return [t.clone() for t in [*model.parameters(), *state]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("flag", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_found_inf_masks_parameters_and_state(name, value, flag, dtype):
    model, optimizer = make(name, dtype)
    optimizer.step()
    before = snapshot(model, optimizer)
    give_gradients(model)
    model[3].weight.grad[0, 0] = value
    model[3].bias.grad[1] = value
    optimizer.found_inf = torch.tensor(flag)
    optimizer.step()
    after = snapshot(model, optimizer)
    assert len(before) > 6 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))

    give_gradients(model)
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert not any(torch.equal(a, b) for a, b in zip(after, snapshot(model, optimizer), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_masked_first_step_is_as_if_it_never_was(name):
    (model, optimizer), (other, straight) = make(name), make(name)
    finite = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, float("nan"))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    for p, gradient in zip(model.parameters(), finite, strict=True):
        p.grad = gradient
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    straight.step()
    for a, b in zip(snapshot(model, optimizer), snapshot(other, straight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_grad_scaler_unscales_and_skips(name):
    (model, optimizer), (other, straight) = make(name), make(name)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # creates the scale, as the loop does with the loss
    for p in model.parameters():
        p.grad *= 1024
    scaler.step(optimizer)
    scaler.update()
    straight.step()
    for a, b in zip(snapshot(model, optimizer), snapshot(other, straight), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)

    before = snapshot(model, optimizer)
    model[0].weight.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(model, optimizer), strict=True))
    assert scaler.get_scale() == 512


@pytest.mark.parametrize("name", NAMES)
def test_survives_being_rebuilt_from_its_groups_by_a_subclass(name):
    """What `hvd.DistributedOptimizer` does: a subclass made at run time, given `param_groups` and nothing else."""
    (model, optimizer), (other, straight) = make(name), make(name)

    def step(self, closure=None):
        return super(self.__class__, self).step(closure)

    wrapped = type("Wrapped", (type(optimizer),), {"step": step})(optimizer.param_groups)
    for _ in range(2):
        wrapped.step()
        straight.step()
    for a, b in zip(snapshot(model, wrapped), snapshot(other, straight), strict=True):
        assert torch.equal(a, b)
    assert wrapped._step_supports_amp_scaling


@pytest.mark.parametrize("name", NAMES)
def test_state_goes_through_a_weights_only_file(name, tmp_path):
    model, optimizer = make(name)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, tmp_path / "state.pth")
    loaded = torch.load(tmp_path / "state.pth", weights_only=True)
    other, resumed = make(name)
    other.load_state_dict(loaded["model"])
    resumed.load_state_dict(loaded["optimizer"])
    gradients = [torch.randn_like(p) for p in model.parameters()]
    for net, opt in ((model, optimizer), (other, resumed)):
        for p, gradient in zip(net.parameters(), gradients, strict=True):
            p.grad = gradient.clone()
        opt.step()
    for a, b in zip(snapshot(model, optimizer), snapshot(other, resumed), strict=True):
        assert torch.equal(a, b)


def test_a_closure_is_called_with_gradients_on():
    p = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([p], lr=1.0)

    def closure():
        loss = (p**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4
    assert not torch.equal(p, torch.ones(2, 2))
