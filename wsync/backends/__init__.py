"""The built-in backends, one file each: a scheme, its transport and its rendezvous."""
