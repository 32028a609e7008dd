"""``python -m drivetrain``: the command line where the program itself isn't on the PATH."""

from drivetrain.cli import main

if __name__ == "__main__":
    main(prog_name="drivetrain")
