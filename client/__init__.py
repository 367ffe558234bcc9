"""Client and benchmark commands."""
