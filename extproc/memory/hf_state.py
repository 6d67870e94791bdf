"""Recurrent state of one layer from the state fields of a ``config.json``.

Owns the spellings of Mamba 1 and 2, delta-net, KDA, lightning attention and short convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from extproc.memory.geometry import StateShape
from extproc.memory.hf_fields import Fields, head_dim, text_fields


def state_shape(config: Mapping[str, object], where: str) -> StateShape:
    """Recurrent state of one layer from the state fields alone (models given by groups instead of a layer list)."""
    return state_of(text_fields(config, where))


def state_of(fields: Fields) -> StateShape:
    """State sizes by the first rule whose field is there; GeometryError where none is."""
    for present, shape in _STATE_RULES:
        if present(fields):
            return shape(fields)
    raise fields.fault(
        "layer_types", f"has recurrent layers, but model_type {fields.model_type!r} names no state sizes"
    )


def _delta_state(f: Fields) -> StateShape:
    v_heads, v_dim, k_dim = (f.integer(n, minimum=1) for n in
                             ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"))  # fmt: skip
    return StateShape(v_heads * v_dim, f.integer("linear_num_key_heads", minimum=1), 2 * k_dim,
                      f.integer("linear_conv_kernel_dim", minimum=1), v_heads * v_dim * k_dim,
                      f.text("mamba_ssm_dtype") or None)  # fmt: skip


def _kda_state(f: Fields) -> StateShape:
    c = f.mapping("linear_attn_config")
    heads, dim = c.integer("num_heads", minimum=1), c.integer("head_dim", minimum=1)
    return StateShape(heads * dim, heads, 2 * dim, c.integer("short_conv_kernel_size", minimum=1), heads * dim * dim)


def _mamba2_state(heads: str, dim: str, groups: str, state: str, kernel: str) -> Callable[[Fields], StateShape]:
    def shape(f: Fields) -> StateShape:
        inner = f.integer(heads, minimum=1) * f.integer(dim, minimum=1)
        d_state = f.integer(state, minimum=1)
        return StateShape(inner, f.integer(groups, minimum=1), 2 * d_state, f.integer(kernel, minimum=1), inner * d_state,
                          f.text("mamba_ssm_cache_dtype") or f.text("mamba_ssm_dtype") or None, mamba=True)  # fmt: skip

    return shape


def _mamba1_state(f: Fields) -> StateShape:
    inner = f.integer("mamba_expand", minimum=1) * f.integer("hidden_size", minimum=1)
    return StateShape(
        inner, 0, 0, f.integer("mamba_d_conv", minimum=1), inner * f.integer("mamba_d_state", minimum=1), mamba=True
    )


def _conv_state(f: Fields) -> StateShape:
    return StateShape(
        f.integer("conv_dim", f.integer("hidden_size", minimum=1), minimum=1),
        0,
        0,
        f.integer("conv_L_cache", minimum=1),
        0,
    )


def _lightning_state(f: Fields) -> StateShape:
    dim = head_dim(f)
    return StateShape(0, 0, 0, 1, f.integer("num_attention_heads", minimum=1) * dim * dim)


_STATE_RULES: tuple[tuple[Callable[[Fields], bool], Callable[[Fields], StateShape]], ...] = (
    (lambda f: f.has("linear_num_value_heads"), _delta_state),
    (lambda f: f.has("linear_attn_config"), _kda_state),
    (lambda f: f.has("mamba_n_heads"),
     _mamba2_state("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")),
    (lambda f: f.has("mamba_num_heads"),
     _mamba2_state("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")),
    (lambda f: f.has("mamba_expand"), _mamba1_state),
    (lambda f: f.has("conv_L_cache"), _conv_state),
    (lambda f: f.has("attn_type_list"), _lightning_state),
)  # fmt: skip
