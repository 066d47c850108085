"""`python -m normscope`, the same as the command `normscope`."""

from normscope.cli import main

if __name__ == "__main__":
    main()
