"""`python -m engine_stub`: the same as the installed command."""

from engine_stub.cli import main

if __name__ == "__main__":
    main(prog_name="engine-stub")
