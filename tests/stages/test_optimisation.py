"""Parameter groups: every parameter by its exact name."""

import pytest
import torch

from palimpsa_surgery.stages.optimisation import FROZEN, build_optimizer, parameters_by_treatment


def test_each_parameter_is_treated_as_it_must_be(small_model, small_recipe):
    stage = small_recipe.stages[0]
    optimizer = build_optimizer(small_model, stage)
    settings = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    rate, importance, decay = stage.learning_rate, stage.importance_learning_rate, stage.weight_decay
    for name, parameter in small_model.named_parameters():
        leaf = name.split("mixer.")[-1]
        if leaf == "Ip_log":
            assert id(parameter) not in settings
            assert not parameter.requires_grad
        elif leaf in ("b_rank_proj.weight", "b_proj.weight"):
            assert settings[id(parameter)] == (importance, decay), name
        elif leaf == "b_scale":
            assert settings[id(parameter)] == (importance, 0.0), name
        elif leaf in ("A_log", "D", "dt_bias", "conv1d.bias") or parameter.ndim == 1:
            assert settings[id(parameter)] == (rate, 0.0), name
        else:
            assert settings[id(parameter)] == (rate, decay), name
    assert optimizer.defaults["betas"] == stage.betas


def test_nothing_is_left_out_or_counted_twice(small_model):
    groups = parameters_by_treatment(small_model)
    counted = [parameter for parameters in groups.values() for parameter in parameters]
    assert len(counted) == len({id(parameter) for parameter in counted}) == len(list(small_model.parameters()))
    assert len(groups[FROZEN]) == 1


def test_unknown_parameter_is_an_error(small_model):
    small_model.backbone.layers[0].mixer.A_log_extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"how to train backbone\.layers\.0\.mixer\.A_log_extra"):
        parameters_by_treatment(small_model)
