"""What the two ends of a line say to each other, whatever the line is made of."""
