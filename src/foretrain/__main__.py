"""Lets `python -m foretrain` do what `foretrain` does."""

from foretrain.cli.app import main

if __name__ == "__main__":
    main()
