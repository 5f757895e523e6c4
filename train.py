"""The habit of NavRL's users: `python train.py key=value …` is `penstock train key=value …`."""

import sys

from penstock.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
