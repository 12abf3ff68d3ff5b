"""What a recipe will do, before it does it: steps, tokens, batch arithmetic, learning rates, bytes."""
