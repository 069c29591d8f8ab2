"""One file per kind of model; each is a frozen pytree that is called with work."""
