"""`python -m hf_posenc` is `hf-posenc`."""

from hf_posenc_cli import main


if __name__ == "__main__":
    main()
