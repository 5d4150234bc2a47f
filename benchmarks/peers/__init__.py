"""Other ways to survive a failure, on the same model, data and machine as ``benchmarks/recovery.py``."""
