"""Print docs/doctor.md."""

from normscope._doctor.documentation import documentation

if __name__ == "__main__":
    print(documentation(), end="")
