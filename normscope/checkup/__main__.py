"""Print docs/doctor.md."""

from normscope.checkup.documentation import documentation

if __name__ == "__main__":
    print(documentation(), end="")
