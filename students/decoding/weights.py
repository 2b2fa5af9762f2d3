"""How a model's weights lie in memory while it decodes."""

import torch


def column_major(model):
    """Lay every linear weight on a CPU out column by column; values, names and shapes stay. Returns the model.

    With one thread a product of a few rows, which is what the forward of a block is, then need not
    repack the weight; with two it makes no difference (benchmarks/linear_layout.py). Do not save or
    train the model afterwards: both expect rows.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.device.type == "cpu" and module.weight.is_contiguous():
            module.weight.data = module.weight.data.t().contiguous().t()
    return model
