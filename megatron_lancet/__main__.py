"""``python -m megatron_lancet`` is ``lancet``; under torchrun, ``torchrun ... -m megatron_lancet evaluate ...``."""

if __name__ == "__main__":
    from megatron_lancet.cli.scripts import main

    main()
