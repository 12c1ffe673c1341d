"""The same targets under coverage guidance, for who has `atheris` (it is no dependency of this project).

`python -m tests.fuzz.atheris_main TARGET [libFuzzer options]`, with the virtual environment's packages on its path.
Frames are the target's own parts, joined by a separator; what a target draws at random (`answers`) is out of place here.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gateway"]):
    from tests.fuzz.runner import TARGETS

SEPARATOR = b"\xc1\xc1"


def main() -> None:
    name = sys.argv.pop(1)
    target = TARGETS[name]
    run = target.make()

    def test_one_input(data: bytes) -> None:
        run(data.split(SEPARATOR))

    with tempfile.TemporaryDirectory(prefix="rgfuzz-") as corpus:
        for number, frame in enumerate(target.corpus()):
            (Path(corpus) / str(number)).write_bytes(SEPARATOR.join(frame))
        atheris.Setup([*sys.argv, corpus], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
