"""Which tile a CTA works on next, from group sizes that only the device knows."""
