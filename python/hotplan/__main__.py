"""``python -m hotplan``: the same as the ``hotplan`` command."""

from hotplan.cli.main import main

if __name__ == "__main__":
    main()
