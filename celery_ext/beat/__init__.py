"""Beat on every replica: one schedules, the others stand by."""
