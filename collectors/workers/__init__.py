"""Workers, however they are reached: their lives, their lines, and what they gather."""
