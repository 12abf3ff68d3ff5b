"""What outlives a run: checkpoints to go on from, and exports for others."""
