"""torchrun's entry point, for a process that runs scripts and no modules."""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
