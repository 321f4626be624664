"""The control plane: inventory, placement, reconciling, traffic, the admin API and page."""
