"""`python -m gateway` is `rankgate`."""

from gateway.cli import main

if __name__ == "__main__":
    main()
