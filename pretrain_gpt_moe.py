"""Pretrain a GPT with Mixture-of-Experts layers: Megatron's arguments, plus ``--lancet-*``. Run it under torchrun."""

if __name__ == "__main__":
    # Only here: Megatron's checkpoint writer starts a process that imports this file, and needs nothing of it.
    from megatron_lancet.training.pretrain import main

    main()
