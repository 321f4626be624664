"""The agent: what one machine is, and the engines that run on it."""
