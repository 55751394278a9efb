"""Pretrain a GPT with Mixture-of-Experts layers: Megatron's arguments, plus ``--lancet-*``. Run it under torchrun."""

from megatron_lancet.training.pretrain import main

if __name__ == "__main__":
    main()
