"""Print docs/experiments.md."""

from normscope.lab.catalogue import catalogue

if __name__ == "__main__":
    print(catalogue(), end="")
