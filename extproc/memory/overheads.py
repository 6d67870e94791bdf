"""Everything in device memory that is neither weights nor KV, as named terms.

Owns coarse but sourced figures for what an engine takes before the first request; measured values replace them once
an engine has started. Figures: docs/memory.md (start-up logs of ten runs).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from extproc.memory.caches import GIB, MIB, compute_buffer_bytes
from extproc.memory.engines import EngineRules, PoolStyle
from extproc.memory.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Term:
    """One named amount with its formula and where that comes from."""

    name: str
    bytes: int
    formula: str
    source: str


#: Bytes of CUDA context, driver and allocator of one process on one device.
CUDA_CONTEXT_BYTES = 500 * MIB
#: Torch-external memory vLLM logs on one device; NCCL's share with tensor parallelism (0.39 to 1.25 GiB seen).
NON_TORCH_BYTES = int(0.15 * GIB)
NCCL_BYTES = int(0.5 * GIB)
#: Bytes per (sequence x vocabulary entry) of vLLM's profiling run: logits, their f32 copy and the sampler's sort. One
#: figure explains eight logged peaks (4.76 to 7.38 GiB at 1024 sequences, 1.4 at 256) within 3 %.
SAMPLER_BYTES = 39
#: Allocator slack of a preallocating engine: the low end of the 10 to 20 % that fragmentation takes elsewhere.
SLACK_FRACTION = 0.10


def default_max_sequences(total_bytes: int, gpu_name: str = "") -> int:
    """vLLM's default ``max_num_seqs``: 1024 on cards of 70 GiB and more except A100, else 256."""
    return 1024 if total_bytes >= 70 * GIB and "a100" not in gpu_name.lower() else 256


def activation_term(geometry: Geometry, batched_tokens: int, max_sequences: int) -> Term:
    """Peak activation of one step on one device (vLLM, SGLang): sampler over all sequences + hidden states in flight."""
    amount = SAMPLER_BYTES * max_sequences * geometry.vocab + 4 * batched_tokens * geometry.hidden
    return Term("activation", amount, f"{SAMPLER_BYTES} B x {max_sequences} sequences x {geometry.vocab} vocabulary + 4 B x"
                f" {batched_tokens} batched tokens x {geometry.hidden} hidden", "fitted on vLLM start-up logs, within 3 %")  # fmt: skip


def graph_term(geometry: Geometry, tp: int) -> Term:
    """CUDA graphs of one device: 20 MiB a layer, a quarter more for each further tensor-parallel rank (coarse)."""
    amount = int(20 * MIB * geometry.layers * (1 + 0.25 * (tp - 1)))
    return Term("cuda_graphs", amount, f"20 MiB x {geometry.layers} layers x (1 + 0.25 x {tp - 1})",
                "vLLM start-up logs, 0.1 to 3.5 GiB; coarse")  # fmt: skip


def engine_terms(geometry: Geometry, rules: EngineRules, *, tp: int, batched_tokens: int, max_sequences: int,
                 n_ctx: int = 0, n_ubatch: int = 512, flash: bool = True) -> tuple[Term, ...]:  # fmt: skip
    """Static terms of one device of a replica, weights and KV excluded."""
    if rules.style is PoolStyle.CELLS:
        buffer = compute_buffer_bytes(
            geometry.hidden, geometry.heads, geometry.vocab, n_ctx, n_ubatch=n_ubatch, flash=flash
        )
        rule = "max(4u(e + vocab), u(6c + 32e))" if flash else "max(4u(e + vocab), 4u(1 + 4e + c(1 + h)))"
        return (
            Term("compute_buffer", buffer, f"{rule}, u={n_ubatch} e={geometry.hidden} c={n_ctx} h={geometry.heads}",
                 "llama.cpp graph, exact on 11 logs"),
            Term("cuda_context", CUDA_CONTEXT_BYTES, "500 MiB a process and device", "measured order of magnitude"),
        )  # fmt: skip
    terms = [
        activation_term(geometry, batched_tokens, max_sequences),
        Term("non_torch", NON_TORCH_BYTES, "0.15 GiB a device", "vLLM start-up logs"),
    ]
    if tp > 1:
        terms.append(
            Term("nccl", NCCL_BYTES, "0.5 GiB a device with tensor parallelism", "vLLM start-up logs, 0.39 to 1.25")
        )
    terms.append(graph_term(geometry, tp))
    return tuple(terms)


def lora_bytes(
    linears: Iterable[tuple[int, int]], layers: int, rank: int, max_loras: int, experts: int = 1, element_bytes: int = 2
) -> int:
    """Adapter slots, taken at start and never per adapter: max_loras x rank x (in + out) x 2 B per target linear.

    ``linears`` are (in, out) of one layer's targets. Source: vllm lora/layers.
    """
    return max_loras * rank * element_bytes * layers * experts * sum(i + o for i, o in linears)


def lora_term(geometry: Geometry, rank: int, max_loras: int) -> Term:
    """LoRA slots with attention and feed-forward targets, from the geometry's widths (feed-forward taken as 4 x hidden)."""
    h = geometry.hidden
    amount = lora_bytes(
        [(h, h), (h, h), (h, h), (h, h), (h, 4 * h), (h, 4 * h), (4 * h, h)], geometry.layers, rank, max_loras
    )
    return Term(
        "lora",
        amount,
        f"{max_loras} adapters x rank {rank} x (in + out) x 2 B x {geometry.layers} layers",
        "vllm lora/layers",
    )


def vision_encoder_term(image_tokens: int, hidden: int, images: int = 1) -> Term:
    """Encoder cache of the images of one step: tokens x hidden x 2 B (the encoder's weights are in the weight files)."""
    return Term("vision_encoder", image_tokens * hidden * 2 * images, f"{images} images x {image_tokens} tokens x {hidden} x 2 B",
                "vllm encoder cache")  # fmt: skip


# --- the device --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """Memory of one device and what of it an engine may use.

    ``guard_bytes`` stays free always (devices.guardMb); ``static_bytes`` is held by others at rest; ``dynamic_bytes`` is
    reserved for what comes and goes (other processes, graphics); ``slack_fraction`` of what remains is lost to
    fragmentation on engines that allocate per request; ``mps_limit_bytes`` an MPS client's pinned memory limit.
    """

    total_bytes: int
    guard_bytes: int = 256 * MIB
    static_bytes: int = 0
    dynamic_bytes: int = 0
    slack_fraction: float = 0.0
    mps_limit_bytes: int | None = None

    def terms(self) -> tuple[Term, ...]:
        """The parts that are not usable, by name."""
        limit = self.total_bytes if self.mps_limit_bytes is None else min(self.total_bytes, self.mps_limit_bytes)
        fixed = self.guard_bytes + self.static_bytes + self.dynamic_bytes
        slack = int(max(0, limit - fixed) * self.slack_fraction)
        rows = (
            ("mps_limit", self.total_bytes - limit, "total - CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA MPS"),
            ("static_floor", self.static_bytes, "held by others at rest", "NVML used before the engine"),
            ("dynamic_reserve", self.dynamic_bytes, "kept for what comes and goes", "configured"),
            ("guard", self.guard_bytes, "devices.guardMb", "configured"),
            ("fragmentation", slack, f"{self.slack_fraction:.0%} of the rest", "engines that allocate per request"),
        )
        return tuple(Term(*row) for row in rows if row[1])

    @property
    def usable_bytes(self) -> int:
        """What an engine may take, never negative."""
        return max(0, self.total_bytes - sum(t.bytes for t in self.terms()))
