"""The forward pass of peft's DoRA on a linear layer (arXiv 2402.09353), at about the cost of LoRA's."""

from peft.tuners.lora.variants import DoraLinearVariant


class Dora(DoraLinearVariant):
    """peft finds the norms of the rows in each forward pass, by way of B A times an identity matrix; here
    they are a buffer, which adapters.measure_rows fills. Values, gradients, merging and files are peft's. For
    adapters without a dropout of their own, as adapters.put_on makes them."""

    @staticmethod
    def forward(module, active_adapter, x, result, **kwargs):
        """m / |W + s B A| (W x + s B A x) + bias. x: (..., in); result, the frozen layer's: (..., out)"""
        A, B, scaling = (of[active_adapter] for of in (module.lora_A, module.lora_B, module.scaling))
        magnitude, bias = module.lora_magnitude_vector[active_adapter], module.get_base_layer().bias
        scale = magnitude.weight / magnitude.row_lengths
        y = scale * (result + B(scaling * A(x)))
        return y if bias is None else y + (1 - scale) * bias
