"""Chooses a model's kernels by what the device, precision, installed packages and the model itself allow.

The choice changes speed and memory, and the result only by rounding. A kernel requested by name that cannot be
used is refused before anything starts; `auto` takes the next best and says why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unisono import KernelError, choose_kernel
from unisono_language import experts
from unisono_language.settings import ModelGroup

_MIN_FLEX_WIDTH = 16  # features of a head; torch's templates multiply blocks no narrower
_DROPOUTS = ("attention_dropout", "attn_pdrop")


@dataclass(frozen=True)
class Kernels:
    """What was chosen, by the names of the settings.

    Attributes:
        attention: `eager`, `sdpa`, `flex` or `flash`.
        experts: `grouped` or `loop`; empty for models without experts.
        why: by setting, why `auto` did not choose a better one.
    """

    attention: str
    experts: str = ""
    why: tuple[tuple[str, str], ...] = ()

    @property
    def describe(self) -> dict[str, str]:
        """For the console."""
        reasons = dict(self.why)
        chosen = {"attention": self.attention, **({"experts": self.experts} if self.experts else {})}
        return {name: f"{kernel} ({reasons[name]})" if name in reasons else kernel for name, kernel in chosen.items()}

    def use(self, model: Any) -> None:
        """Make a model use them instead of the plain kernels that every device has."""
        if self.attention != "eager":
            names = {"flex": "flex_attention", "flash": _find_flash()}
            model.set_attn_implementation(names.get(self.attention, self.attention))
        if self.experts == "grouped":
            experts.register_grouped()
            model.set_experts_implementation(experts.GROUPED)


def select_kernels(config: ModelGroup, model: Any, device: str, precision: str) -> Kernels:
    """The kernels of a model, which may be without memory (`meta`), on a device such as `cpu` or `cuda`.

    Raises:
        KernelError: naming key, reason and remedy.
    """
    order = ("flash", "sdpa", "flex", "eager")
    against = {kernel: "; ".join(_obstacles(kernel, model, device, precision)) for kernel in order}
    attention, why_attention = choose_kernel("model.attention", config.attention, against, expected="sdpa")
    how = why_experts = ""
    if experts.has_experts(model):
        of_experts = {"grouped": experts.grouped_obstacle(model, device, precision), "loop": ""}
        how, why_experts = choose_kernel("model.experts", config.experts, of_experts, expected="grouped")
    elif config.experts != "auto":
        raise KernelError(
            f"model.experts={config.experts}: transformers' {model.config.get_text_config().model_type} has no stacked "
            "experts to choose a kernel for; leave it at auto"
        )
    reasons = {"attention": why_attention, "experts": why_experts}
    return Kernels(attention, how, tuple((name, why) for name, why in reasons.items() if why))


def _obstacles(kernel: str, model: Any, device: str, precision: str) -> Iterator[str]:
    """Reasons why an attention kernel cannot be used; none if it can."""
    text = model.config.get_text_config()
    supported = {"sdpa": model._supports_sdpa, "flex": model._supports_flex_attn, "flash": model._supports_flash_attn}
    if not supported.get(kernel, True) or (kernel != "eager" and not model._can_set_attn_implementation()):
        yield f"transformers has no attention of this kind for {text.model_type}"
    dropout = next((rate for key in _DROPOUTS if (rate := getattr(text, key, 0.0))), 0.0)
    match kernel:
        case "flex":
            if device == "cpu":
                yield "torch's flex_attention has no backward pass on a CPU"
            if precision == "fp64":
                yield "it has no fp64 kernel"
            if dropout:
                yield f"it has no attention dropout, but this model's is {dropout:g}"
            if (width := _head_width(text)) < _MIN_FLEX_WIDTH:
                yield f"it needs heads of at least {_MIN_FLEX_WIDTH} features, but this model's have {width}"
        case "flash":
            if device != "cuda":
                yield f"it needs a CUDA or ROCm device, but this run is on {device}"
            if precision != "bf16":
                yield f"it has no {precision} kernel, only half precision (train.precision=bf16)"
            if not _find_flash():
                yield "the package flash-attn is not installed"


def _head_width(text: Any) -> int:
    heads = getattr(text, "num_attention_heads", 0) or 1
    return int(getattr(text, "head_dim", None) or text.hidden_size // heads)


def _find_flash() -> str:
    """Transformers' name of the installed flash attention; empty without one.

    transformers would also fetch one from a hub through its `kernels` package. Nothing is downloaded here.
    """
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_2_available():
        return "flash_attention_2"
    return "flash_attention_3" if is_flash_attn_3_available() else ""
