"""`python -m hf_posenc` is `hf-posenc`."""

from .cli import main


if __name__ == "__main__":
    main()
