"""`llmgw ctl`: speaks HTTPS to the plane and nothing else."""
