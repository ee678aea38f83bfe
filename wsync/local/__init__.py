"""The ends of a line on one machine: sockets for words, shared memory for weights."""
