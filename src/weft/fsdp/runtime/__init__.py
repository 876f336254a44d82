"""What the units of one model share: passes, their order, and what the ranks agree on."""
