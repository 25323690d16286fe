"""`python -m aphq` is `aphq`."""

from aphq.cli import main

if __name__ == "__main__":
    main()
