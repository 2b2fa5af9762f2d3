"""Activation checkpointing: a layer keeps its input, and computes the rest again when its gradient is asked for."""

from contextlib import nullcontext

from transformers.modeling_layers import GradientCheckpointingLayer

from fewstep.errors import UserError
from fewstep.students.decoding.gated import noisy


def checkpoint_activations(model) -> None:
    """Let every layer of `model` recompute its activations; call it after the model's last `eval()`.

    Raises:
        UserError: its class has no layer that can.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise UserError(
            f"engine.activation_checkpointing: {type(model).__name__} has no layer that can recompute its activations; "
            "set it to false"
        )
    gate = getattr(model, "fewstep_gate", None)

    def contexts():
        """Return the contexts of the forward and of its repetition, in which a gate must be as open as it is now."""
        return nullcontext(), nullcontext() if gate is None else noisy(model, gate.num_noisy)

    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    for layer in layers:
        layer.training = True  # what transformers asks for; of the layer alone: nothing in it may drop out
