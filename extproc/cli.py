"""``kvgate``: finds the command and runs it; every command lives in ``extproc.commands``.

Owns the list of commands and the border at which a mistake becomes one line: no command shows a traceback for
bad input. Commands are imported only when they are called, so that ``kvgate --help`` is instant.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from extproc.errors import KvgateError, UsageError
from extproc.version import VERSION

#: command -> (module in extproc.commands, one line for the overview)
COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("up", "run the local stack: embedded ledger, agent, ext_proc, Envoy, engines"),
    "serve": ("serve", "run the ext_proc and access-log service"),
    "agent": ("agent", "run the node agent"),
    "check": ("check", "load a configuration as serve would and print every mistake"),
    "envoy": ("envoy_config", "print the Envoy bootstrap for a configuration"),
    "count": ("count", "count the tokens of one request body"),
    "estimate": ("estimate", "memory of a model for a number of tokens"),
    "plan": ("plan", "which model x quantisation x context fits on a device or a fleet"),
    "explain": ("explain", "the whole decision for one request body; changes nothing"),
    "status": ("status", "headroom per replica, device and lane; recent decisions"),
    "release": ("release", "end one reservation by hand"),
    "drain": ("drain", "stop or resume new work on a replica"),
    "ledger": ("ledger", "audit the ledger's sums against its reservations"),
    "demo": ("demo", "real engines under memory pressure, without and with kvgate"),
}


#: Why output could not be written, where that is nothing of ours.
OUTPUT_TROUBLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; 0 done, 1 a problem that was printed, 2 wrong usage."""
    _open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What clients sent may hold what no terminal can show, lone surrogates first of all.
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next((word for word in arguments if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="kvgate", description="Admits LLM requests by the GPU memory they will need to their end."
    )
    parser.add_argument("--version", action="version", version=f"kvgate {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module = None
    for command, (module_name, line) in COMMANDS.items():
        sub = commands.add_parser(command, help=line, description=line[0].upper() + line[1:] + ".")
        if command == name:
            module = importlib.import_module(f"extproc.commands.{module_name}")
            module.configure(sub)
    args = parser.parse_args(arguments)
    if module is None:
        parser.error("name a command")
    try:
        status = int(module.run(args))
        sys.stdout.flush()  # what fails here would otherwise fail where Python ends, out of our reach
        return status
    except KvgateError as error:
        for line in str(error).splitlines():
            print(line, file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # The reader of our output went away (head, less): nothing is wrong.
        _give_up_output()
        return 0
    except OSError as error:
        if error.errno not in OUTPUT_TROUBLE:
            raise
        print(f"kvgate {name}: cannot write ({error.strerror}); make room or write elsewhere", file=sys.stderr)
        _give_up_output()
        return 1
    except KeyboardInterrupt:
        return 130


def _open_streams() -> None:
    """Streams that the caller closed (``>&-``) lead nowhere, so that commands can use all three."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open as long as we run


def _give_up_output() -> None:
    """What is still buffered goes nowhere; else Python complains of it while it ends, with a status of its own."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


if __name__ == "__main__":
    sys.exit(main())
