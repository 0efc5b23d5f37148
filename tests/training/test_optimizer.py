import torch

from models.gpt import GPT
from tests.cli import make_tiny_job
from training.optimizer import make_optimizer, set_lr


def test_decay_is_on_matrices_alone_and_no_parameter_is_left_out() -> None:
    job = make_tiny_job("model.norm=layernorm", "model.bias=true", "model.positions=learned")
    model = GPT(job.config.model)
    optimizer = make_optimizer(model.parameters(), job.config.optim)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] > 0 for p in group["params"]}
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == (not name.endswith("bias") and "norm" not in name), name
    everything = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(everything) == sorted(id(p) for p in model.parameters())


def test_a_step_is_adamw_as_its_paper_has_it() -> None:
    config = make_tiny_job("optim.betas=[0.8,0.9]", "optim.weight_decay=0.5", "optim.eps=1e-3").config.optim
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 2.0)
    torch.nn.init.constant_(model.bias, 2.0)
    optimizer = make_optimizer(model.parameters(), config)
    set_lr(optimizer, 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    optimizer.step()
    # After one step both moments, corrected for their bias, are the gradient and its square.
    update = 0.1 * 3.0 / (3.0 + 1e-3)
    torch.testing.assert_close(model.weight.item(), 2.0 * (1 - 0.1 * 0.5) - update, rtol=1e-6, atol=0)
    torch.testing.assert_close(model.bias.item(), 2.0 - update, rtol=1e-6, atol=0)
