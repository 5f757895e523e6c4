"""`python -m penstock` is `penstock`."""

import sys


def main() -> int:
    """Run the command; Ctrl-C while it is still being loaded ends it with one line, too."""
    try:
        from penstock import cli

        return cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("penstock: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
