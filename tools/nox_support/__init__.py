"""What the noxfile calls: the packages and their backends, the shared environments, the isolation check."""
