"""Modules that no clipping of single samples protects."""

from torch import nn

from dprc.errors import PrivacyError


def refuse_parts(path: str, module: nn.Module) -> None:
    """Refuse parts of a sharded model in a loop, which would gather them once for each sample.

    Args:
        path: Name in the model of the module that is looped over.
        module: The module, with all inside it.

    Raises:
        PrivacyError: There is one.
    """
    for inner_path, inner in module.named_modules():
        if inner is not module and hasattr(inner, "set_reshard_after_forward"):
            raise PrivacyError(
                f"{path or 'model'} ({type(module).__name__}): runs its samples one by one, and "
                f"{inner_path} inside is a part of the sharded model. Freeze its own parameters, "
                "or name parts= of dprc.distributed.shard() outside it."
            )


def refuse_coupling(path: str, module: nn.Module) -> None:
    """Refuse a module that lets samples reach each other, or what is kept of the model.

    Args:
        path: Its name in the model.
        module: The module, with all inside it.

    Raises:
        PrivacyError: It does.
    """
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise PrivacyError(
            f"{path} ({type(module).__name__}): batch normalisation mixes the samples of a batch, "
            "so that no per-sample clipping bounds one sample's influence. Replace it by "
            "GroupNorm or LayerNorm."
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        raise PrivacyError(
            f"{path} ({type(module).__name__}): running statistics leave the training without "
            "noise. Set track_running_stats=False."
        )
    if getattr(module, "max_norm", None) is not None and isinstance(
        module, (nn.Embedding, nn.EmbeddingBag)
    ):
        raise PrivacyError(
            f"{path or 'model'}: max_norm={module.max_norm} rewrites the weight of whatever rows "
            "the batch looks up, without noise. Set it to None."
        )
    if path.endswith("relative_attention_bias") and any(
        p.requires_grad for p in module.parameters()
    ):
        raise PrivacyError(
            f"{path}.weight: one table of relative positions serves all samples at once, so its "
            "per-sample gradient is not seen. Freeze it with requires_grad_(False)."
        )
    if getattr(getattr(module, "config", None), "output_router_logits", False):
        raise PrivacyError(
            f"{path or 'model'}: config.output_router_logits adds a load-balancing loss over the "
            "whole batch, which couples samples. Set it to False."
        )
