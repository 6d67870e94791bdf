"""The command line of the emulated engine: ``python -m extproc.local.emulator --port 8000``.

An emulator, not a real engine. ``GET /emulator/stats`` tells what it counted itself, ``POST /emulator/faults`` makes
it misbehave, ``POST /emulator/reset`` starts the counts again.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

from extproc.local.emulator_server import SERVER_NAME, EmulatedEngine
from extproc.local.emulator_settings import Settings
from extproc.local.paged import EngineShape


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m extproc.local.emulator", description="An emulated engine (not a real one)."
    )
    shape = EngineShape()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one; the first line printed names it")
    parser.add_argument(
        "--personality",
        choices=("vllm", "llamacpp"),
        default="vllm",
        help="llamacpp: cells, /props, /slots, fatal overflow",
    )
    parser.add_argument("--served-model", action="append", help="a model name; may be repeated (default: emulated)")
    parser.add_argument(
        "--blocks", type=int, help=f"KV blocks, the null block included (vllm: {shape.blocks}); llamacpp: cells (8192)"
    )
    parser.add_argument("--block-tokens", type=int, help=f"tokens per block (vllm: {shape.block_tokens}, llamacpp: 1)")
    parser.add_argument(
        "--max-sequences", type=int, help=f"most running requests (vllm: {shape.max_sequences}, llamacpp: 16 slots)"
    )
    parser.add_argument("--max-model-tokens", type=int, help="context length (default: what the pool holds)")
    parser.add_argument(
        "--step-tokens", type=int, default=shape.step_tokens, help="tokens computed per step (chunked prefill)"
    )
    parser.add_argument("--step-base-ms", type=float, default=shape.step_base_s * 1000)
    parser.add_argument("--prefill-tokens-per-s", type=float, default=shape.prefill_tokens_per_s)
    parser.add_argument(
        "--decode-tokens-per-s", type=float, default=shape.decode_tokens_per_s, help="all streams together"
    )
    parser.add_argument("--prefix-cache", action="store_true")
    parser.add_argument("--tokenizer", help="tokenizer.json to count with (default: 1 token = 4 bytes)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mean-output-tokens", type=float, default=200.0, help="mean of the drawn answer lengths")
    parser.add_argument(
        "--chunk-interval-ms", type=float, default=100.0, help="least time between two chunks of a stream"
    )
    parser.add_argument("--keep-alive-s", type=float, default=5.0, help="idle connections close after this (vLLM: 5 s)")
    return parser


def settings_from(args: argparse.Namespace) -> Settings:
    """Settings of a command line; ``ValueError`` where no engine could start with them."""
    llamacpp = args.personality == "llamacpp"
    blocks = args.blocks or (8192 if llamacpp else EngineShape().blocks)
    block_tokens = args.block_tokens or (1 if llamacpp else EngineShape().block_tokens)
    pool_tokens = (blocks - int(not llamacpp)) * block_tokens
    shape = EngineShape(
        blocks=blocks,
        block_tokens=block_tokens,
        max_sequences=args.max_sequences or (16 if llamacpp else EngineShape().max_sequences),
        max_model_tokens=args.max_model_tokens or pool_tokens,
        step_tokens=args.step_tokens,
        step_base_s=args.step_base_ms / 1000,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        decode_tokens_per_s=args.decode_tokens_per_s,
        overflow="fatal" if llamacpp else "preempt",
        prefix_cache=args.prefix_cache,
        null_block=not llamacpp,
    )
    return Settings(
        shape=shape,
        served=tuple(args.served_model or ["emulated"]),
        personality=args.personality,
        tokenizer=args.tokenizer,
        seed=args.seed,
        mean_output_tokens=args.mean_output_tokens,
        chunk_interval_s=args.chunk_interval_ms / 1000,
        keep_alive_s=args.keep_alive_s,
    )


async def serve(settings: Settings, host: str, port: int) -> None:
    """Run one emulated engine until SIGTERM or SIGINT; prints one line with its address when it is ready."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    emulated = EmulatedEngine(settings)
    bound = await emulated.listen(host, port)
    print(
        f"{SERVER_NAME} ready on http://{host}:{bound} ({settings.personality}, {settings.shape.usable_blocks} blocks)",
        flush=True,
    )
    await stop.wait()
    await emulated.close()


def main(argv: list[str] | None = None) -> int:
    """The command line; 2 for settings no engine would start with, 1 for a port that cannot be opened."""
    args = _parser().parse_args(argv)
    try:
        settings = settings_from(args)
        if args.tokenizer and not Path(args.tokenizer).is_file():
            raise ValueError(f"{args.tokenizer}: no such file; give a tokenizer.json")
    except ValueError as error:
        print(f"emulator: {error}", file=sys.stderr)
        return 2
    try:
        asyncio.run(serve(settings, args.host, args.port))
    except OSError as error:
        print(
            f"emulator: cannot listen on {args.host}:{args.port}: {error.strerror}; choose another --port",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
