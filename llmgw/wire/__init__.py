"""What agents and planes say to each other."""
