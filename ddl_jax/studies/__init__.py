"""What runs and models show: figures, comparisons, reports."""
