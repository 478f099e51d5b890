"""``python -m collc``."""

from collc.cli import main

if __name__ == "__main__":
    main()
