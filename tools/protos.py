"""Regenerates `gateway/v1` from `protos/`: `make protos`.

The generators are pinned to the oldest supported grpcio and protobuf, in a temporary environment of their own:
generated code refuses to run with anything older than what made it.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATORS = (
    "grpcio==1.80.0",
    "grpcio-tools==1.80.0",
    "mypy-protobuf==3.7.0",
    "protobuf==6.33.6",
    "types-protobuf==6.32.1.20251210",
    "setuptools==80.9.0",
)
FILES = ("gateway/v1/gateway.proto", "gateway/v1/admin.proto")


def main() -> int:
    """Run the generators; returns protoc's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        bin_folder = Path(folder) / "bin"
        python = bin_folder / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", *GENERATORS], check=True)
        protoc = [str(python), "-m", "grpc_tools.protoc", "-Iprotos", "--python_out=.", "--grpc_python_out=."]
        for name in ("mypy", "mypy_grpc"):
            protoc += [f"--plugin=protoc-gen-{name}={bin_folder / f'protoc-gen-{name}'}", f"--{name}_out=quiet:."]
        protoc += (f"protos/{file}" for file in FILES)
        return subprocess.run(protoc, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
