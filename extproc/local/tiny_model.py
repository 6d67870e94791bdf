"""A tiny Llama with random weights, made on the spot, so that real engines have something to run without a download.

Owns the tokenizer (trained on Python's own standard library), the weights and the GGUF file. The text it produces
means nothing; its memory is as real as any model's. Two tricks make it well-behaved, both through one constant hidden
channel (channel 0, which no layer writes to): a column of the output matrix is then a bias per token. Pieces that are
not printable ASCII get a large negative one, because llama-server answers 500 when random bytes are not valid UTF-8,
and the end token gets the bias that gives it a chosen probability per step.

Needs numpy, gguf (extra ``demo``) and tokenizers.
"""

from __future__ import annotations

import json
import math
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

Matrix = npt.NDArray[np.float32]

PAD, START, END = SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: Files of the standard library that the tokenizer learns from; more cost seconds and change nothing here.
TRAINING_FILES = 60
#: Deviation of the random weights, and a bias that no sampler overcomes.
SIGMA, NEVER = 0.02, -30.0
ROPE_BASE, NORM_EPS = 10_000.0, 1e-5
#: GGUF names of the tensors of one layer, with their shape in the model's dimensions.
LAYER = {
    "attn_q": ("query", "hidden"),
    "attn_k": ("key", "hidden"),
    "attn_v": ("key", "hidden"),
    "attn_output": ("hidden", "query"),
    "ffn_gate": ("inner", "hidden"),
    "ffn_up": ("inner", "hidden"),
    "ffn_down": ("hidden", "inner"),
}
#: Outputs of a layer that are added to the hidden state and so must leave channel 0 alone.
RESIDUAL = ("attn_output", "ffn_down")
FILE_TYPES = {
    "F32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "F16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "Q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": (gguf.GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Dimensions of the model; every row length is a multiple of 32, which the block quantizations need."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 32
    vocabulary: int = 4096
    context_tokens: int = 32_768

    @property
    def sizes(self) -> dict[str, int]:
        """Lengths by the names that ``LAYER`` uses."""
        return {
            "hidden": self.hidden,
            "query": self.heads * self.head_size,
            "key": self.kv_heads * self.head_size,
            "inner": 2 * self.hidden,
        }


@dataclass(frozen=True, slots=True)
class TinyModel:
    """Where the pieces of a made model lie."""

    directory: Path
    tokenizer: Path
    config: Path

    def gguf(self, quantization: str) -> Path:
        """The GGUF file of one quantization."""
        return self.directory / f"tiny-{quantization.lower()}.gguf"


def make(
    directory: Path,
    *,
    shape: TinyShape | None = None,
    quantizations: tuple[str, ...] = ("F16",),
    end_probability: float = 0.0,
    seed: int = 0,
) -> TinyModel:
    """Write tokenizer.json, tokenizer_config.json, config.json and one GGUF per quantization into ``directory``.

    ``end_probability`` is the chance of the end token at each step; 0 means answers run to their cap.
    """
    shape = shape or TinyShape()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _train(shape.vocabulary)
    tokenizer_file = directory / "tokenizer.json"
    tokenizer.save(str(tokenizer_file))
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    (directory / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config(shape), indent=1), encoding="utf-8")
    config_file = directory / "config.json"
    config_file.write_text(json.dumps(_config(shape, vocabulary, tokenizer), indent=1), encoding="utf-8")
    tensors = _weights(shape, tokenizer, vocabulary, end_probability, np.random.default_rng(seed))
    model = TinyModel(directory, tokenizer_file, config_file)
    for quantization in quantizations:
        _write_gguf(model.gguf(quantization), shape, tokenizer, vocabulary, tensors, quantization)
    return model


def _train(vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with GPT-2's splitting, which llama.cpp knows as ``gpt-2``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TRAINING_FILES]
    tokenizer.train([str(file) for file in files], trainer)
    return tokenizer


def _tokenizer_config(shape: TinyShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.context_tokens,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }


def _config(shape: TinyShape, vocabulary: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": 2 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "eos_token_id": _id(tokenizer, END),
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    }


def _id(tokenizer: Tokenizer, piece: str) -> int:
    token = tokenizer.token_to_id(piece)
    assert token is not None, piece
    return int(token)


def _printable(tokenizer: Tokenizer, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Which token ids decode to printable ASCII (newline and tab included)."""
    good = np.zeros(vocabulary, dtype=bool)
    for piece, token in tokenizer.get_vocab().items():
        text = tokenizer.decode([token], skip_special_tokens=False)
        good[token] = (
            bool(text) and piece not in SPECIALS and all(" " <= char <= "~" or char in "\n\t" for char in text)
        )
    return good


def _weights(
    shape: TinyShape, tokenizer: Tokenizer, vocabulary: int, end_probability: float, draw: np.random.Generator
) -> dict[str, Matrix]:
    """All tensors by their GGUF names, as float32."""

    def noise(rows: int, columns: int) -> Matrix:
        return (draw.standard_normal((rows, columns)) * SIGMA).astype(np.float32)

    hidden = shape.hidden
    # Channel 0 enters as 1 beside noise; the last RMSNorm makes this of it.
    constant = math.sqrt(hidden) / math.sqrt(1 + hidden * SIGMA**2)
    good = _printable(tokenizer, vocabulary)
    embedding, output = noise(vocabulary, hidden), noise(vocabulary, hidden)
    embedding[:, 0] = 1.0
    output[:, 0] = np.where(good, 0.0, NEVER / constant)
    if end_probability > 0:
        odds = end_probability * int(good.sum()) / (1 - end_probability)
        output[_id(tokenizer, END), 0] = math.log(odds) / constant
    ones = np.ones(hidden, np.float32)
    tensors: dict[str, Matrix] = {"token_embd.weight": embedding, "output_norm.weight": ones, "output.weight": output}
    for layer in range(shape.layers):
        tensors[f"blk.{layer}.attn_norm.weight"] = ones
        tensors[f"blk.{layer}.ffn_norm.weight"] = ones
        for name, (rows, columns) in LAYER.items():
            matrix = noise(shape.sizes[rows], shape.sizes[columns])
            if name in RESIDUAL:
                matrix[0] = 0.0
            tensors[f"blk.{layer}.{name}.weight"] = matrix
    return tensors


def _write_gguf(
    path: Path, shape: TinyShape, tokenizer: Tokenizer, vocabulary: int, tensors: dict[str, Matrix], quantization: str
) -> None:
    tensor_type, file_type = FILE_TYPES[quantization]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny random")
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(2 * shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_vocab_size(vocabulary)
    writer.add_file_type(file_type)
    _write_tokenizer(writer, tokenizer, vocabulary)
    for name, matrix in tensors.items():
        if matrix.ndim == 1:
            writer.add_tensor(name, matrix)  # norms stay float32, as in every GGUF
        else:
            writer.add_tensor(name, quantize(matrix, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, vocabulary: int) -> None:
    data = json.loads(tokenizer.to_str())
    pieces = [piece for piece, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    padding = [f"<|pad{token}|>" for token in range(len(pieces), vocabulary)]
    control = {*SPECIALS, *padding}
    pieces += padding
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in data["model"]["merges"]])
    writer.add_token_types([gguf.TokenType.CONTROL if piece in control else gguf.TokenType.NORMAL for piece in pieces])
    writer.add_eos_token_id(_id(tokenizer, END))
    writer.add_pad_token_id(_id(tokenizer, PAD))
    writer.add_bos_token_id(_id(tokenizer, PAD))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
