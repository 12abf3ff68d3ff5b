"""What outlives a run: exporting trained weights to Hugging Face folders."""
