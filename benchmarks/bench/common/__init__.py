"""What tables of both devices share."""
