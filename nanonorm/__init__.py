"""The ground floor: what every room above stands on. It imports nothing of the project."""
