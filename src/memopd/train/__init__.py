"""Training: SFT, advantages, losses, the loop, sharding, checkpoints."""
