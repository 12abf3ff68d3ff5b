"""What watches a run: the progress line, the plot, the graceful stop and the failure report, one Lightning callback each."""
