"""`python -m costlab.app`."""

from costlab.app.cli import main

if __name__ == "__main__":
    main()
